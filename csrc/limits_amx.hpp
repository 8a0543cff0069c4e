// Loops that measure the limits of the AMX tile instructions, which products use on machines that have them.
#pragma once

#include "arguments.hpp"
#include "share.hpp"
#include "team.hpp"
#include "tiles_amx.hpp"

namespace kvik {
namespace {

// `steps` for each thread of the team, in tasks that any thread may take: two tiles of rows times two of
// columns, as in products of many rows. each: operations of one pair of elements of tiles, four bytes
// each. operand: the bytes of all elements. result: all operations.
template <class Product>
void repeat_tiles(Team& team, int64_t steps, double each, void* result, uint32_t operand) {
    constexpr int64_t kTasks = 16, kElements = kRegisterBytes / 4;
    const int64_t all = steps * team.size, tasks = kTasks * team.size;
    each_task(team, tasks, [&](int64_t task) {
        alignas(kRegisterBytes) uint32_t rows[kRegisterRows][kElements];
        for (auto& row : rows)
            for (uint32_t& element : row) element = operand;
        TileShapes shapes;
        shapes.set(2 * kRegisterRows, kProductSteps);
        tile_load<kXTile>(rows, kRegisterBytes);
        tile_load<kXTile + 1>(rows, kRegisterBytes);
        tile_load<kWeightTile>(rows, kRegisterBytes);
        tile_load<kWeightTile + 1>(rows, kRegisterBytes);
        const Range range = part_of(all, task, tasks);
        for (int64_t step = range.begin; step < range.end; step++) {
            Product::template add<kSumsTile, kXTile, kWeightTile>();
            Product::template add<kSumsTile + 1, kXTile, kWeightTile + 1>();
            Product::template add<kSumsTile + 2, kXTile + 1, kWeightTile>();
            Product::template add<kSumsTile + 3, kXTile + 1, kWeightTile + 1>();
        }
    });
    *static_cast<double*>(result) = each * 4 * kRegisterRows * kElements * kProductSteps * double(all);
}

void peak_bf16(const peak_bf16_args& a, Team& team) {
    repeat_tiles<ProductBF16>(team, a.steps, 4.0, a.result, 0x3f003f00);
}

void peak_i8(const peak_i8_args& a, Team& team) {
    repeat_tiles<ProductI8>(team, a.steps, 8.0, a.result, 0x01010101);
}

}  // namespace
}  // namespace kvik

// y = act(x W^T + bias) + residual, for every kind of matrix.
#pragma once

#include "activation.hpp"
#include "arguments.hpp"
#include "packed.hpp"
#include "prepared_rows.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"
#include "tiles.hpp"
#if defined(__AMX_TILE__) || defined(KVIK_EMULATE_AMX)
#include "tiles_amx.hpp"
#endif

namespace kvik {
namespace {

#if defined(__AMX_TILE__) || defined(KVIK_EMULATE_AMX)
using Tiles = AmxTiles;
#else
using Tiles = VectorTiles;
#endif

// Bytes of weights, and rows of x, that a thread takes at a time: few, so that no thread waits long for the last.
constexpr int64_t kTaskBytes = 65536;
constexpr int64_t kTaskRows = 256, kUnpackedTaskRows = 512;  // unpacking costs time
// Bytes of x that stay in the L2 cache while one tile after another is multiplied with the rows of a task.
// If the rows are longer, only a span of x stays there, for kGroupTiles tiles, with their sums.
constexpr int64_t kTaskXBytes = 1 << 20;
constexpr int64_t kGroupTiles = 8;
// From this many rows per thread on, each thread has its own rows: their outputs stay in the caches of its core. With
// fewer, the cores share the rows, and each reads its part of the weights.
constexpr int64_t kOwnRows = 128;
// Bytes of weights that are unpacked at a time for a single block of rows: they stay in the L1 cache.
// With this and `kSpanBytes`, spans are whole products of AMX.
constexpr int64_t kUnpackedBytes = 16384;

constexpr int64_t kAheadSteps = kAhead / kStepBytes;

// Numbers of x that justify a thread: a microsecond.
constexpr int64_t kPreparedPerThread = 8192;

KVIK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

struct LinearPlan {
    int64_t tiles, steps, groups;
    int64_t step_bytes;   // of a row of x
    int64_t scale_bytes;  // of a tile
    int64_t span;      // steps
    int64_t turn;         // step of a tile from which a single block of rows reads ahead in the next one
    int64_t task_tiles;  // tiles of a task
    int64_t group_tiles;  // how many of these are multiplied with one span of x before the next span
    int64_t block_rows, row_unit, row_blocks, task_blocks;
    Unpack unpack;  // or null
    bool paired, in_place, own_rows;
    int64_t x_bytes, ordered_bytes, sums_bytes, wide_bytes;
};

LinearPlan plan_linear(const linear_args& a, int threads) {
    LinearPlan p = {};
    p.paired = is_paired(a.activation);  // gate and up share tiles
    p.tiles = count_tiles(a.outputs, p.paired);
    p.steps = divide_up(a.inputs, inputs_per_step(a.kind));
    p.groups = count_groups(a.inputs, a.group);
    p.step_bytes = x_step_bytes(a.kind);
    p.scale_bytes = tile_scale_bytes(a.kind, p.groups);
    p.block_rows = Tiles::block_rows(a);
    p.row_unit = Tiles::row_unit(a);
    p.row_blocks = divide_up(a.rows, p.block_rows);
    p.unpack = Tiles::unpack_of(a);
    p.in_place = readable_in_place(a) && (a.rows <= 2 || Tiles::reads_spread(a));
    p.own_rows = a.rows <= 2;
    if (p.row_blocks == 1) {
        p.span = p.unpack ? kUnpackedBytes / (2 * kStepBytes) : p.steps;
        const int64_t even = divide_up(p.tiles, 4 * threads);  // small matrices: a few chunks for each thread
        p.task_tiles = smaller(even, 1 + kTaskBytes / (p.steps * kStepBytes + 1));
        p.task_blocks = p.group_tiles = 1;
    } else {
        p.span = Tiles::kSpanBytes / p.step_bytes;
        p.task_blocks = smaller(p.row_blocks, (p.unpack ? kUnpackedTaskRows : kTaskRows) / p.block_rows);
        if (!p.unpack && a.rows >= kOwnRows * threads) {
            const int64_t tasks = divide_up(divide_up(p.row_blocks, p.task_blocks), threads) * threads;
            p.task_blocks = divide_up(p.row_blocks, tasks);
        }
        const auto few = [&] {
            return divide_up(p.tiles, p.task_tiles) * divide_up(p.row_blocks, p.task_blocks) < 8 * threads;
        };
        p.task_tiles = p.task_blocks * p.block_rows * row_bytes(a) > kTaskXBytes ? kGroupTiles : 1;
        while (p.task_tiles > 1 && few()) p.task_tiles /= 2;
        while (p.task_blocks > 1 && few()) p.task_blocks = divide_up(p.task_blocks, 2);
        p.group_tiles = p.task_tiles;
    }
    // Matrices with groups are summed over whole groups.
    int64_t unit = kAheadSteps;
    if (a.group) {
        unit = summed_inputs(a) / inputs_per_step(a.kind);
        p.span = divide_up(p.span, unit) * unit;
    }
    p.turn = p.steps > kAheadSteps && !p.unpack ? (p.steps - kAheadSteps) / unit * unit : 0;
    const bool once = p.span >= p.steps;
    p.x_bytes = p.in_place ? 0 : prepared_bytes(a, a.rows);
    p.ordered_bytes = ordered_bytes(a);
    p.sums_bytes = (once ? 1 : p.group_tiles * p.task_blocks) * p.block_rows * kTile * 4;
    p.wide_bytes = p.unpack ? smaller(p.span, p.steps) * 2 * kStepBytes : 0;
    return p;
}

template <class T>
KVIK_INLINE F32 load_some(const T* p, int n) {
    return n >= kLanes ? load(p) : load(p, n > 0 ? n : 0);
}
template <class T>
KVIK_INLINE void store_some(T* p, F32 v, int n) {
    if (n >= kLanes)
        store(p, v);
    else if (n > 0)
        store(p, v, n);
}

// Turns the sums of a tile into outputs: scales and bias of its lanes.
struct TileEnd {
    F32 scale[kTileVectors], bias[kTileVectors];
    int64_t column;  // the first of y
    int valid;
    bool scaled, x_scaled;

    // Inlined, so that the arrays stay in registers.
    inline __attribute__((always_inline)) TileEnd(const linear_args& a, int64_t tile) {
        const bool paired = is_paired(a.activation);
        const int64_t width = paired ? kHalfTile : kTile, columns = paired ? a.outputs / 2 : a.outputs;
        column = tile * width;
        valid = int(smaller(width, columns - column));
        const int vectors = int(width / kLanes);
        scaled = has_scales(a.kind);
        x_scaled = scales_rows(a);
        const int64_t scale_bytes = scaled ? tile_scale_bytes(a.kind, count_groups(a.inputs, a.group)) : 0;
        const char* scales = (const char*)a.scales + tile * scale_bytes;
        for (int v = 0; v < kTileVectors; v++) {
            scale[v] = scaled ? load((const float*)scales + v * kLanes) : broadcast(1.0f);
            // the second half of a pair belongs to `up`
            const int64_t at = v < vectors ? column + v * kLanes : a.bias_pair + column + (v - vectors) * kLanes;
            bias[v] = a.bias ? load_some((const float*)a.bias + at, valid - v % vectors * kLanes) : zero();
        }
    }

    // x W^T + b of one row.
    inline __attribute__((always_inline)) void values(const float* sums, F32 x_scale, F32* value) const {
#pragma GCC unroll 8
        for (int v = 0; v < kTileVectors; v++) {
            value[v] = load(sums + v * kLanes);
            if (scaled) value[v] = mul(value[v], mul(scale[v], x_scale));
            value[v] = add(value[v], bias[v]);
        }
    }
};

// Computes a tile's columns of y from its sums. The activation, and whether the tile has all of its columns, are
// constants in the loop, and the rest is in registers, because the next block waits for this.
template <class X, class Y>
void finish(const linear_args& a, const PreparedRows& x, int64_t tile, int64_t first, int64_t rows, const float* sums) {
    const TileEnd end(a, tile);
    const int64_t y_stride = a.y_stride, residual_stride = a.residual_stride, ahead = rows * y_stride;
    const float* x_scales = end.x_scaled ? x.scales + first : nullptr;
    Y* y = (Y*)a.y + first * y_stride + end.column;
    const X* residual = a.residual ? (const X*)a.residual + first * residual_stride + end.column : nullptr;
    const int64_t more = a.rows - first - rows;
    const auto each_row = [&](auto activation, auto whole) KVIK_INLINED {
        constexpr int kVectors = is_paired(activation) ? kTileVectors / 2 : kTileVectors;
        for (int64_t row = 0; row < rows; row++) {
            F32 value[kTileVectors];
            // The next block of rows writes here: its lines arrive while it is multiplied.
            if (row < more) __builtin_prefetch(y + ahead, 1, 2);
            end.values(sums, broadcast(x_scales ? x_scales[row] : 1.0f), value);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; v++) {
                F32 result = activated(activation, value[v]);
                if (is_paired(activation)) result = mul(result, factor_of(activation, value[v + kTileVectors / 2]));
                const int n = whole ? kLanes : end.valid - v * kLanes;
                if (n <= 0) break;
                if (residual) result = add(result, load_some(residual + v * kLanes, n));
                store_some(y + v * kLanes, result, n);
            }
            sums += kTile;
            y += y_stride;
            if (residual) residual += residual_stride;
        }
    };
    with_activation(a.activation, [&](auto activation) KVIK_INLINED {
        if (end.valid == (is_paired(activation) ? kHalfTile : kTile))
            each_row(activation, std::true_type{});
        else
            each_row(activation, std::false_type{});
    });
}

using Finish = void (*)(const linear_args&, const PreparedRows&, int64_t, int64_t, int64_t, const float*);

Finish finish_of(const linear_args& a) {
    if (a.dtype == kBF16) return a.out_dtype == kBF16 ? finish<bf16, bf16> : finish<bf16, float>;
    return a.out_dtype == kBF16 ? finish<float, bf16> : finish<float, float>;
}

// Some tiles and rows, a span of the inputs at a time.
//   end(a, x, tile, first row, rows, sums): called with the finished sums of some rows.
template <class End>
struct TileWork {
    const linear_args& a;
    const LinearPlan& plan;
    const PreparedRows x;
    const End& end;
    float* sums;
    char* wide;
    Tiles& tiles;

    const char* weight_of(int64_t tile) const { return (const char*)a.weight + tile * plan.steps * kStepBytes; }

    // next: weights of the tile that this thread takes after these, or null. While blocks of rows are multiplied with
    // a cached span, the next span is prefetched, so that memory is always busy. A single block reads ahead in its own
    // tile, and at the end in the next tile, which need not follow it in memory.
    void run(int64_t tile, int64_t last_tile, int64_t first_block, int64_t last_block, const char* next) const {
        for (int64_t end; tile < last_tile; tile = end) {
            end = smaller(tile + plan.group_tiles, last_tile);
            run_group(tile, end, first_block, last_block, end < last_tile ? weight_of(end) : next);
        }
    }

    void run_group(int64_t first, int64_t last, int64_t first_block, int64_t last_block, const char* next) const {
        const int64_t blocks = last_block - first_block, stride = divide_up(kStepBytes, blocks);
        const bool turns = blocks == 1 && next != weight_of(last);
        int64_t step = 0;
        do {
            int64_t steps = smaller(plan.span, plan.steps - step);
            if (turns && step < plan.turn) steps = smaller(steps, plan.turn - step);
            float* own = sums;
            for (int64_t tile = first; tile < last; tile++, own += plan.task_blocks * plan.block_rows * kTile) {
                const char* weight = weight_of(tile);
                if (plan.unpack) plan.unpack(weight + step * kStepBytes, steps, wide);
                const char* behind = tile + 1 < last             ? weight_of(tile + 1) + step * kStepBytes
                                     : step + steps < plan.steps ? weight_of(first) + (step + steps) * kStepBytes
                                                                 : next;
                for (int64_t block = first_block; block < last_block; block++) {
                    const char* ahead = weight + step * kStepBytes + kAhead;
                    int64_t ahead_stride = kStepBytes;
                    if (turns && plan.turn && step >= plan.turn) {
                        ahead = next ? next : weight + step * kStepBytes;
                    } else if (blocks > 1 && behind) {
                        ahead = behind + (block - first_block) * steps * stride;
                        ahead_stride = stride;
                    }
                    run_block(tile, weight, block, first_block, own, step, steps, ahead, ahead_stride);
                }
            }
            step += steps;
        } while (step < plan.steps);
    }

    void run_block(int64_t tile, const char* weight, int64_t block, int64_t first_block, float* own, int64_t step,
                   int64_t steps, const char* ahead, int64_t ahead_stride) const {
        const int64_t row = block_start(block), rows = block_start(block + 1) - row;
        const bool last = step + steps >= plan.steps, once = steps >= plan.steps, unpacked = plan.unpack != nullptr;
        Span s = {};
        s.ahead = ahead;
        s.ahead_stride = ahead_stride;
        s.rows = int(rows);
        s.weight = unpacked ? wide : weight + step * kStepBytes;
        s.steps = unpacked ? 2 * steps : steps;
        s.x = x.data + row * x.stride + step * plan.step_bytes;
        s.x_stride = x.stride;
        s.sums = own + (once ? 0 : (row - block_start(first_block)) * kTile);
        s.first = step == 0;
        s.last = last;
        const int64_t group_steps = divide_up(summed_inputs(a), inputs_per_step(a.kind)), group = step / group_steps;
        s.group_steps = unpacked ? 2 * group_steps : group_steps;
        s.groups_stride = x.sums_stride;
        if (quantises(a.kind)) s.x_sums = x.sums + row * x.sums_stride + group;
        if (scales_groups(a)) s.x_scales = x.scales + row * x.scales_stride + group;
        if (a.group) {
            const char* scales = (const char*)a.scales + tile * plan.scale_bytes + kFactorBytes;
            s.scales = scales + group * group_scale_bytes(a.kind);
            s.scale_bytes = scale_bytes(a.kind);
        }
        if (a.zeros) s.zeros = (const char*)a.zeros + (tile * plan.groups + group) * group_zero_bytes(a.kind);
        tiles.multiply(a.kind, unpacked, s);
        if (last) end(a, x, tile, row, rows, s.sums);
    }

    // The blocks have nearly equal sizes, in whole units.
    int64_t block_start(int64_t block) const {
        return smaller(divide_up(a.rows, plan.row_unit) * block / plan.row_blocks * plan.row_unit, a.rows);
    }
};

// The rows that all threads read; without data where each thread prepares its own copy, which is
// faster for one or two rows than to wait for another thread.
PreparedRows prepare_all(const linear_args& a, const LinearPlan& plan, Team& team) {
    PreparedRows x = {};
    if (plan.in_place) {
        x.data = (const char*)a.x;
        x.stride = a.x_stride * (a.dtype == kBF16 ? 2 : 4);
    } else if (!plan.own_rows) {
        x = prepared_at(a, a.rows, (char*)shared_scratch(team, 0, size_t(plan.x_bytes)));
        const int64_t parts = parts_for(team, a.rows, kPreparedPerThread / (a.inputs > 0 ? a.inputs : 1));
        together(team, parts, [&](Member& member) {
            char* ordered = (char*)member.scratch(size_t(plan.ordered_bytes));
            for (int64_t part; (part = member.next()) >= 0;) {
                const Range rows = part_of(a.rows, part, parts);
                prepare(a, rows.begin, rows.end, x, ordered);
            }
        });
    }
    return x;
}

void linear(const linear_args& a, Team& team) {
    if (a.rows == 0 || a.outputs == 0) return;
    const LinearPlan plan = plan_linear(a, team.size);
    const PreparedRows common = prepare_all(a, plan, team);
    const int64_t tile_tasks = divide_up(plan.tiles, plan.task_tiles);
    // Tasks of the same rows are consecutive, so that their x is in a cache.
    const auto tile_of = [&](int64_t task) { return task % tile_tasks * plan.task_tiles; };
    const int64_t row_tasks = divide_up(plan.row_blocks, plan.task_blocks);
    const Finish finish = finish_of(a);
    together(team, tile_tasks * row_tasks, [&](Member& member) {
        const int64_t own_x_bytes = common.data ? 0 : plan.x_bytes;
        char* sums = (char*)member.scratch(
            size_t(plan.sums_bytes + plan.wide_bytes + plan.ordered_bytes + own_x_bytes));
        char* wide = sums + plan.sums_bytes;
        char* ordered = wide + plan.wide_bytes;
        PreparedRows x = common;
        if (!x.data) {
            x = prepared_at(a, a.rows, ordered + plan.ordered_bytes);
            prepare(a, 0, a.rows, x, ordered);
        }
        Tiles tiles;
        const TileWork<Finish> work = {a, plan, x, finish, (float*)sums, wide, tiles};
        for (int64_t task = member.next(), next; task >= 0; task = next) {
            next = member.next();
            const int64_t tile = tile_of(task), block = task / tile_tasks * plan.task_blocks;
            const int64_t last_block = smaller(block + plan.task_blocks, plan.row_blocks);
            const int64_t last_tile = smaller(tile + plan.task_tiles, plan.tiles);
            const char* behind = next < 0 ? nullptr : work.weight_of(tile_of(next));
            work.run(tile, last_tile, block, last_block, behind);
        }
    }, plan.row_blocks > 1);
}

}  // namespace
}  // namespace kvik

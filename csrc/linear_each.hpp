// y = x W^T for each head, with the head's own matrix: the products of `linear`, one head to a task.
#pragma once

#include "linear.hpp"

namespace kvik {
namespace {

// The product of one head as arguments of `linear`.
linear_args head_of(const linear_each_args& a, int64_t head) {
    const int64_t item = a.dtype == kBF16 ? 2 : 4;
    const int64_t steps = divide_up(a.inputs, inputs_per_step(a.kind));
    linear_args one{};
    one.x = static_cast<char*>(a.x) + head * a.x_head_stride * item;
    one.x_stride = a.x_stride;
    one.rows = a.rows;
    one.weight = static_cast<char*>(a.weight) + head * (a.head_rows / kTile) * steps * kStepBytes;
    one.kind = a.kind;
    one.inputs = a.inputs;
    one.outputs = a.outputs;
    one.y = static_cast<char*>(a.y) + head * a.outputs * item;
    one.y_stride = a.heads * a.outputs;
    one.dtype = one.out_dtype = a.dtype;
    return one;
}

void linear_each(const linear_each_args& a, Team& team) {
    if (a.rows == 0) return;
    const LinearPlan plan = plan_linear(head_of(a, 0), 1);
    const Finish finish = finish_of(head_of(a, 0));
    together(team, a.heads, [&](Member& member) {
        const int64_t x_bytes = plan.in_place ? 0 : plan.x_bytes;
        char* sums = (char*)member.scratch(size_t(plan.sums_bytes + plan.wide_bytes + x_bytes));
        char* wide = sums + plan.sums_bytes;
        Tiles tiles;
        for (int64_t head; (head = member.next()) >= 0;) {
            const linear_args one = head_of(a, head);
            PreparedRows x{};
            if (plan.in_place) {
                x.data = (const char*)one.x;
                x.stride = one.x_stride * (one.dtype == kBF16 ? 2 : 4);
            } else {
                x = prepared_at(one, one.rows, wide + plan.wide_bytes);
                prepare(one, 0, one.rows, x, nullptr);
            }
            const TileWork<Finish> work = {one, plan, x, finish, (float*)sums, wide, tiles};
            for (int64_t tile = 0; tile < plan.tiles; tile++)
                for (int64_t block = 0; block < plan.row_blocks; block += plan.task_blocks) {
                    const int64_t last = smaller(block + plan.task_blocks, plan.row_blocks);
                    work.run(tile, tile + 1, block, last, tile + 1 < plan.tiles ? work.weight_of(tile + 1) : nullptr);
                }
        }
    });
}

}  // namespace
}  // namespace kvik

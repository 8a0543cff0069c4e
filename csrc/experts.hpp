// Mixture of experts: the choice of experts for each row, and the MLPs of the chosen experts.
#pragma once

#include <cfloat>
#include <cmath>

#include "arguments.hpp"
#include "linear.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

// The router.

constexpr int64_t kMostExperts = 1024;
constexpr int64_t kRoutedPerThread = 2048;  // logits: a few microseconds

// The largest of n values that is not taken; the first wins a tie.
KVIK_INLINE int64_t first_largest(const float* values, const bool* taken, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

// The score of a group of n experts: its best, or the sum of its two best.
KVIK_INLINE float group_score(const float* choice, int64_t n, bool two) {
    float best = choice[0], second = -INFINITY;
    for (int64_t i = 1; i < n; i++) {
        if (choice[i] > best) {
            second = best;
            best = choice[i];
        } else if (choice[i] > second) {
            second = choice[i];
        }
    }
    return two && n > 1 ? best + second : best;
}

// NaN counts as 0, so that a row of them chooses some experts and gets NaN from elsewhere.
void scores_of(const route_args& a, const float* logits, float* score) {
    if (a.scores == kSparsemixer || a.scores == kLogitScores) {
        for (int64_t i = 0; i < a.experts; i++) {
            const float value = logits[i] == logits[i] ? logits[i] : 0.0f;
            score[i] = value > FLT_MAX ? FLT_MAX : value < -FLT_MAX ? -FLT_MAX : value;
        }
        return;
    }
    if (a.scores == kRootSoftplusScores) {
        for (int64_t i = 0; i < a.experts; i++) {
            const float value = logits[i] > 0.0f ? logits[i] : 0.0f;
            score[i] = sqrtf(value + log1pf(expf(-fabsf(logits[i]))));
            if (!(score[i] >= 0.0f)) score[i] = 0.0f;
        }
        return;
    }
    F32 top = broadcast(-INFINITY);
    for (int64_t i = 0; i < a.experts; i += kLanes) {
        const int n = int(smaller(kLanes, a.experts - i));
        const F32 value = load(logits + i, n);
        top = max(top, n < kLanes ? select(lanes_of((1u << n) - 1), value, broadcast(-INFINITY)) : value);
    }
    const F32 most = broadcast(largest(top)), one = broadcast(1.0f);
    float total = 0.0f;
    for (int64_t i = 0; i < a.experts; i += kLanes) {
        const int n = int(smaller(kLanes, a.experts - i));
        const F32 value = load(logits + i, n);
        store(score + i, a.scores == kSigmoidScores ? div(one, add(one, exp(sub(zero(), value)))) : exp(sub(value, most)), n);
    }
    for (int64_t i = 0; i < a.experts; i++) {
        if (!(score[i] >= 0.0f)) score[i] = 0.0f;
        total += score[i];
    }
    if (a.scores == kSigmoidScores || total == 0.0f) return;
    for (int64_t i = 0; i < a.experts; i++) score[i] /= total;
}

// The share of the best of n logits among those that are not taken and near it; see `Router`.
float share_among_near(const float* logits, const bool* taken, int64_t n, int64_t best, float jitter) {
    const float top = logits[best];
    float total = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        const float size = logits[i] < 0.0f ? -logits[i] : logits[i];
        const bool far = (top - logits[i]) / (size > top ? size : top) > 2.0f * jitter;
        if (!taken[i] && !far) total += expf(logits[i] - top);
    }
    return 1.0f / total;
}

void route_row(const route_args& a, int64_t row) {
    float score[kMostExperts + kLanes], choice[kMostExperts], of_group[kMostExperts];
    bool taken[kMostExperts] = {}, left_out[kMostExperts] = {};
    scores_of(a, (const float*)a.logits + row * a.stride, score);
    const float* correction = (const float*)a.correction;
    for (int64_t i = 0; i < a.experts; i++) choice[i] = correction ? score[i] + correction[i] : score[i];
    if (a.groups > 1) {
        const int64_t size = a.experts / a.groups;
        for (int64_t g = 0; g < a.groups; g++) of_group[g] = group_score(choice + g * size, size, a.two_of_group);
        for (int64_t i = 0; i < a.experts; i++) taken[i] = true;
        for (int64_t n = 0; n < a.kept_groups; n++) {
            const int64_t g = first_largest(of_group, left_out, a.groups);
            left_out[g] = true;
            for (int64_t i = g * size; i < (g + 1) * size; i++) taken[i] = false;
        }
    }
    const int64_t columns = a.active + (a.zero > 0);
    int64_t* ids = (int64_t*)a.ids + row * columns;
    float* weights = (float*)a.weights + row * columns;
    const int64_t* given = a.given ? (const int64_t*)a.given + row * a.active : nullptr;
    float total = 0.0f;
    for (int64_t n = 0; n < a.active; n++) {
        const int64_t best = given ? given[n] : first_largest(choice, taken, a.experts);
        ids[n] = best;
        weights[n] = score[best];
        if (a.scores == kSparsemixer) weights[n] = share_among_near(score, taken, a.experts, best, float(a.jitter));
        if (a.scores == kLogitScores) weights[n] = 1.0f / (1.0f + expf(-score[best]));
        total += weights[n];
        taken[best] = true;
    }
    const float scale = float(a.scale);
    const float* each_scale = (const float*)a.each_scale;
    for (int64_t n = 0; n < a.active; n++) {
        if (a.normalise) weights[n] = total > 0.0f ? weights[n] / total : 0.0f;
        weights[n] *= scale;
        if (each_scale) weights[n] *= each_scale[ids[n]];
    }
    if (!a.zero) return;
    float returned = 0.0f;
    for (int64_t n = 0; n < a.active; n++) {
        if (ids[n] < a.experts - a.zero) continue;
        returned += weights[n];
        ids[n] = -1;
    }
    ids[a.active] = -1;
    weights[a.active] = returned;
}

void route(const route_args& a, Team& team) {
    each_range(team, a.rows, kRoutedPerThread / a.experts, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) route_row(a, row);
    });
}

// The MLPs. Rows are sorted by expert. First every chosen expert computes its inner activations, then tiles of
// columns of y are summed over the experts in order: a row's sums never depend on other rows.

// A matrix of an expert; pointers are null where it has none.
struct ExpertMatrix {
    const void *weight, *scales, *zeros, *order, *bias, *x_scale;
};

// The rows of an expert that was chosen, as the products see them.
struct Chosen {
    int64_t expert, first, rows;  // first: of the sorted rows
    linear_args args;
    LinearPlan plan;
    int64_t first_task;  // index among the tasks of all experts
};

struct SortedRows {
    int64_t count, chosen;  // rows that have an expert; experts held here that were chosen
    Range own;        // sorted rows of the experts held here
    int32_t* row;     // [count], of x and y
    float* weight;    // [count]
    int32_t* at;      // [count], index among the chosen experts held here
    Chosen* experts;  // [chosen]
};

constexpr int64_t kAligned = 64;
constexpr int64_t kSumBytes = 262144;  // of y that a thread sums at a time
constexpr int64_t kSortedPerThread = 8;  // rows to prepare

KVIK_INLINE int64_t aligned(int64_t bytes) { return divide_up(bytes, kAligned) * kAligned; }

// A counting sort by expert; rows of an expert stay in their order.
SortedRows sort_rows(const experts_args& a, char* memory) {
    SortedRows s = {};
    const int64_t pairs = a.rows * a.active;
    s.row = (int32_t*)memory;
    s.weight = (float*)(memory + aligned(4 * pairs));
    s.at = (int32_t*)(memory + 2 * aligned(4 * pairs));
    s.experts = (Chosen*)(memory + 3 * aligned(4 * pairs));
    const int64_t* ids = (const int64_t*)a.ids;
    int64_t next[kMostExperts] = {}, index[kMostExperts];
    for (int64_t i = 0; i < pairs; i++)
        if (ids[i] >= 0) next[ids[i]]++;
    int64_t first = 0;
    for (int64_t e = 0; e < a.count; e++) {
        const int64_t rows = next[e];
        next[e] = first;
        index[e] = s.chosen;
        first += rows;
        if (!rows || e < a.first || e >= a.first + a.owned) continue;
        Chosen& one = s.experts[s.chosen++];
        one.expert = e - a.first;
        one.first = first - rows;
        one.rows = rows;
        if (s.chosen == 1) s.own.begin = one.first;
        s.own.end = first;
    }
    s.count = first;
    for (int64_t i = 0; i < pairs; i++) {
        if (ids[i] < 0) continue;
        const int64_t to = next[ids[i]]++;
        s.row[to] = int32_t(i / a.active);
        s.weight[to] = a.weights ? ((const float*)a.weights)[i] : 1.0f;
        s.at[to] = int32_t(index[ids[i]]);
    }
    return s;
}

void set_matrix(linear_args& l, const ExpertMatrix& m) {
    l.weight = const_cast<void*>(m.weight);
    l.scales = const_cast<void*>(m.scales);
    l.zeros = const_cast<void*>(m.zeros);
    l.order = const_cast<void*>(m.order);
    l.bias = const_cast<void*>(m.bias);
    l.x_scale = const_cast<void*>(m.x_scale);
}

// Scratch of a thread for the products of any of the chosen experts.
struct ProductScratch {
    int64_t sums, wide;
    explicit ProductScratch(const SortedRows& s) : sums(0), wide(0) {
        for (int64_t i = 0; i < s.chosen; i++) {
            if (s.experts[i].plan.sums_bytes > sums) sums = s.experts[i].plan.sums_bytes;
            if (s.experts[i].plan.wide_bytes > wide) wide = s.experts[i].plan.wide_bytes;
        }
    }
    size_t bytes() const { return size_t(sums + wide); }
};

// The prepared rows of an expert among those of all.
PreparedRows rows_from(const PreparedRows& all, int64_t first) {
    PreparedRows x = all;
    x.data += first * all.stride;
    x.scales += first * all.scales_stride;
    x.sums += first * all.sums_stride;
    return x;
}

template <class X>
void weigh_row(const X* x, int64_t count, float weight, X* out) {
    const F32 factor = broadcast(weight);
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) store(out + k, mul(load(x + k), factor));
    const int rest = int(count - k);
    if (rest) store(out + k, mul(load(x + k, rest), factor), rest);
}

// Writes row `from` of x, times a weight, to `out`.
void weigh_one(const linear_args& a, int64_t from, float weight, char* out) {
    if (a.dtype == kBF16)
        weigh_row((const bf16*)a.x + from * a.x_stride, a.inputs, weight, (bf16*)out);
    else
        weigh_row((const float*)a.x + from * a.x_stride, a.inputs, weight, (float*)out);
}

// source(i): the row of x that sorted row i is made of. weighed: times its weight.
template <class Source>
PreparedRows prepare_sorted(const SortedRows& s, Range rows, bool weighed, Team& team, const Source& source) {
    const linear_args& like = s.experts[0].args;
    char* memory = (char*)shared_scratch(team, 1, size_t(prepared_bytes(like, rows.end)));
    const PreparedRows all = prepared_at(like, rows.end, memory);
    const int64_t count = rows.end - rows.begin, parts = parts_for(team, count, kSortedPerThread);
    together(team, parts, [&](Member& member) {
        const int64_t row_size = weighed ? like.inputs * int64_t(sizeof(float)) : 0;
        char* ordered = (char*)member.scratch(size_t(ordered_bytes(like) + row_size) + 1);
        char* row = ordered + ordered_bytes(like);
        for (int64_t part; (part = member.next()) >= 0;) {
            const Range range = part_of(count, part, parts);
            for (int64_t i = rows.begin + range.begin; i < rows.begin + range.end; i++) {
                const linear_args& args = s.experts[s.at[i]].args;
                if (!weighed) {
                    prepare_one(args, source(i), i, all, ordered);
                    continue;
                }
                weigh_one(args, source(i), s.weight[i], row);
                linear_args own = args;
                own.x = row;
                prepare_one(own, 0, i, all, ordered);
            }
        }
    });
    return all;
}

// Inner activations of all sorted rows. common: there is one row, which all experts read.
void inner_products(const SortedRows& s, const PreparedRows& all, bool common, Team& team) {
    int64_t tasks = 0;
    for (int64_t i = 0; i < s.chosen; i++) {
        Chosen& one = s.experts[i];
        one.first_task = tasks;
        tasks += divide_up(one.plan.tiles, one.plan.task_tiles) * divide_up(one.plan.row_blocks, one.plan.task_blocks);
    }
    const ProductScratch scratch(s);
    const Finish finish = finish_of(s.experts[0].args);
    together(team, tasks, [&](Member& member) {
        char* sums = (char*)member.scratch(scratch.bytes());
        Tiles tiles;
        int64_t at = 0;
        const auto expert_of = [&](int64_t task) {
            while (at + 1 < s.chosen && s.experts[at + 1].first_task <= task) at++;
            return at;
        };
        for (int64_t task = member.next(), next; task >= 0; task = next) {
            next = member.next();
            const Chosen& one = s.experts[expert_of(task)];
            const LinearPlan& plan = one.plan;
            const int64_t row_tasks = divide_up(plan.row_blocks, plan.task_blocks), own = task - one.first_task;
            const int64_t tile = own / row_tasks * plan.task_tiles, block = own % row_tasks * plan.task_blocks;
            const int64_t last_block = smaller(block + plan.task_blocks, plan.row_blocks);
            const int64_t last_tile = smaller(tile + plan.task_tiles, plan.tiles);
            const TileWork<Finish> work = {one.args, plan,  rows_from(all, common ? 0 : one.first), finish, (float*)sums,
                                           sums + scratch.sums, tiles};
            const char* behind = nullptr;
            if (next >= 0) {
                const Chosen& then = s.experts[expert_of(next)];
                const int64_t then_rows = divide_up(then.plan.row_blocks, then.plan.task_blocks);
                const int64_t then_tile = (next - then.first_task) / then_rows * then.plan.task_tiles;
                behind = (const char*)then.args.weight + then_tile * then.plan.steps * kStepBytes;
            }
            work.run(tile, last_tile, block, last_block, behind);
        }
    });
}

// Adds an expert's output to the sums of its rows.
struct WeightedSum {
    const int32_t* row;   // of the expert's rows
    const float* weight;  // of the expert's rows
    float* sums;          // [rows of y][kTile], of this tile

    void operator()(const linear_args& a, const PreparedRows& x, int64_t tile, int64_t first, int64_t rows,
                    const float* products) const {
        const TileEnd end(a, tile);
        for (int64_t i = first; i < first + rows; i++, products += kTile) {
            F32 value[kTileVectors];
            end.values(products, broadcast(end.x_scaled ? x.scales[i] : 1.0f), value);
            float* to = sums + int64_t(row[i]) * kTile;
            for (int v = 0; v < kTileVectors; v++)
                store(to + v * kLanes, fma(value[v], broadcast(weight[i]), load(to + v * kLanes)));
        }
    }
};

template <class X>
void store_sums(const experts_args& a, int64_t tile, const float* sums) {
    const int64_t column = tile * kTile;
    for (int64_t row = 0; row < a.rows; row++, sums += kTile)
        for (int v = 0; v < kTileVectors; v++) {
            const int64_t at = column + v * kLanes;
            const int n = int(smaller(kLanes, a.outputs - at));
            if (n <= 0) break;
            F32 value = load(sums + v * kLanes);
            if (a.residual) value = add(value, load_some((const X*)a.residual + row * a.residual_stride + at, n));
            store_some((X*)a.y + row * a.y_stride + at, value, n);
        }
}

// y: the outputs of a row's experts, times their weights.
void outer_products(const experts_args& a, const SortedRows& s, const PreparedRows& all, Team& team) {
    const LinearPlan& any = s.experts[0].plan;
    const int64_t stream = any.steps * kStepBytes, tile_sums = a.rows * kTile * int64_t(sizeof(float));
    int64_t task_tiles = smaller(divide_up(any.tiles, 4 * team.size), 1 + kTaskBytes / (s.chosen * stream + 1));
    task_tiles = smaller(task_tiles, 1 + kSumBytes / (tile_sums + 1));
    const ProductScratch scratch(s);
    together(team, divide_up(any.tiles, task_tiles), [&](Member& member) {
        char* memory = (char*)member.scratch(scratch.bytes() + size_t(task_tiles * tile_sums));
        float* sums = (float*)(memory + scratch.bytes());
        Tiles tiles;
        for (int64_t task; (task = member.next()) >= 0;) {
            const int64_t first = task * task_tiles, last = smaller(first + task_tiles, any.tiles);
            std::memset(sums, 0, size_t((last - first) * tile_sums));
            for (int64_t i = 0; i < s.chosen; i++) {
                const Chosen& one = s.experts[i];
                const LinearPlan& plan = one.plan;
                const char* behind = nullptr;
                if (i + 1 < s.chosen) behind = (const char*)s.experts[i + 1].args.weight + first * stream;
                for (int64_t tile = first; tile < last; tile++) {
                    const WeightedSum end = {s.row + one.first, s.weight + one.first,
                                             sums + (tile - first) * a.rows * kTile};
                    const TileWork<WeightedSum> work = {one.args, plan, rows_from(all, one.first), end, (float*)memory,
                                                        memory + scratch.sums, tiles};
                    const char* next = tile + 1 < last ? work.weight_of(tile + 1) : behind;
                    for (int64_t block = 0; block < plan.row_blocks; block += plan.task_blocks)
                        work.run(tile, tile + 1, block, smaller(block + plan.task_blocks, plan.row_blocks), next);
                }
            }
            for (int64_t tile = first; tile < last; tile++) {
                const float* done = sums + (tile - first) * a.rows * kTile;
                a.dtype == kBF16 ? store_sums<bf16>(a, tile, done) : store_sums<float>(a, tile, done);
            }
        }
    });
}

// The intermediate activations of the chosen experts: [pairs, inner], `stride` apart.
void experts_up(const experts_args& a, const SortedRows& s, char* made, int64_t stride, Team& team) {
    const int64_t item = a.dtype == kBF16 ? 2 : 4;
    bool alike = true;  // all experts would prepare a row in the same way
    for (int64_t i = 0; i < s.chosen; i++) {
        Chosen& one = s.experts[i];
        linear_args l = {};
        l.x = a.x;
        l.x_stride = a.x_stride;
        l.rows = one.rows;
        l.kind = a.up_kind;
        l.group = a.up_group;
        l.inputs = a.inputs;
        l.outputs = is_paired(a.activation) ? 2 * a.inner : a.inner;
        l.activation = a.activation;
        l.bias_pair = a.bias_pair;
        l.y = made + one.first * stride * item;
        l.y_stride = stride;
        l.dtype = l.out_dtype = a.dtype;
        l.fp8_x = a.up_fp8_x;
        set_matrix(l, ((const ExpertMatrix*)a.up)[one.expert]);
        one.args = l;
        one.plan = plan_linear(l, team.size);
        alike = alike && !l.order && l.fp8_x != kStaticX;
    }
    const bool weighed = a.weigh_inputs != 0, common = alike && a.rows == 1 && !weighed;
    const auto of_x = [&](int64_t i) { return int64_t(s.row[i]); };
    inner_products(s, prepare_sorted(s, common ? Range{0, 1} : s.own, weighed, team, of_x), common, team);
}

// The outputs of a row's experts, times their weights; or each output unweighted, if `alone`.
void experts_down(const experts_args& a, const SortedRows& s, char* made, int64_t stride, bool alone, Team& team) {
    for (int64_t i = 0; i < s.chosen; i++) {
        Chosen& one = s.experts[i];
        linear_args l = {};
        l.x = made;
        l.x_stride = stride;
        l.rows = one.rows;
        l.kind = a.down_kind;
        l.group = a.down_group;
        l.inputs = a.inner;
        l.outputs = a.outputs;
        l.dtype = l.out_dtype = a.dtype;
        if (alone) {
            l.y = (float*)a.y + one.first * a.y_stride;
            l.y_stride = a.y_stride;
            l.out_dtype = kF32;
        }
        l.fp8_x = a.down_fp8_x;
        set_matrix(l, ((const ExpertMatrix*)a.down)[one.expert]);
        one.args = l;
        one.plan = plan_linear(l, team.size);
    }
    const auto of_made = [&](int64_t i) { return i; };
    const PreparedRows all = prepare_sorted(s, s.own, false, team, of_made);
    alone ? inner_products(s, all, false, team) : outer_products(a, s, all, team);
}

constexpr int64_t kSummedPerThread = 4096;  // numbers

// y: the sums of the experts' outputs in `made`, in order.
void sum_experts(const experts_args& a, const SortedRows& s, Team& team) {
    const int64_t tiles = divide_up(a.outputs, kTile), each = kSummedPerThread / ((s.count + 1) * kTile) + 1;
    const int64_t tasks = divide_up(tiles, each);
    together(team, tasks, [&](Member& member) {
        float* sums = (float*)member.scratch(size_t(a.rows * kTile) * sizeof(float));
        for (int64_t task; (task = member.next()) >= 0;)
            for (int64_t tile = task * each; tile < smaller((task + 1) * each, tiles); tile++) {
                std::memset(sums, 0, size_t(a.rows * kTile) * sizeof(float));
                for (int64_t i = 0; i < s.count; i++) {
                    const float* from = (const float*)a.made + i * a.made_stride + tile * kTile;
                    float* to = sums + int64_t(s.row[i]) * kTile;
                    for (int v = 0; v < kTileVectors; v++) {
                        const int n = int(smaller(kLanes, a.outputs - tile * kTile - v * kLanes));
                        if (n <= 0) break;
                        const F32 value = load(from + v * kLanes, n);
                        store(to + v * kLanes, fma(value, broadcast(s.weight[i]), load(to + v * kLanes)));
                    }
                }
                a.dtype == kBF16 ? store_sums<bf16>(a, tile, sums) : store_sums<float>(a, tile, sums);
            }
    });
}

void experts(const experts_args& a, Team& team) {
    if (a.rows == 0) return;
    const int64_t pairs = a.rows * a.active, item = a.dtype == kBF16 ? 2 : 4;
    const int64_t lists = 3 * aligned(4 * pairs) + aligned(a.count * int64_t(sizeof(Chosen)));
    const bool whole = a.part == 0 || a.part == 3;  // the intermediate activations are not shared
    char* memory = (char*)shared_scratch(team, 0, size_t(lists + (whole ? pairs * a.inner * item : 0)));
    char* made = whole ? memory + lists : (char*)a.made;
    const int64_t stride = whole ? a.inner : a.made_stride;
    const SortedRows s = sort_rows(a, memory);
    const auto weigh_nothing = [&] {
        for (int64_t i = 0; a.weigh_inputs && i < pairs; i++) s.weight[i] = 1.0f;
    };
    if (a.part == 4 || (!s.chosen && a.part != 1 && a.part != 3)) {
        if (!s.count && a.y == a.residual) return;
        weigh_nothing();
        sum_experts(a, s, team);
    } else if (s.chosen) {
        if (a.part != 2) experts_up(a, s, made, stride, team);
        weigh_nothing();
        if (a.part != 1) experts_down(a, s, made, stride, a.part == 3, team);
    }
}

}  // namespace
}  // namespace kvik

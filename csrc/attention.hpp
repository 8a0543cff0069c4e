// Attention over the paged cache: one kernel for decode, chunked prefill, windows and trees.
//
// This file divides a step into tasks. The division affects only speed: no result depends on it
// (attention_task.hpp says why).
#pragma once

#include "arguments.hpp"
#include "attention_task.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

#if defined(__AMX_TILE__) || defined(KVIK_EMULATE_AMX)
#include "attention_amx.hpp"
#endif

namespace kvik {
namespace {
namespace paged {

// Up to kThinRows rows, a task takes the kv heads of a block together, because memory is read faster in
// long runs. With more rows, each kv head is a separate task, and its keys and values stay in the processor's cache
// while blocks of rows are multiplied with them: kWideRows rows to a task.
constexpr int64_t kWideRows = 64;
constexpr int64_t kTasksPerThread = 4;  // so that the threads end at about the same time

// How the work of one sequence is divided.
struct Cut {
    Queries queries;
    int64_t first_token;
    const int32_t* table;
    int64_t block_queries, query_blocks;
    int64_t head_parts;
    int64_t first_split, num_splits;
    bool sinks;  // a split before these
    bool thin;
    bool by_split;  // each task has one split; the partial results are combined at the end
    int64_t first_task, first_part;
    int64_t all_splits() const { return num_splits + sinks; }
    int64_t num_tasks() const { return (by_split ? all_splits() : 1) * query_blocks * head_parts; }
    int64_t num_parts(int64_t heads) const { return by_split ? all_splits() * queries.count * heads : 0; }
};

inline int64_t splits_of(const Queries::Range& range) {
    return range.end > range.first ? (range.end - 1) / kSplit + 1 - range.first / kSplit : 0;
}

inline Cut cut_sequence(const attention_args& a, int64_t sequence) {
    const auto* starts = static_cast<const int32_t*>(a.query_start_loc);
    const int64_t group = a.heads / a.kv_heads;
    Cut cut{};
    cut.first_token = starts[sequence];
    const int64_t count = starts[sequence + 1] - starts[sequence];
    const uint64_t* tree = a.tree && count > 0 ? static_cast<const uint64_t*>(a.tree) + cut.first_token : nullptr;
    cut.queries = {static_cast<const int32_t*>(a.seq_lens)[sequence] - count, count, a.window,
                   a.chunked != 0, a.sink_keys, tree && *tree ? tree : nullptr, a.reach,
                   a.first_keys ? static_cast<const int32_t*>(a.first_keys)[sequence] : a.sink_keys,
                   a.chosen ? static_cast<const uint64_t*>(a.chosen) + cut.first_token * a.chosen_stride : nullptr,
                   a.chosen_stride, a.chosen_head_stride};
    cut.table = static_cast<const int32_t*>(a.block_table) + sequence * a.table_stride;
    if (count <= 0) return cut;
    cut.thin = count * group <= kThinRows;
    cut.block_queries = cut.thin ? count : group < kWideRows ? kWideRows / group : 1;
    cut.query_blocks = (count + cut.block_queries - 1) / cut.block_queries;
    cut.head_parts = cut.thin ? 1 : a.kv_heads;
    const Queries::Range range = cut.queries.range(0, count);
    cut.first_split = range.first / kSplit;
    cut.num_splits = splits_of(range);
    cut.sinks = a.sink_keys > 0;
    cut.by_split = cut.thin && cut.num_splits > 1;
    return cut;
}

// Divides all sequences, more finely if there would be too few tasks for the threads.
struct Plan {
    int64_t num_cuts = 0, num_tasks = 0, num_parts = 0;

    Plan(const attention_args& a, const Team& team, Cut* cuts) {
        int64_t thin = 0, wide = 0;
        // Prefills first: their tasks are the large ones.
        for (int pass = 0; pass < 2; pass++)
            for (int64_t s = 0; s < a.num_seqs; s++) {
                const Cut cut = cut_sequence(a, s);
                if (cut.queries.count <= 0 || cut.thin != (pass == 1)) continue;
                cuts[num_cuts++] = cut;
                (cut.thin ? thin : wide) += cut.num_tasks();
            }
        const int64_t wanted = kTasksPerThread * team.size;
        const bool few = thin + wide < wanted;
        const int64_t parts = few && thin > 0 ? (wanted - wide + thin - 1) / thin : 1;
        for (Cut* cut = cuts; cut < cuts + num_cuts; cut++) {
            if (cut->thin)
                cut->head_parts = parts < a.kv_heads ? parts : a.kv_heads;
            else
                cut->by_split = few && cut->num_splits > 1;
            cut->first_task = num_tasks;
            cut->first_part = num_parts;
            num_tasks += cut->num_tasks();
            num_parts += cut->num_parts(a.heads);
        }
    }
};

inline Task task_of(const attention_args& a, const Cut& cut, int64_t index, float* parts) {
    Task task{};
    task.queries = cut.queries;
    task.first_token = cut.first_token;
    task.table = cut.table;
    const int64_t part = index % cut.head_parts;
    task.head = a.kv_heads * part / cut.head_parts;
    task.num_heads = a.kv_heads * (part + 1) / cut.head_parts - task.head;
    index /= cut.head_parts;
    // The last queries see the most keys: largest first.
    const int64_t block = cut.query_blocks - 1 - index % cut.query_blocks;
    task.query = block * cut.block_queries;
    const int64_t left = cut.queries.count - task.query;
    task.num_queries = left < cut.block_queries ? left : cut.block_queries;
    if (cut.by_split) {
        const int64_t split = index / cut.query_blocks;
        task.split = split < cut.sinks ? kSinks : cut.first_split + split - cut.sinks;
        task.num_splits = 1;
        task.part_rows = cut.queries.count * (a.heads / a.kv_heads);
        task.parts = parts + (cut.first_part + split * cut.queries.count * a.heads +
                              task.query * (a.heads / a.kv_heads)) * Record::size(a.value_dim);
    } else {
        const Queries::Range range = cut.queries.range(task.query, task.query + task.num_queries);
        task.split = range.first / kSplit;
        task.num_splits = splits_of(range);
        task.sinks = cut.sinks;
    }
    return task;
}

// Combines the parts of one row. Rows are ordered by kv head, query and head of the group, as tasks wrote them.
inline void combine_row(const attention_args& a, const Cut& cut, int64_t row, float* parts, float* total) {
    const int64_t group = a.heads / a.kv_heads, size = Record::size(a.value_dim);
    const int64_t kv_head = row / (cut.queries.count * group), inner = row % (cut.queries.count * group);
    Record::reset(total, a.value_dim);
    for (int64_t split = 0; split < cut.all_splits(); split++)
        combine(total, parts + (cut.first_part + split * cut.queries.count * a.heads + row) * size, a.value_dim);
    write_out(a, total, cut.first_token + inner / group, kv_head * group + inner % group);
}

constexpr int64_t kCombinedPerThread = 4096;  // numbers

template <class Format, class Stored>
void attend(const attention_args& a, Team& team) {
    if (a.num_seqs <= 0) return;
    const int64_t group = a.heads / a.kv_heads;
    const int64_t thin_rows = kThinRows * a.kv_heads, wide_rows = group > kWideRows ? group : kWideRows;
    const int64_t rows = thin_rows > wide_rows ? thin_rows : wide_rows;
    Cut* cuts = static_cast<Cut*>(shared_scratch(team, 0, size_t(a.num_seqs) * sizeof(Cut)));
    const Plan plan(a, team, cuts);
    const size_t record = size_t(Record::size(a.value_dim)) * sizeof(float);
    float* parts = static_cast<float*>(shared_scratch(team, 1, size_t(plan.num_parts) * record));

    together(team, plan.num_tasks, [&](Member& member) {
        void* scratch = member.scratch(size_t(Worker<Format, Stored>::scratch_bytes(a, rows)));
        Worker<Format, Stored> worker(a, static_cast<char*>(scratch), rows);
        const Cut* cut = cuts;
        for (int64_t task; (task = member.next()) >= 0;) {
            while (task >= cut->first_task + cut->num_tasks()) cut++;
            worker.run(task_of(a, *cut, task - cut->first_task, parts));
        }
    });

    for (const Cut* cut = cuts; plan.num_parts > 0 && cut < cuts + plan.num_cuts; cut++) {
        if (!cut->by_split) continue;
        const int64_t combined = cut->queries.count * a.heads;
        const int64_t ranges = parts_for(team, combined, kCombinedPerThread / (cut->all_splits() * a.value_dim));
        together(team, ranges, [&](Member& member) {
            float* total = static_cast<float*>(member.scratch(record));
            for (int64_t task; (task = member.next()) >= 0;) {
                const Range range = part_of(combined, task, ranges);
                for (int64_t row = range.begin; row < range.end; row++) combine_row(a, *cut, row, parts, total);
            }
        });
    }
}

#if defined(__AMX_TILE__) || defined(KVIK_EMULATE_AMX)
using PairsOfBF16 = RegisterPairs;
#elif defined(__AVX512BF16__)
using PairsOfBF16 = DotPairs;
#else
using PairsOfBF16 = SplitPairs;
#endif

}  // namespace paged

void attention(const attention_args& a, Team& team) {
    using namespace paged;
    cache::with_stored(a.kv_dtype, [&](auto stored) {
        using Stored = decltype(stored);
        if constexpr (std::is_same_v<Stored, float>)
            attend<Floats, float>(a, team);
        else
            a.dtype == kF32 ? attend<SplitPairs, Stored>(a, team) : attend<PairsOfBF16, Stored>(a, team);
    });
}

}  // namespace
}  // namespace kvik

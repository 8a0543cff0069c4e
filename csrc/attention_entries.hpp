// Attention over the last tokens and over entries that sum up tokens (attention/compressed.py). A vector is the key and
// the value of all heads, and a row of the cache.
//
// Rows are read in place, 64 at a time, in the order window, entries: lanes are channels, of scores and of sums over
// values. A query's result depends only on its own rows, so not on other queries, threads, or chunks of a prompt.
#pragma once

#include "attention.hpp"
#include "indexer.hpp"

namespace kvik {
namespace {
namespace over_entries {

using paged::kRows;  // heads that share a load of the cache
using paged::kTile;
using paged::kVectors;
using paged::Record;

// Computes queries, some heads at a time: groups of kRows, filled up with zeros.
template <class T>
class Worker {
public:
    static int64_t groups_of(const attend_entries_args& a) { return (a.heads + kRows - 1) / kRows; }
    static size_t scratch_bytes(const attend_entries_args& a, int64_t groups) {
        return size_t(groups * kRows * (a.dim + Record::size(a.dim)) + Record::size(a.dim)) * sizeof(float);
    }

    Worker(const attend_entries_args& args, char* scratch, int64_t groups) : a(args), record_size(Record::size(a.dim)) {
        total = reinterpret_cast<float*>(scratch);
        records = total + record_size;
        queries = records + groups * kRows * record_size;
        unit.scale = float(a.scale);
        unit.value_dim = a.dim;
    }

    // The groups [begin, end) of a token.
    void run(int64_t token, int64_t begin, int64_t end) {
        const auto* starts = static_cast<const int32_t*>(a.query_start_loc);
        int64_t sequence = 0;
        while (starts[sequence + 1] <= token) sequence++;
        const int64_t seen = static_cast<const int32_t*>(a.seq_lens)[sequence] - (starts[sequence + 1] - token) + 1;
        groups = end - begin;
        count = 0;
        pack(token, begin);
        for (int64_t at = seen > a.window ? seen - a.window : 0; at < seen; at++)
            take(static_cast<const T*>(a.cache) + slot(a.table, a.table_stride, sequence, at) * a.cache_stride);
        const int64_t made = a.every ? seen / a.every : 0;
        const auto* chosen = a.chosen ? static_cast<const uint64_t*>(a.chosen) + token * a.chosen_stride : nullptr;
        for (int64_t first = 0; first < made; first += kTile) {
            uint64_t bits = chosen ? chosen[first / kTile] : paged::bits_between(0, made - first);
            for (; bits; bits &= bits - 1) {
                const int64_t last = (first + __builtin_ctzll(bits) + 1) * a.every - 1;  // its last token
                take(static_cast<const T*>(a.entries) +
                     slot(a.entry_table, a.entry_table_stride, sequence, last) / a.entry_tokens * a.dim);
            }
        }
        if (count) walk();
        for (int64_t h = begin * kRows; h < end * kRows && h < a.heads; h++) write(token, h, h - begin * kRows);
    }

private:
    int64_t slot(const void* table, int64_t stride, int64_t sequence, int64_t at) const {
        const int64_t block = static_cast<const int32_t*>(table)[sequence * stride + at / a.block_size];
        return block * a.block_size + at % a.block_size;
    }

    // Rotates queries, and empties their records.
    void pack(int64_t token, int64_t group) {
        std::memset(queries, 0, size_t(groups * kRows * a.dim) * sizeof(float));
        for (int64_t r = 0; r < groups * kRows; r++) {
            Record::reset(records + r * record_size, a.dim);
            const int64_t head = group * kRows + r;
            if (head >= a.heads) continue;
            float* to = queries + r * a.dim;
            indexer::rotated_last(static_cast<const T*>(a.q) + token * a.q_stride + head * a.dim, a.dim,
                                  static_cast<const float*>(a.rotation) + token * a.rope, a.rope,
                                  [&](int64_t d, float value) KVIK_INLINED { to[d] = value; });
        }
    }

    void take(const T* row) {
        taken[count++] = row;
        if (count == kTile) walk();
    }

    // The rows taken, for all heads.
    void walk() {
        alignas(64) float scores[kRows][kTile], weights[kRows][kTile];
        float shrink[kRows];
        uint64_t visible[kRows];
        for (int64_t i = count; i < kTile; i++) taken[i] = taken[count - 1];  // a vector of scores is computed whole
        for (uint64_t& bits : visible) bits = paged::bits_between(0, count);
        for (int64_t group = 0; group < groups; group++) {
            float* own = records + group * kRows * record_size;
            for (int64_t i = 0; i < count; i += kVectors) score(queries + group * kRows * a.dim, i, scores);
            paged::soften<paged::Floats, kRows>(unit, scores, weights, visible, own, shrink);
            int64_t column = 0;
            for (; column + kVectors * kLanes <= a.dim; column += kVectors * kLanes)
                add_values<kVectors>(column, weights, own, shrink);
            for (; column < a.dim; column += kLanes) add_values<1>(column, weights, own, shrink);
        }
        count = 0;
    }

    // Of kVectors rows.
    void score(const float* q, int64_t row, float (*scores)[kTile]) const {
        F32 sums[kRows][kVectors];
        for (auto& of_row : sums)
            for (F32& sum : of_row) sum = zero();
        const T* keys[kVectors];
        for (int n = 0; n < kVectors; n++) keys[n] = taken[row + n];
        for (int64_t d = 0; d < a.dim; d += kLanes) {
            F32 k[kVectors];
#pragma GCC unroll 4
            for (int n = 0; n < kVectors; n++) k[n] = load(keys[n] + d);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; r++) {
                const F32 x = load(q + r * a.dim + d);
#pragma GCC unroll 4
                for (int n = 0; n < kVectors; n++) sums[r][n] = fma(x, k[n], sums[r][n]);
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int n = 0; n < kVectors; n++) scores[r][row + n] = sum(sums[r][n]);
    }

    // Adds N vectors of columns of the rows, times their weights.
    template <int N>
    void add_values(int64_t column, const float (*weights)[kTile], float* own, const float* shrink) const {
        F32 sums[kRows][N];
        for (int r = 0; r < kRows; r++)
            for (int n = 0; n < N; n++)
                sums[r][n] = mul(load(own + r * record_size + column + n * kLanes), broadcast(shrink[r]));
        for (int64_t i = 0; i < count; i++) {
            F32 v[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) v[n] = load(taken[i] + column + n * kLanes);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; r++) {
                const F32 weight = broadcast(weights[r][i]);
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) sums[r][n] = fma(v[n], weight, sums[r][n]);
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int n = 0; n < N; n++) store(own + r * record_size + column + n * kLanes, sums[r][n]);
    }

    // Divides a head's sums by its weights and its sink's, and rotates them back.
    void write(int64_t token, int64_t head, int64_t row) {
        Record::reset(total, a.dim);
        paged::combine(total, records + row * record_size, a.dim);
        paged::add_sink(total, static_cast<const float*>(a.sinks)[head], a.dim);
        const F32 divisor = broadcast(*Record::weights(total, a.dim));
        for (int64_t d = 0; d < a.dim; d += kLanes) store(total + d, div(load(total + d), divisor));
        T* out = static_cast<T*>(a.out) + token * a.out_stride + head * a.dim;
        indexer::rotated_last(total, a.dim, static_cast<const float*>(a.rotation) + token * a.rope, a.rope,
                              [&](int64_t d, float value) KVIK_INLINED { indexer::put_number(out + d, value); }, -1.0f);
    }

    const attend_entries_args& a;
    const int64_t record_size;
    paged::Unit<paged::Floats> unit{};
    float *total, *records, *queries;  // a record; [heads, record]; [heads, dim]
    int64_t groups, count;             // of rows taken
    const T* taken[kTile];
};

template <class T>
void attend(const attend_entries_args& a, Team& team) {
    const int64_t tokens = static_cast<const int32_t*>(a.query_start_loc)[a.num_seqs], groups = Worker<T>::groups_of(a);
    const int64_t wanted = team.size > 1 ? paged::kTasksPerThread * team.size : 1;
    int64_t parts = tokens > 0 ? (wanted + tokens - 1) / tokens : 1;  // of the heads
    if (parts > groups) parts = groups;
    together(team, tokens * parts, [&](Member& member) {
        Worker<T> worker(a, static_cast<char*>(member.scratch(Worker<T>::scratch_bytes(a, groups))), groups);
        for (int64_t task; (task = member.next()) >= 0;) {
            const Range range = part_of(groups, task % parts, parts);
            worker.run(task / parts, range.begin, range.end);
        }
    });
}

}  // namespace over_entries

void attend_entries(const attend_entries_args& a, Team& team) {
    a.dtype == kF32 ? over_entries::attend<float>(a, team) : over_entries::attend<bf16>(a, team);
}

}  // namespace
}  // namespace kvik

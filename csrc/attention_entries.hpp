// Attention over the last tokens and over entries that sum up tokens (attention/compressed.py), and how both are
// stored. A vector is the key and the value of all heads, and a row of the cache.
//
// Rows are read in place, 64 at a time, in the order window, entries: lanes are channels, of scores and of sums over
// values. A query's result depends only on its own rows, so not on other queries, threads, or chunks of a prompt.
#pragma once

#include "attention.hpp"
#include "indexer.hpp"
#include "norm.hpp"

namespace kvik {
namespace {
namespace over_entries {

using paged::kRows;  // heads that share a load of the cache
using paged::kTile;
using paged::kVectors;
using paged::Record;

inline int64_t slot_of(const void* table, int64_t stride, int64_t block_size, int64_t sequence, int64_t at) {
    return static_cast<const int32_t*>(table)[sequence * stride + at / block_size] * block_size + at % block_size;
}

template <class T>
void store_tokens(const store_tokens_args& a, Team& team) {
    const auto* slots = static_cast<const int64_t*>(a.slot_mapping);
    each_range(team, a.rows, 4, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            if (slots[row] < 0) continue;
            T* to = static_cast<T*>(a.cache) + slots[row] * a.cache_stride;
            indexer::rotated_last(static_cast<const T*>(a.k) + row * a.k_stride, a.dim,
                                  static_cast<const float*>(a.rotation) + row * a.rope, a.rope,
                                  [&](int64_t d, float value) KVIK_INLINED { indexer::put_number(to + d, value); });
            if (a.inputs)
                std::memcpy(to + a.dim, static_cast<const T*>(a.inputs) + row * a.inputs_stride,
                            size_t(a.cache_stride - a.dim) * sizeof(T));
        }
    });
}

template <class T>
size_t making_bytes(const make_entries_args& a) {
    const int64_t rows = (1 + a.overlap) * a.every;
    return size_t(rows) * sizeof(T*) + size_t(a.rope) * sizeof(float) + size_t(2 * a.dim) * sizeof(T);
}

// A mean over tokens for each channel, weighed by the softmax of its gates; normalised, and rotated by the position of
// the entry's first token. Every channel sums in the order of tokens.
template <class T, class W>
void make_entry(const make_entries_args& a, int64_t sequence, int64_t entry, char* scratch) {
    const int64_t parts = 1 + a.overlap, width = parts * a.dim, half = a.rope / 2;
    const int64_t first = a.overlap && !entry ? a.every : 0, end = parts * a.every;
    const T** rows = reinterpret_cast<const T**>(scratch);
    float* rotation = reinterpret_cast<float*>(rows + end);
    T* means = reinterpret_cast<T*>(rotation + a.rope);
    T* normed = means + a.dim;
    for (int64_t i = first; i < end; i++) {
        const int64_t token = (entry + 1 - parts) * a.every + i;
        rows[i] = static_cast<const T*>(a.cache) + a.inputs_at + i / a.every * a.dim +
                  slot_of(a.table, a.table_stride, a.block_size, sequence, token) * a.cache_stride;
    }
    const auto* bias = static_cast<const float*>(a.bias);
    each_vector(0, a.dim, [&](int64_t c, auto n) KVIK_INLINED {
        const auto gate = [&](int64_t i) KVIK_INLINED {
            const float* added = bias + i % a.every * width + i / a.every * a.dim + c;
            return add(load(rows[i] + width + c, n), load(added, n));
        };
        F32 most = broadcast(-INFINITY), weights = zero(), total = zero();
        for (int64_t i = first; i < end; i++) most = max(most, gate(i));
        for (int64_t i = first; i < end; i++) {
            const F32 weight = exp(sub(gate(i), most));
            weights = add(weights, weight);
            total = fma(weight, load(rows[i] + c, n), total);
        }
        store(means + c, div(total, weights), n);
    });
    if (a.weight) {
        const float square = sum_of<true>(means, a.dim, 0.0f) / float(a.dim);
        const W* gain = static_cast<const W*>(a.weight);
        scale_row<false, T, W>(means, gain, nullptr, normed, a.dim, 0.0f, 1.0f / sqrtf(square + float(a.eps)));
    } else {
        normed = means;
    }
    const int64_t start = entry * a.every, position = start < a.last ? start : a.last;
    const float* high = static_cast<const float*>(a.high) + (half ? position / a.low_rows * a.rope : 0);
    const float* low = static_cast<const float*>(a.low) + (half ? position % a.low_rows * a.rope : 0);
    for (int64_t j = 0; j < half; j++) {
        rotation[j] = high[j] * low[j] - high[half + j] * low[half + j];
        rotation[half + j] = high[j] * low[half + j] + high[half + j] * low[j];
    }
    const int64_t last = slot_of(a.entry_table, a.entry_table_stride, a.block_size, sequence, start + a.every - 1);
    T* to = static_cast<T*>(a.entries) + last / a.entry_tokens * a.entries_stride;
    indexer::rotated_last(normed, a.dim, rotation, a.rope,
                          [&](int64_t d, float value) KVIK_INLINED { indexer::put_number(to + d, value); });
}

template <class T>
void make(const make_entries_args& a, Team& team) {
    const auto* starts = static_cast<const int32_t*>(a.query_start_loc);
    const auto* lengths = static_cast<const int32_t*>(a.seq_lens);
    const auto first = [&](int64_t s) { return (lengths[s] - starts[s + 1] + starts[s]) / a.every; };
    int64_t count = 0;
    for (int64_t s = 0; s < a.num_seqs; s++) count += lengths[s] / a.every - first(s);
    together(team, count, [&](Member& member) {
        char* scratch = static_cast<char*>(member.scratch(making_bytes<T>(a)));
        for (int64_t task; (task = member.next()) >= 0;) {
            int64_t s = 0;
            for (int64_t made; task >= (made = lengths[s] / a.every - first(s)); s++) task -= made;
            if (a.weight_dtype == kF32)
                make_entry<T, float>(a, s, first(s) + task, scratch);
            else
                make_entry<T, bf16>(a, s, first(s) + task, scratch);
        }
    });
}

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
            take(static_cast<const T*>(a.cache) +
                 slot_of(a.table, a.table_stride, a.block_size, sequence, at) * a.cache_stride);
        const int64_t made = a.every ? seen / a.every : 0;
        const auto* chosen = a.chosen ? static_cast<const uint64_t*>(a.chosen) + token * a.chosen_stride : nullptr;
        for (int64_t first = 0; first < made; first += kTile) {
            uint64_t bits = chosen ? chosen[first / kTile] : paged::bits_between(0, made - first);
            for (; bits; bits &= bits - 1) {
                const int64_t last = (first + __builtin_ctzll(bits) + 1) * a.every - 1;  // its last token
                const int64_t at = slot_of(a.entry_table, a.entry_table_stride, a.block_size, sequence, last);
                take(static_cast<const T*>(a.entries) + at / a.entry_tokens * a.dim);
            }
        }
        if (count) walk();
        for (int64_t h = begin * kRows; h < end * kRows && h < a.heads; h++) write(token, h, h - begin * kRows);
    }

private:
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

void store_tokens(const store_tokens_args& a, Team& team) {
    a.dtype == kF32 ? over_entries::store_tokens<float>(a, team) : over_entries::store_tokens<bf16>(a, team);
}

void make_entries(const make_entries_args& a, Team& team) {
    a.dtype == kF32 ? over_entries::make<float>(a, team) : over_entries::make<bf16>(a, team);
}

void attend_entries(const attend_entries_args& a, Team& team) {
    a.dtype == kF32 ? over_entries::attend<float>(a, team) : over_entries::attend<bf16>(a, team);
}

}  // namespace
}  // namespace kvik

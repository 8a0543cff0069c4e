// The tokens that a row's rules keep.
//
// No row is sorted. The tokens that top_k or top_p may keep are found with a bound on the logits that is certainly
// low enough; the exact cut is then made among those few candidates. Weights are summed in fp64 over chunks of
// fixed size, in order, so that a sum does not depend on which thread computed which chunk.
#pragma once

#include <cfloat>
#include <cmath>

#include "logits.hpp"
#include "sampling_cut.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

constexpr int64_t kDrawChunk = 1024;  // a multiple of kLanes

int64_t draw_chunks(int64_t count) { return (count + kDrawChunk - 1) / kDrawChunk; }
int64_t end_of_chunk(int64_t chunk, int64_t count) {
    return (chunk + 1) * kDrawChunk < count ? (chunk + 1) * kDrawChunk : count;
}

// Rules that are off keep everything.
struct RowRules {
    float temperature;
    int64_t top_k;
    double top_p;
    float min_p;
};

template <class Args>
RowRules rules_of(const Args& a, int64_t row) {
    return {
        static_cast<const float*>(a.temperature)[row],
        a.top_k ? static_cast<const int64_t*>(a.top_k)[row] : a.vocab,
        a.top_p ? static_cast<const double*>(a.top_p)[row] : 1.0,
        a.min_p ? static_cast<const float*>(a.min_p)[row] : 0.0f,
    };
}

// Scratch memory for one row.
struct DrawScratch {
    float* highs;     // [chunks, kLanes] the largest logit of each lane
    double* sums;     // [chunks] weights
    int64_t* counts;  // [parts] candidates
    Candidates found, spare;  // [vocab]; empty where no row has a rule that needs them

    static size_t bytes(int64_t vocab, int parts, bool truncates) {
        const int64_t chunks = draw_chunks(vocab), places = truncates ? chunks * kDrawChunk : 0;
        return size_t(chunks) * (kLanes * sizeof(float) + sizeof(double)) + size_t(parts) * sizeof(int64_t) +
               2 * size_t(places) * (sizeof(uint64_t) + sizeof(float));
    }

    DrawScratch(void* memory, int64_t vocab, int parts, bool truncates) {
        const int64_t chunks = draw_chunks(vocab), places = truncates ? chunks * kDrawChunk : 0;
        sums = static_cast<double*>(memory);
        counts = reinterpret_cast<int64_t*>(sums + chunks);
        found.ranks = reinterpret_cast<uint64_t*>(counts + parts);
        spare.ranks = found.ranks + places;
        highs = reinterpret_cast<float*>(spare.ranks + places);
        found.weights = highs + chunks * kLanes;
        spare.weights = found.weights + places;
    }
};

// ------------------------------------------------------------------------------------ weights

// Pads the weights with zeros up to a whole vector.
void pad(float* weights, int64_t count) {
    for (; count % kLanes; count++) weights[count] = 0;
}

// weights = exp((logit - top) / temperature), 0 where below `least` or e^-87, and padded. May be in place.
void weigh(const float* logits, int64_t count, float top, float temperature, float least, float* weights) {
    const auto weight = [&](F32 logit) {
        const F32 x = div(sub(logit, broadcast(top)), broadcast(temperature));
        const F32 w = select(less(x, broadcast(-87.0f)), zero(), exp(x));
        return select(less(w, broadcast(least)), zero(), w);
    };
    each_vector(0, count, [&](int64_t i, auto n) KVIK_INLINED { store(weights + i, weight(load(logits + i, n))); });
    pad(weights, count);
}

// The sum of padded weights.
double sum_of(const float* weights, int64_t count) {
    F64 sums[4] = {dzero(), dzero(), dzero(), dzero()};
    for (int64_t i = 0; i < count; i += 2 * kLanes)
        for (int j = 0; j < 2 && i + j * kLanes < count; j++) {
            const F32 w = load(weights + i + j * kLanes);
            sums[2 * j] = add(sums[2 * j], widen_low(w));
            sums[2 * j + 1] = add(sums[2 * j + 1], widen_high(w));
        }
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

double sum_of_chunks(const double* sums, int64_t chunks) {
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) total += sums[chunk];
    return total;
}

// ------------------------------------------------------------------------------------ candidates

// The largest of each lane of a chunk: [kLanes].
void find_highs(const float* logits, int64_t count, float* highs) {
    F32 high = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) high = max(load(logits + i), high);
    store(highs, high);
    for (int lane = 0; i < count; i++, lane++) highs[lane] = logits[i] > highs[lane] ? logits[i] : highs[lane];
}

// A bound with at least k logits at or above it: the k-th largest of the highs, which are different logits.
float bound_by_highs(const DrawScratch& scratch, int64_t count, int64_t k) {
    Candidates highs = scratch.found;
    highs.count = count;
    for (int64_t i = 0; i < count; i++) {
        highs.ranks[i] = ranked(scratch.highs[i], i);
        highs.weights[i] = 0;
    }
    return scratch.highs[id_of(lowest_kept(highs, scratch.spare, Measure::kCount, double(k)))];
}

// The same for a k larger than the number of highs. Logits that share their sign, exponent and first bits are counted
// together; the bound is the least number of the group that contains the k-th.
float bound_by_groups(const float* logits, int64_t vocab, int64_t k) {
    constexpr int kShift = 20, kGroups = 1 << (32 - kShift), kTables = 2;
    // Alternates between tables, because increments of one counter wait for each other.
    uint32_t counts[kTables][kGroups] = {};
    for (int64_t i = 0; i < vocab; i++) {
        const uint32_t bits = uint32_t(load_word(logits + i));
        // Ordered as by `ranked`, except -0 and NaN: a bound that is slightly too low does no harm.
        counts[i % kTables][(bits ^ ((0u - (bits >> 31)) | 0x80000000u)) >> kShift]++;
    }
    int64_t group = kGroups - 1;
    for (int64_t count = 0; group > 0; group--) {
        for (int table = 0; table < kTables; table++) count += counts[table][group];
        if (count >= k) break;
    }
    return value_of(uint64_t(group) << (32 + kShift));
}

// A bound such that tokens below it together weigh less than half of what top_p drops, however many they are.
float bound_of_top_p(double total, int64_t vocab, float top, const RowRules& rules) {
    const double weight = (1.0 - rules.top_p) * total / double(vocab) / 2;
    return float(double(top) + double(rules.temperature) * __builtin_log(weight));
}

// Tokens of [begin, end) at or above the bound, with their logits for weights. -inf is never one.
void collect(const float* logits, int64_t begin, int64_t end, float bound, Candidates& found) {
    bound = bound >= -FLT_MAX ? bound : -FLT_MAX;
    const auto take = [&](int64_t id) {
        found.ranks[found.count] = ranked(logits[id], id);
        found.weights[found.count++] = logits[id];
    };
    constexpr uint32_t kAll = (1u << kLanes) - 1;
    int64_t i = begin;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
        uint32_t below[4], everywhere = kAll;
        for (int j = 0; j < 4; j++)
            everywhere &= below[j] = bits(less(load(logits + i + j * kLanes), broadcast(bound)));
        if (everywhere == kAll) continue;
        for (int j = 0; j < 4; j++)
            for (uint32_t left = kAll & ~below[j]; left; left &= left - 1)
                take(i + j * kLanes + __builtin_ctz(left));
    }
    for (; i < end; i++)
        if (!(logits[i] < bound)) take(i);
}

// Moves the candidates of each part, which begin where its tokens do, to the end of the previous part's.
void join(DrawScratch& scratch, int64_t parts, int64_t chunks) {
    scratch.found.count = 0;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part_of(chunks, part, parts).begin * kDrawChunk;
        for (int64_t i = first; i < first + scratch.counts[part]; i++) scratch.found.add_if(true, scratch.found, i);
    }
}

// Writes the sums of the candidates' chunks to scratch.sums; returns their number.
int64_t sum_candidates(const DrawScratch& scratch) {
    const int64_t chunks = draw_chunks(scratch.found.count);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t first = chunk * kDrawChunk;
        scratch.sums[chunk] = sum_of(scratch.found.weights + first, end_of_chunk(chunk, scratch.found.count) - first);
    }
    return chunks;
}

// Drops the candidates that the rules do not keep, and weighs the others. total: weight of all tokens, if
// top_k does not drop any.
void cut_candidates(DrawScratch& scratch, int64_t vocab, float top, double total, const RowRules& rules) {
    Candidates& found = scratch.found;
    if (rules.top_k < vocab)
        keep_down_to(found, lowest_kept(found, scratch.spare, Measure::kCount, double(rules.top_k)));
    weigh(found.weights, found.count, top, rules.temperature, 0, found.weights);
    if (rules.top_p < 1) {
        if (rules.top_k < vocab) total = sum_of_chunks(scratch.sums, sum_candidates(scratch));
        keep_down_to(found, lowest_kept(found, scratch.spare, Measure::kWeight, rules.top_p * total));
        pad(found.weights, found.count);
    }
    for (int64_t i = 0; i < found.count; i++) found.weights[i] = found.weights[i] < rules.min_p ? 0 : found.weights[i];
}

// ------------------------------------------------------------------------------------ rows

// A row that is being processed.
struct DrawnRow {
    const float* logits;
    int64_t vocab;
    RowRules rules;
    float top;  // the largest logit

    bool cuts_count() const { return rules.top_k < vocab; }
    bool cuts_weight() const { return rules.top_p < 1; }
    bool truncated() const { return cuts_count() || cuts_weight(); }
    int64_t chunks() const { return draw_chunks(vocab); }
    int64_t in_chunk(int64_t chunk) const { return end_of_chunk(chunk, vocab) - chunk * kDrawChunk; }

    // weights: [kDrawChunk]. Those that min_p drops are 0, unless top_p comes before it and needs them.
    void weigh_chunk(int64_t chunk, float* weights) const {
        const float least = cuts_weight() ? 0 : rules.min_p;
        weigh(logits + chunk * kDrawChunk, in_chunk(chunk), top, rules.temperature, least, weights);
    }
};

// Calls work(chunk) for the chunks of a row, divided between the threads.
template <class Work>
void each_chunk(Team& team, int64_t chunks, const Work& work) {
    each_range(team, chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; chunk++) work(chunk);
    });
}

// Finds the kept tokens of a row and its top. Where the row is truncated, they are in scratch.found; otherwise all
// tokens are kept, and scratch.sums are the weights of their chunks.
void find_kept(DrawnRow& row, DrawScratch& scratch, Team& team) {
    const int64_t chunks = row.chunks();
    each_chunk(team, chunks, [&](int64_t chunk) {
        find_highs(row.logits + chunk * kDrawChunk, row.in_chunk(chunk), scratch.highs + chunk * kLanes);
    });
    F32 high = broadcast(-INFINITY);
    for (int64_t chunk = 0; chunk < chunks; chunk++) high = max(load(scratch.highs + chunk * kLanes), high);
    row.top = largest(high);

    float bound;
    double total = 0;
    if (row.cuts_count()) {
        const bool few = row.rules.top_k <= chunks * kLanes;
        bound = few ? bound_by_highs(scratch, chunks * kLanes, row.rules.top_k)
                    : bound_by_groups(row.logits, row.vocab, row.rules.top_k);
    } else {
        each_chunk(team, chunks, [&](int64_t chunk) {
            alignas(64) float weights[kDrawChunk];
            row.weigh_chunk(chunk, weights);
            scratch.sums[chunk] = sum_of(weights, row.in_chunk(chunk));
        });
        if (!row.truncated()) return;
        total = sum_of_chunks(scratch.sums, chunks);
        bound = bound_of_top_p(total, row.vocab, row.top, row.rules);
    }
    const int64_t parts = parts_for(team, chunks, 1);
    each_task(team, parts, [&](int64_t part) {
        const Range range = part_of(chunks, part, parts);
        const int64_t first = range.begin * kDrawChunk;
        Candidates found{scratch.found.ranks + first, scratch.found.weights + first, 0};
        collect(row.logits, first, end_of_chunk(range.end - 1, row.vocab), bound, found);
        scratch.counts[part] = found.count;
    });
    join(scratch, parts, chunks);
    cut_candidates(scratch, row.vocab, row.top, total, row.rules);
}

// work(row, index, scratch, team) for the rows of a call; the team is for the loops over the vocabulary.
template <class Args, class Work>
void each_drawn_row(const Args& a, Team& team, const Work& work) {
    if (a.vocab < 1) return;
    const bool truncates = a.top_k || a.top_p;
    const auto row = [&](int64_t i) {
        return DrawnRow{static_cast<const float*>(a.logits) + i * a.logits_stride, a.vocab, rules_of(a, i), 0};
    };
    if (shares_vocabulary(team, a.rows, a.vocab)) {
        void* memory = shared_scratch(team, 0, DrawScratch::bytes(a.vocab, team.size, truncates));
        DrawScratch scratch(memory, a.vocab, team.size, truncates);
        for (int64_t i = 0; i < a.rows; i++) work(row(i), i, scratch, team);
        return;
    }
    together(team, a.rows, [&](Member& member) {
        Team alone{1, member.rank, member.shared};
        DrawScratch scratch(member.scratch(DrawScratch::bytes(a.vocab, 1, truncates)), a.vocab, 1, truncates);
        for (int64_t i; (i = member.next()) >= 0;) work(row(i), i, scratch, alone);
    });
}

}  // namespace
}  // namespace kvik

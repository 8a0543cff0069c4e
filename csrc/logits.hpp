// The largest of each row of fp32 logits, which are read once, many numbers at a time.
#pragma once

#include <cmath>

#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

constexpr int64_t kLogitsPerThread = 8192;

// With few rows the threads share the vocabulary, and the caller combines their results.
bool shares_vocabulary(const Team& team, int64_t rows, int64_t vocab) {
    return team.size > 1 && rows < 2 * team.size && vocab >= 2 * kLogitsPerThread;
}

struct Largest {
    float value;
    int64_t id;
};

KVIK_INLINE bool is_nan(float x) { return x != x; }

// NaN is larger than any number; the first wins a tie.
KVIK_INLINE bool beats(float x, float y) { return x > y || (is_nan(x) && !is_nan(y)); }

// The first place in [begin, end) of the value that is the largest there.
int64_t place_of(const float* x, int64_t begin, int64_t end, float value) {
    for (int64_t i = begin; i < end; i++)
        if (x[i] == value || (is_nan(x[i]) && is_nan(value))) return i;
    return begin;
}

// The largest of [begin, end): finds its chunk, then its place there. Chunks stay in the L1 cache.
Largest largest_of(const float* x, int64_t begin, int64_t end) {
    constexpr int64_t kChunk = 1024;
    const F32 infinity = broadcast(INFINITY);
    float best = -INFINITY;
    int64_t place = begin;
    for (int64_t first = begin; first < end && !is_nan(best); first += kChunk) {
        const int64_t last = first + kChunk < end ? first + kChunk : end;
        F32 m[4] = {broadcast(best), broadcast(best), broadcast(best), broadcast(best)};
        uint32_t nan = 0;
        int64_t i = first;
        for (; i + 4 * kLanes <= last; i += 4 * kLanes)
            for (int j = 0; j < 4; j++) {
                const F32 v = load(x + i + j * kLanes);
                nan |= bits(not_le(v, infinity));
                m[j] = max(v, m[j]);
            }
        float top = largest(max(max(m[0], m[1]), max(m[2], m[3])));
        for (; i < last; i++) {
            nan |= is_nan(x[i]);
            top = x[i] > top ? x[i] : top;
        }
        if (nan) top = NAN;
        if (beats(top, best)) {
            best = top;
            place = first;
        }
    }
    return {best, place_of(x, place, place + kChunk < end ? place + kChunk : end, best)};
}

void largest(const largest_args& a, Team& team) {
    float* top = static_cast<float*>(a.top);
    int64_t* ids = static_cast<int64_t*>(a.ids);
    const auto logits = [&](int64_t row) { return static_cast<const float*>(a.logits) + row * a.logits_stride; };
    if (!shares_vocabulary(team, a.rows, a.vocab)) {
        each_range(team, a.rows, kLogitsPerThread / (a.vocab > 0 ? a.vocab : 1), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                const Largest found = largest_of(logits(row), 0, a.vocab);
                top[row] = found.value;
                ids[row] = found.id;
            }
        });
        return;
    }
    const int64_t parts = team.size;
    // [parts, rows]
    auto* found = static_cast<Largest*>(shared_scratch(team, 0, sizeof(Largest) * size_t(a.rows * parts)));
    each_task(team, parts, [&](int64_t part) {
        const Range range = part_of(a.vocab, part, parts);
        for (int64_t row = 0; row < a.rows; row++)
            found[part * a.rows + row] = largest_of(logits(row), range.begin, range.end);
    });
    for (int64_t row = 0; row < a.rows; row++) {
        Largest best = found[row];
        for (int64_t part = 1; part < parts; part++) {
            const Largest other = found[part * a.rows + row];
            if (beats(other.value, best.value)) best = other;
        }
        top[row] = best.value;
        ids[row] = best.id;
    }
}

}  // namespace
}  // namespace kvik

// The largest of each row of fp32 logits. Both kernels read a row once, many numbers at a time, and look
// at single numbers only where one may be larger than those found so far.
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

// ------------------------------------------------------------------------------------ largest

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
    const auto logits = [&](int64_t row) { return static_cast<const float*>(a.logits) + row * a.stride; };
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

// ------------------------------------------------------------------------------------ top_k

// A number and its place as one integer, which decreases in the order of the result: NaN before infinity before
// all others, 0 and -0 equal, ties by ascending id.
KVIK_INLINE uint64_t ranked(float value, int64_t id) {
    const float x = value + 0.0f;  // -0 becomes 0
    uint32_t order;
    std::memcpy(&order, &x, 4);
    order ^= (0u - (order >> 31)) | 0x80000000u;  // no branch: signs are hard to predict
    order = is_nan(x) ? 0xffffffffu : order;
    return uint64_t(order) << 32 | (0xffffffffu - uint32_t(id));
}
KVIK_INLINE int64_t id_of(uint64_t ranked) { return int64_t(0xffffffffu - uint32_t(ranked)); }

// A heap of the best so far: the worst of them is at its root, where a better one takes its place.
void sink(uint64_t* heap, int64_t size, int64_t at) {
    const uint64_t moving = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        child += child + 1 < size && heap[child + 1] < heap[child];
        if (heap[child] >= moving) break;
        heap[at] = heap[child];
    }
    heap[at] = moving;
}

void make_heap(uint64_t* heap, int64_t size) {
    for (int64_t at = size / 2 - 1; at >= 0; at--) sink(heap, size, at);
}

void offer(uint64_t* heap, int64_t size, uint64_t candidate) {
    if (candidate <= heap[0]) return;
    heap[0] = candidate;
    sink(heap, size, 0);
}

// Put the k best of [begin, end) into a heap. Returns their number, which is smaller if there are fewer.
int64_t best_of(const float* x, int64_t begin, int64_t end, int64_t k, uint64_t* heap) {
    const int64_t size = k < end - begin ? k : end - begin;
    int64_t i = begin;
    for (; i < begin + size; i++) heap[i - begin] = ranked(x[i], i);
    if (size == 0) return 0;
    make_heap(heap, size);
    const auto worst = [&] { return x[id_of(heap[0])]; };
    // Numbers equal to the worst come later and so lose: only larger ones (or NaN) are compared one by one.
    for (; i + 4 * kLanes <= end && !is_nan(worst()); i += 4 * kLanes) {
        const F32 bar = broadcast(worst());
        uint32_t found[4], any = 0;
        for (int j = 0; j < 4; j++) any |= found[j] = bits(not_le(load(x + i + j * kLanes), bar));
        if (!any) continue;
        for (int j = 0; j < 4; j++)
            for (uint32_t left = found[j]; left; left &= left - 1) {
                const int64_t id = i + j * kLanes + __builtin_ctz(left);
                offer(heap, size, ranked(x[id], id));
            }
    }
    for (; i < end && !is_nan(worst()); i++) offer(heap, size, ranked(x[i], i));
    return size;
}

// Empties the heap, the worst first, into a row of the result.
void write_falling(const float* x, uint64_t* heap, int64_t size, float* values, int64_t* ids) {
    while (size > 0) {
        const int64_t id = id_of(heap[0]);
        heap[0] = heap[--size];
        sink(heap, size, 0);
        values[size] = x[id];
        ids[size] = id;
    }
}

// k is at most vocab.
void top_k(const top_k_args& a, Team& team) {
    const auto logits = [&](int64_t row) { return static_cast<const float*>(a.logits) + row * a.stride; };
    const auto write = [&](int64_t row, uint64_t* heap) {
        write_falling(logits(row), heap, a.k, static_cast<float*>(a.values) + row * a.k,
                      static_cast<int64_t*>(a.ids) + row * a.k);
    };
    if (a.k < 1) return;
    if (!shares_vocabulary(team, a.rows, a.vocab)) {
        together(team, a.rows, [&](Member& member) {
            auto* heap = static_cast<uint64_t*>(member.scratch(sizeof(uint64_t) * size_t(a.k)));
            for (int64_t row; (row = member.next()) >= 0;) {
                best_of(logits(row), 0, a.vocab, a.k, heap);
                write(row, heap);
            }
        });
        return;
    }
    const int64_t parts = team.size;
    // [rows, parts, k], and before them how many each has: [rows, parts]
    auto* counts = static_cast<int64_t*>(
        shared_scratch(team, 0, sizeof(int64_t) * size_t(a.rows * parts) * size_t(a.k + 1)));
    auto* heaps = reinterpret_cast<uint64_t*>(counts + a.rows * parts);
    each_task(team, parts, [&](int64_t part) {
        const Range range = part_of(a.vocab, part, parts);
        for (int64_t row = 0; row < a.rows; row++) {
            const int64_t place = row * parts + part;
            counts[place] = best_of(logits(row), range.begin, range.end, a.k, heaps + place * a.k);
        }
    });
    each_task(team, a.rows, [&](int64_t row) {
        uint64_t* heap = heaps + row * parts * a.k;
        int64_t size = counts[row * parts];
        for (int64_t part = 1; part < parts; part++) {
            const uint64_t* other = heap + part * a.k;
            int64_t i = 0;
            // The first part may have had fewer than k numbers: then its heap grows first.
            if (size < a.k) {
                for (; i < counts[row * parts + part] && size < a.k; i++) heap[size++] = other[i];
                make_heap(heap, size);
            }
            for (; i < counts[row * parts + part]; i++) offer(heap, a.k, other[i]);
        }
        write(row, heap);
    });
}

}  // namespace
}  // namespace kvik

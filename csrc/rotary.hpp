// Rotary position embedding: cosines and sines of positions, and the in-place rotation of heads, element j
// with element j + head_dim / 2.
#pragma once

#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

constexpr int64_t kTurnedPerThread = 4096;  // elements: a third of a microsecond

void rotations(const rotations_args& a, Team& team) {
    const int64_t half = a.head_dim / 2;
    const int64_t* positions = static_cast<const int64_t*>(a.positions);
    each_columns(team, a.rows, half, kTurnedPerThread / 2, [&](int64_t row, int64_t begin, int64_t end) {
        const int64_t position = positions[row] < a.last ? positions[row] : a.last;
        const int64_t multiple = position / a.low_rows, rest = position % a.low_rows;
        const float* high = static_cast<const float*>(a.high) + multiple * a.head_dim;
        const float* low = static_cast<const float*>(a.low) + rest * a.head_dim;
        float* out = static_cast<float*>(a.out) + row * a.head_dim;
        each_vector(begin, end, [&](int64_t j, auto n) KVIK_INLINED {
            const F32 c = load(high + j, n), s = load(high + half + j, n);
            const F32 x = load(low + j, n), y = load(low + half + j, n);
            store(out + j, sub(mul(c, x), mul(s, y)), n);
            store(out + half + j, add(mul(c, y), mul(s, x)), n);
        });
    });
}

template <class T>
void turn(T* head, const float* cosines, const float* sines, int64_t half) {
    T* low = head;
    T* high = head + half;
    each_vector(0, half, [&](int64_t j, auto n) KVIK_INLINED {
        const F32 x = load(low + j, n), y = load(high + j, n);
        const F32 c = load(cosines + j, n), s = load(sines + j, n);
        store(low + j, sub(mul(x, c), mul(y, s)), n);
        store(high + j, add(mul(y, c), mul(x, s)), n);
    });
}

template <class T>
void rotary_of(const rotary_args& a, Team& team) {
    const int64_t heads = a.heads + a.kv_heads, half = a.head_dim / 2;
    const int64_t least = kTurnedPerThread / (half > 0 ? 2 * half : 1);
    each_range(team, a.rows * heads, least, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++) {
            const int64_t row = at / heads, head = at % heads;
            const float* cosines = static_cast<const float*>(a.rotation) + row * a.head_dim;
            T* x = head < a.heads
                       ? static_cast<T*>(a.q) + row * a.q_stride + head * a.head_dim
                       : static_cast<T*>(a.k) + row * a.k_stride + (head - a.heads) * a.head_dim;
            turn(x, cosines, cosines + half, half);
        }
    });
}

void rotary(const rotary_args& a, Team& team) {
    a.dtype == kBF16 ? rotary_of<bf16>(a, team) : rotary_of<float>(a, team);
}

}  // namespace
}  // namespace kvik

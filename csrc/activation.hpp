// Activations of the feed-forward layers: as functions of vectors, for kernels that have x in
// registers, and as kernels. Computed in fp32 and rounded once.
#pragma once

#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

// x / (1 + e^-x), relative error below 4e-7. The numerator is cut where the result vanishes, because
// `exp` is cut there too; so -inf gives (nearly) 0 and NaN stays NaN.
KVIK_INLINE F32 silu(F32 x) {
    return div(max(broadcast(-87.0f), x), add(broadcast(1.0f), exp(sub(zero(), x))));
}

// 0.5 x (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): without the difference
// that would cancel for negative x. Relative error below 4e-7 (1 + |2u|), because 2u is rounded.
KVIK_INLINE F32 gelu(F32 x) {
    const F32 cubic = fma(mul(x, x), broadcast(-0.0713548162726f), broadcast(-1.59576912161f));
    return div(max(broadcast(-10.0f), x), add(broadcast(1.0f), exp(mul(x, cubic))));
}

constexpr int64_t kActivationsPerThread = 1024;  // half a microsecond

// act(gate) * up of each row, gate first.
template <class T, class Args, class Act>
void gated(const Args& a, Team& team, Act act) {
    each_columns(team, a.rows, a.inner, kActivationsPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
        const T* up = gate + a.inner;
        T* y = static_cast<T*>(a.y) + row * a.y_stride;
        int64_t i = begin;
        for (; i + kLanes <= end; i += kLanes) store(y + i, mul(act(load(gate + i)), load(up + i)));
        const int rest = int(end - i);
        if (rest) store(y + i, mul(act(load(gate + i, rest)), load(up + i, rest)), rest);
    });
}

template <class T>
void gelu_tanh_of(const gelu_tanh_args& a, Team& team) {
    each_columns(team, a.rows, a.dim, kActivationsPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        T* y = static_cast<T*>(a.y) + row * a.y_stride;
        int64_t i = begin;
        for (; i + kLanes <= end; i += kLanes) store(y + i, gelu(load(x + i)));
        const int rest = int(end - i);
        if (rest) store(y + i, gelu(load(x + i, rest)), rest);
    });
}

void silu_and_mul(const silu_and_mul_args& a, Team& team) {
    const auto act = [](F32 x) { return silu(x); };
    a.dtype == kBF16 ? gated<bf16>(a, team, act) : gated<float>(a, team, act);
}

void gelu_tanh_and_mul(const gelu_tanh_and_mul_args& a, Team& team) {
    const auto act = [](F32 x) { return gelu(x); };
    a.dtype == kBF16 ? gated<bf16>(a, team, act) : gated<float>(a, team, act);
}

void gelu_tanh(const gelu_tanh_args& a, Team& team) {
    a.dtype == kBF16 ? gelu_tanh_of<bf16>(a, team) : gelu_tanh_of<float>(a, team);
}

}  // namespace
}  // namespace kvik

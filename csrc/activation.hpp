// Activations of the feed-forward layers: as functions of vectors, for kernels that have x in
// registers, and as kernels. Computed in fp32 and rounded once.
#pragma once

#include <utility>

#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

KVIK_INLINE F32 sigmoid(F32 x) { return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), x)))); }

// x / (1 + e^-x), relative error below 4e-7. The numerator is cut where the result vanishes, because
// `exp` is cut there too; so -inf gives (nearly) 0 and NaN stays NaN.
KVIK_INLINE F32 silu(F32 x) {
    return div(max(broadcast(-87.0f), x), add(broadcast(1.0f), exp(sub(zero(), x))));
}

// 0.5 x (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): avoids a difference that
// would cancel for negative x. Relative error below 4e-7 (1 + |2u|), because 2u is rounded.
KVIK_INLINE F32 gelu(F32 x) {
    const F32 cubic = fma(mul(x, x), broadcast(-0.0713548162726f), broadcast(-1.59576912161f));
    return div(max(broadcast(-10.0f), x), add(broadcast(1.0f), exp(mul(x, cubic))));
}

// GELU itself, x times the share of a normal distribution below x: 0.5 + x P(x^2), where P is a polynomial of degree 15
// that was fitted over [-5.5, 5.5], and x is cut where the share is 0 or 1. Neither divides nor takes an exponential.
// Absolute error below 2e-7 max(1, |x|); -inf gives (nearly) 0 and NaN stays NaN.
constexpr float kNormalEnd = 5.5f;
constexpr float kNormal[] = {
    0.1285519302f, -0.0641723424f, 0.0477374494f, -0.0387924127f, 0.0320737176f, -0.0260538682f,
    0.0203396212f, -0.0149637470f, 0.0103121223f, -0.0069299638f, 0.0044775070f, -0.0022401712f,
    0.0008411624f, -0.0006733116f, 0.0005920452f, -0.0001906527f,
};

KVIK_INLINE F32 gelu_erf(F32 x) {
    const F32 above = max(broadcast(-kNormalEnd), x), cut = min(broadcast(kNormalEnd), above);
    const F32 u = fma(mul(cut, cut), broadcast(2.0f / (kNormalEnd * kNormalEnd)), broadcast(-1.0f));
    F32 p = broadcast(kNormal[15]);
#pragma GCC unroll 16
    for (int i = 14; i >= 0; i--) p = fma(p, u, broadcast(kNormal[i]));
    return mul(above, fma(cut, p, broadcast(0.5f)));
}

// Maps x smoothly into (-cap, cap).
KVIK_INLINE F32 softcap(F32 x, F32 cap) { return mul(cap, tanh(div(x, cap))); }

// SwiGLU of gpt-oss: g / (1 + e^-1.702g) * (up + 1), with g clamped to at most 7 and up to [-7, 7].
// Infinity is clamped, NaN stays NaN.
constexpr float kSwigluLimit = 7.0f, kSwigluSlope = 1.702f;

KVIK_INLINE F32 within(float limit, F32 x) { return max(broadcast(-limit), min(broadcast(limit), x)); }

KVIK_INLINE F32 clamped_gate(F32 x) {
    const F32 gate = min(broadcast(kSwigluLimit), x);
    return div(max(broadcast(-87.0f), gate), add(broadcast(1.0f), exp(mul(gate, broadcast(-kSwigluSlope)))));
}

KVIK_INLINE F32 clamped_up(F32 x) { return add(within(kSwigluLimit, x), broadcast(1.0f)); }

// SwiGLU of gates up to 10 and factors in [-10, 10] (DeepSeek-V4, Hy4). Infinity is clamped, NaN stays NaN.
constexpr float kSiluLimit = 10.0f;

KVIK_INLINE F32 limited_gate(F32 x) { return silu(min(broadcast(kSiluLimit), x)); }

// SwiGLU of Step 3.7: x / (1 + e^-x), at most 7, times up in [-7, 7].
KVIK_INLINE F32 clipped_gate(F32 x) { return min(broadcast(kSwigluLimit), silu(x)); }

// Odd activations multiply gate and up.
KVIK_INLINE constexpr bool is_paired(int64_t activation) { return activation & 1; }

// Calls `use` with the activation as a constant.
template <class Use, int64_t... kEach>
KVIK_INLINE void with_activation(int64_t activation, const Use& use, std::integer_sequence<int64_t, kEach...>) {
    (void)((activation == kEach && (use(std::integral_constant<int64_t, kEach>{}), true)) || ...);
}
template <class Use>
KVIK_INLINE void with_activation(int64_t activation, const Use& use) {
    with_activation(activation, use, std::make_integer_sequence<int64_t, kClippedSwiglu + 1>{});
}

KVIK_INLINE F32 activated(int64_t activation, F32 x) {
    switch (activation) {
        case kSiluAndMul: return silu(x);
        case kGeluTanh:
        case kGeluTanhAndMul: return gelu(x);
        case kGelu:
        case kGeluAndMul: return gelu_erf(x);
        case kRelu: return max(zero(), x);
        case kReluSquared: return mul(max(zero(), x), max(zero(), x));
        case kClampedSwiglu: return clamped_gate(x);
        case kTanh: return tanh(x);
        case kLimitedSwiglu: return limited_gate(x);
        case kClippedSwiglu: return clipped_gate(x);
        default: return x;
    }
}

// The factor of the gate.
KVIK_INLINE F32 factor_of(int64_t activation, F32 up) {
    if (activation == kLimitedSwiglu) return within(kSiluLimit, up);
    if (activation == kClippedSwiglu) return within(kSwigluLimit, up);
    return activation == kClampedSwiglu ? clamped_up(up) : up;
}

constexpr int64_t kActivationsPerThread = 1024;  // half a microsecond

template <class T>
void activate_of(const activate_args& a, Team& team) {
    const bool paired = is_paired(a.activation);
    each_columns(team, a.rows, a.columns, kActivationsPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        const T* up = x + a.columns;
        T* y = static_cast<T*>(a.y) + row * a.y_stride;
        each_vector(begin, end, [&](int64_t i, auto n) KVIK_INLINED {
            const F32 value = activated(a.activation, load(x + i, n));
            store(y + i, paired ? mul(value, factor_of(a.activation, load(up + i, n))) : value, n);
        });
    });
}

void activate(const activate_args& a, Team& team) {
    a.dtype == kBF16 ? activate_of<bf16>(a, team) : activate_of<float>(a, team);
}

// xIELU. e^x - 1 = 2 t / (1 - t), t = tanh(x / 2), has no difference that would cancel near 0.
template <class T>
void xielu_of(const xielu_args& a, Team& team) {
    const F32 positive = broadcast(float(a.positive)), negative = broadcast(float(a.negative));
    const F32 half = broadcast(0.5f), one = broadcast(1.0f);
    each_columns(team, a.rows, a.dim, kActivationsPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        const T* from = static_cast<const T*>(a.x) + row * a.x_stride;
        T* y = static_cast<T*>(a.y) + row * a.y_stride;
        each_vector(begin, end, [&](int64_t i, auto n) KVIK_INLINED {
            const F32 x = load(from + i, n), t = tanh(mul(half, min(zero(), x)));
            const F32 below = mul(negative, sub(div(add(t, t), sub(one, t)), x));
            store(y + i, fma(half, x, select(less(zero(), x), mul(positive, mul(x, x)), below)), n);
        });
    });
}

void xielu(const xielu_args& a, Team& team) {
    a.dtype == kBF16 ? xielu_of<bf16>(a, team) : xielu_of<float>(a, team);
}

void softcap(const softcap_args& a, Team& team) {
    const F32 cap = broadcast(float(a.cap));
    each_columns(team, a.rows, a.dim, kActivationsPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        float* x = static_cast<float*>(a.x) + row * a.x_stride;
        each_vector(begin, end, [&](int64_t i, auto n) KVIK_INLINED { store(x + i, softcap(load(x + i, n), cap), n); });
    });
}

}  // namespace
}  // namespace kvik

// Normalisation. Sums are taken in fp32 in an order that depends only on `dim`; one thread computes a row.
// Weight and bias have the dtype of x, except that rms_norm's weight may be fp32. y may be x.
// `rescaled`, `activate_top` and `stream_weights` need the same sums.
#pragma once

#include <cmath>

#include "activation.hpp"
#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

constexpr int64_t kNormedPerThread = 4096;  // elements: half a microsecond

int64_t rows_worth_a_thread(int64_t dim) { return kNormedPerThread / (dim > 0 ? dim : 1); }

// Sum of (x - centre)^2, or of x where Squared is false.
template <bool Squared, class T>
float sum_of(const T* x, int64_t dim, float centre) {
    const F32 c = broadcast(centre);
    const auto added = [&](F32 total, F32 v) {
        if constexpr (!Squared) return add(total, v);
        const F32 d = sub(v, c);
        return fma(d, d, total);
    };
    F32 s[4] = {zero(), zero(), zero(), zero()};  // four chains hide the latency of the addition
    int64_t i = 0;
    for (; i + 4 * kLanes <= dim; i += 4 * kLanes)
        for (int j = 0; j < 4; j++) s[j] = added(s[j], load(x + i + j * kLanes));
    for (; i + kLanes <= dim; i += kLanes) s[0] = added(s[0], load(x + i));
    const int rest = int(dim - i);
    if (rest) {
        const F32 v = load(x + i, rest);
        s[1] = added(s[1], select(first_lanes(rest), v, Squared ? c : zero()));
    }
    return sum(add(add(s[0], s[1]), add(s[2], s[3])));
}

// y = (x - centre) * scale * weight + bias; without centre and bias where Biased is false.
template <bool Biased, class T, class W>
void scale_row(const T* x, const W* weight, const W* bias, T* y, int64_t dim, float centre, float scale) {
    const F32 c = broadcast(centre), s = broadcast(scale);
    each_vector(0, dim, [&](int64_t i, auto n) KVIK_INLINED {
        const F32 v = load(x + i, n), w = load(weight + i, n);
        if constexpr (Biased)
            store(y + i, add(mul(mul(sub(v, c), s), w), load(bias + i, n)), n);
        else
            store(y + i, mul(mul(v, s), w), n);
    });
}

template <class T, class W>
void rms_norm_of(const rms_norm_args& a, Team& team) {
    each_range(team, a.rows * a.inner, rows_worth_a_thread(a.dim), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++) {
            const int64_t row = at / a.inner, head = at % a.inner;
            const W* weight = static_cast<const W*>(a.weight) + head * a.weight_stride;
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride + head * a.x_inner_stride;
            T* y = static_cast<T*>(a.y) + row * a.y_stride + head * a.y_inner_stride;
            const float square = sum_of<true>(x, a.dim, 0.0f) / float(a.dim);
            scale_row<false, T, W>(x, weight, nullptr, y, a.dim, 0.0f, 1.0f / sqrtf(square + float(a.eps)));
        }
    });
}

template <class T>
void layer_norm_of(const layer_norm_args& a, Team& team) {
    each_range(team, a.rows * a.inner, rows_worth_a_thread(a.dim), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++) {
            const int64_t row = at / a.inner, head = at % a.inner;
            const T* weight = static_cast<const T*>(a.weight) + head * a.weight_stride;
            const T* bias = static_cast<const T*>(a.bias) + head * a.weight_stride;
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride + head * a.x_inner_stride;
            T* y = static_cast<T*>(a.y) + row * a.y_stride + head * a.y_inner_stride;
            const float mean = sum_of<false>(x, a.dim, 0.0f) / float(a.dim);
            const float square = sum_of<true>(x, a.dim, mean) / float(a.dim);
            scale_row<true>(x, weight, bias, y, a.dim, mean, 1.0f / sqrtf(square + float(a.eps)));
        }
    });
}

void rms_norm(const rms_norm_args& a, Team& team) {
    if (a.dtype != kBF16)
        rms_norm_of<float, float>(a, team);
    else if (a.weight_dtype == kBF16)
        rms_norm_of<bf16, bf16>(a, team);
    else
        rms_norm_of<bf16, float>(a, team);
}

void layer_norm(const layer_norm_args& a, Team& team) {
    a.dtype == kBF16 ? layer_norm_of<bf16>(a, team) : layer_norm_of<float>(a, team);
}

template <class T>
void rescaled_of(const rescaled_args& a, Team& team) {
    each_range(team, a.rows * a.inner, rows_worth_a_thread(a.dim), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++) {
            const int64_t row = at / a.inner, part = at % a.inner;
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride + part * a.x_inner_stride;
            const T* like = static_cast<const T*>(a.like) + row * a.like_stride;
            T* y = static_cast<T*>(a.y) + row * a.y_stride + part * a.y_inner_stride;
            const float square = sum_of<true>(x, a.dim, 0.0f) / float(a.dim), least = float(a.least);
            const float wanted = sum_of<true>(like, a.dim, 0.0f) / float(a.dim);
            const F32 factor = broadcast(sqrtf(wanted) / sqrtf(square < least ? least : square));
            each_vector(0, a.dim, [&](int64_t i, auto n) KVIK_INLINED { store(y + i, mul(load(x + i, n), factor), n); });
        }
    });
}

void rescaled(const rescaled_args& a, Team& team) {
    a.dtype == kBF16 ? rescaled_of<bf16>(a, team) : rescaled_of<float>(a, team);
}

template <class T>
void activate_top_of(const activate_top_args& a, Team& team) {
    each_range(team, a.rows, rows_worth_a_thread(a.columns), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
            const T* up = gate + a.columns;
            T* y = static_cast<T*>(a.y) + row * a.y_stride;
            const float mean = sum_of<false>(gate, a.columns, 0.0f) / float(a.columns);
            const float square = sum_of<true>(gate, a.columns, mean) / float(a.columns);
            const F32 cut = broadcast(mean + float(a.deviations) * sqrtf(square));
            each_vector(0, a.columns, [&](int64_t i, auto n) KVIK_INLINED {
                const F32 value = activated(a.activation, max(zero(), sub(load(gate + i, n), cut)));
                store(y + i, mul(value, factor_of(a.activation, load(up + i, n))), n);
            });
        }
    });
}

void activate_top(const activate_top_args& a, Team& team) {
    a.dtype == kBF16 ? activate_top_of<bf16>(a, team) : activate_top_of<float>(a, team);
}

constexpr int64_t kMostStreams = 16;

// Divides the numbers of each line of a square by their sum; `step` is between numbers of a line, `next` between lines.
void divide_lines(float* m, int64_t size, int64_t step, int64_t next, float least) {
    for (int64_t line = 0; line < size; line++) {
        float total = least;
        for (int64_t i = 0; i < size; i++) total += m[line * next + i * step];
        for (int64_t i = 0; i < size; i++) m[line * next + i * step] /= total;
    }
}

// The matrix of a row of `stream_weights` (Sinkhorn and Knopp 1967).
void mix_streams(const stream_weights_args& a, const float* logits, const float* gains, float scale, float* y) {
    const int64_t n = a.streams;
    const float *biases = gains + a.columns, least = gains[3 * a.columns];
    float m[kMostStreams * kMostStreams];
    for (int64_t row = 0; row < n; row++) {
        float top = -INFINITY, total = 0.0f;
        for (int64_t i = row * n; i < (row + 1) * n; i++) {
            m[i] = logits[i] * scale * gains[i] + biases[i];
            top = m[i] > top ? m[i] : top;
        }
        for (int64_t i = row * n; i < (row + 1) * n; i++) total += m[i] = expf(m[i] - top);
        for (int64_t i = row * n; i < (row + 1) * n; i++) m[i] = m[i] / total + least;
    }
    for (int64_t round = 0; round < a.rounds; round++) {
        if (round) divide_lines(m, n, 1, n, least);
        divide_lines(m, n, n, 1, least);
    }
    for (int64_t i = 0; i < n * n; i++) y[i % n * n + i / n] = m[i];
}

template <class T>
void stream_weights_of(const stream_weights_args& a, Team& team) {
    const float* gains = static_cast<const float*>(a.factors);
    const float *biases = gains + a.columns, *most = biases + a.columns, *least = most + a.columns;
    const int64_t single = a.columns - a.streams * a.streams;
    each_range(team, a.rows, rows_worth_a_thread(a.dim), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            const float* logits = static_cast<const float*>(a.logits) + row * a.logits_stride;
            float* y = static_cast<float*>(a.y) + row * a.y_stride;
            const float square = sum_of<true>(x, a.dim, 0.0f) / float(a.dim);
            const float factor = 1.0f / sqrtf(square + float(a.eps));
            const F32 scale = broadcast(factor);
            each_vector(0, single, [&](int64_t i, auto n) KVIK_INLINED {
                const F32 logit = mul(load(logits + i, n), scale);
                const F32 share = sigmoid(fma(logit, load(gains + i, n), load(biases + i, n)));
                store(y + i, fma(load(most + i, n), share, load(least + i, n)), n);
            });
            if (a.streams) mix_streams(a, logits + single, gains + single, factor, y + single);
        }
    });
}

void stream_weights(const stream_weights_args& a, Team& team) {
    a.dtype == kBF16 ? stream_weights_of<bf16>(a, team) : stream_weights_of<float>(a, team);
}

}  // namespace
}  // namespace kvik

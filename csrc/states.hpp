// Layers that keep a state for each sequence: a short convolution and the gated delta rule. Both process token by
// token, so that no result depends on how a prompt is divided into chunks; sums are fp32, in an order that
// depends only on the sizes.
#pragma once

#include <cmath>

#include "activation.hpp"
#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

KVIK_INLINE F32 sigmoid(F32 x) { return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), x)))); }

KVIK_INLINE F32 gate_of(int64_t by, F32 x) {
    switch (by) {
        case kGateSilu: return silu(x);
        case kGateSigmoid: return sigmoid(x);
        default: return x;
    }
}

template <class T, class G>
void gated_of(const gated_args& a, Team& team) {
    each_columns(team, a.rows, a.dim, kActivationsPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        const G* gate = static_cast<const G*>(a.gate) + row * a.gate_stride;
        T* y = static_cast<T*>(a.y) + row * a.y_stride;
        const bool one = a.gate_dim == 1;
        const F32 of_row = one ? gate_of(a.by, broadcast(sum(load(gate, 1)))) : zero();
        const auto factor = [&](int64_t i, int n) { return one ? of_row : gate_of(a.by, load_some(gate + i, n)); };
        int64_t i = begin;
        for (; i + kLanes <= end; i += kLanes) store(y + i, mul(load(x + i), factor(i, kLanes)));
        const int rest = int(end - i);
        if (rest) store(y + i, mul(load(x + i, rest), factor(i, rest)), rest);
    });
}

void gated(const gated_args& a, Team& team) {
    if (a.dtype != kBF16) return gated_of<float, float>(a, team);
    a.wide ? gated_of<bf16, float>(a, team) : gated_of<bf16, bf16>(a, team);
}

// The tokens of a sequence in this step, and its state.
struct StateTokens {
    int64_t first, count;
    float* state;  // null: nothing to do
    bool fresh;    // the sequence begins in this step
};

template <class Args>
StateTokens state_tokens(const Args& a, int64_t sequence) {
    const int32_t* starts = static_cast<const int32_t*>(a.starts);
    const int32_t row = static_cast<const int32_t*>(a.state_rows)[sequence];
    const int64_t count = starts[sequence + 1] - starts[sequence];
    float* state = row < 0 || count <= 0 ? nullptr : static_cast<float*>(a.state) + row * a.state_stride;
    return {starts[sequence], count, state, static_cast<const int32_t*>(a.lengths)[sequence] == count};
}

constexpr int64_t kConvChannels = 256;  // in a task, so that its last inputs stay in the cache

template <class T>
void convolve(const causal_conv_args& a, const StateTokens& on, int64_t channel, int64_t count) {
    alignas(64) float last[(kMaxTaps - 1) * kConvChannels];
    const int64_t kept = a.width - 1;
    for (int64_t j = 0; j < kept; j++)
        for (int64_t c = 0; c < count; c++)
            last[j * kConvChannels + c] = on.fresh ? 0.0f : on.state[j * a.channels + channel + c];
    const T* weight = static_cast<const T*>(a.weight) + channel;
    for (int64_t token = on.first; token < on.first + on.count; token++) {
        const T* x = static_cast<const T*>(a.x) + token * a.x_stride + channel;
        T* y = static_cast<T*>(a.y) + token * a.y_stride + channel;
        for (int64_t c = 0; c < count; c += kLanes) {
            const int n = count - c < kLanes ? int(count - c) : kLanes;
            const F32 newest = load(x + c, n);
            F32 total = a.bias ? load(static_cast<const T*>(a.bias) + channel + c, n) : zero();
            for (int64_t j = 0; j < kept; j++) {
                float* at = last + j * kConvChannels + c;
                total = fma(load(at), load(weight + j * a.channels + c, n), total);
                store(at, j + 1 < kept ? load(at + kConvChannels) : newest);
            }
            total = fma(newest, load(weight + kept * a.channels + c, n), total);
            store(y + c, a.silu ? silu(total) : total, n);
        }
    }
    for (int64_t j = 0; j < kept; j++)
        std::memcpy(on.state + j * a.channels + channel, last + j * kConvChannels, size_t(count) * sizeof(float));
}

void causal_conv(const causal_conv_args& a, Team& team) {
    const int64_t parts = (a.channels + kConvChannels - 1) / kConvChannels;
    each_task(team, a.num_seqs * parts, [&](int64_t task) {
        const StateTokens on = state_tokens(a, task / parts);
        if (!on.state) return;
        const int64_t channel = task % parts * kConvChannels, left = a.channels - channel;
        const int64_t count = left < kConvChannels ? left : kConvChannels;
        a.dtype == kBF16 ? convolve<bf16>(a, on, channel, count) : convolve<float>(a, on, channel, count);
    });
}

// Columns of a state that a task takes through all tokens. They are copied to a tile in the L1 cache:
// memory is read once and written once, however many tokens there are.
constexpr int64_t kDeltaColumns = 2 * kLanes;
constexpr float kUnitEps = 1e-6f;

// to = x * scale / |x|.
template <class T>
void unit(float* to, const T* x, int64_t dim, float scale) {
    F32 square = zero();
    for (int64_t i = 0; i < dim; i += kLanes) {
        const int n = dim - i < kLanes ? int(dim - i) : kLanes;
        const F32 v = load(x + i, n);
        square = fma(v, v, square);
    }
    const F32 by = broadcast(scale / sqrtf(sum(square) + kUnitEps));
    for (int64_t i = 0; i < dim; i += kLanes) {
        const int n = dim - i < kLanes ? int(dim - i) : kLanes;
        store(to + i, mul(load(x + i, n), by), n);
    }
}

inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

template <class T>
void delta_columns(const gated_delta_args& a, const StateTokens& on, int64_t head, int64_t column, float* scratch) {
    const int64_t n = a.value_dim - column < kDeltaColumns ? a.value_dim - column : kDeltaColumns;
    const int first = n < kLanes ? int(n) : kLanes, second = int(n) - first;
    const int64_t key_head = head / (a.value_heads / a.key_heads), keys = a.key_heads * a.key_dim;
    float* state = on.state + head * a.key_dim * a.value_dim + column;
    float *tile = scratch, *q = tile + a.key_dim * kDeltaColumns, *k = q + a.key_dim;
    for (int64_t i = 0; i < a.key_dim; i++) {
        const float* row = state + i * a.value_dim;
        store(tile + i * kDeltaColumns, on.fresh ? zero() : load(row, first));
        store(tile + i * kDeltaColumns + kLanes, on.fresh || !second ? zero() : load(row + kLanes, second));
    }
    const float rate = expf(static_cast<const float*>(a.decay)[head]);
    const float bias = static_cast<const float*>(a.bias)[head], scale = 1.0f / sqrtf(float(a.key_dim));
    for (int64_t token = on.first; token < on.first + on.count; token++) {
        const T* x = static_cast<const T*>(a.x) + token * a.x_stride;
        const T* gates = static_cast<const T*>(a.gates) + token * a.gates_stride;
        unit(q, x + key_head * a.key_dim, a.key_dim, scale);
        unit(k, x + keys + key_head * a.key_dim, a.key_dim, 1.0f);
        float b[1], alpha[1];
        store(b, load(gates + head, 1), 1);
        store(alpha, load(gates + a.value_heads + head, 1), 1);
        const F32 decay = broadcast(expf(-rate * softplus(alpha[0] + bias)));
        const F32 beta = broadcast(1.0f / (1.0f + expf(-b[0])));
        // Even and odd rows are summed separately: two chains hide the latency.
        F32 seen[4] = {zero(), zero(), zero(), zero()};
        for (int64_t i = 0; i < a.key_dim; i++) {
            const F32 by = broadcast(k[i]);
            const float* row = tile + i * kDeltaColumns;
            F32* to = seen + 2 * (i & 1);
            to[0] = fma(load(row), by, to[0]);
            to[1] = fma(load(row + kLanes), by, to[1]);
        }
        const T* v = x + 2 * keys + head * a.value_dim + column;
        const F32 v0 = load(v, first), v1 = second ? load(v + kLanes, second) : zero();
        const F32 change0 = mul(beta, sub(v0, mul(decay, add(seen[0], seen[2]))));
        const F32 change1 = mul(beta, sub(v1, mul(decay, add(seen[1], seen[3]))));
        F32 out[4] = {zero(), zero(), zero(), zero()};
        for (int64_t i = 0; i < a.key_dim; i++) {
            const F32 key = broadcast(k[i]), query = broadcast(q[i]);
            float* row = tile + i * kDeltaColumns;
            F32* to = out + 2 * (i & 1);
            const F32 s0 = fma(key, change0, mul(decay, load(row)));
            const F32 s1 = fma(key, change1, mul(decay, load(row + kLanes)));
            store(row, s0);
            store(row + kLanes, s1);
            to[0] = fma(s0, query, to[0]);
            to[1] = fma(s1, query, to[1]);
        }
        T* y = static_cast<T*>(a.y) + token * a.y_stride + head * a.value_dim + column;
        store(y, add(out[0], out[2]), first);
        if (second) store(y + kLanes, add(out[1], out[3]), second);
    }
    for (int64_t i = 0; i < a.key_dim; i++) {
        float* row = state + i * a.value_dim;
        store(row, load(tile + i * kDeltaColumns), first);
        if (second) store(row + kLanes, load(tile + i * kDeltaColumns + kLanes), second);
    }
}

void gated_delta(const gated_delta_args& a, Team& team) {
    const int64_t parts = (a.value_dim + kDeltaColumns - 1) / kDeltaColumns, each = a.value_heads * parts;
    const size_t scratch = size_t(a.key_dim * (kDeltaColumns + 2)) * sizeof(float);
    together(team, a.num_seqs * each, [&](Member& member) {
        float* own = static_cast<float*>(member.scratch(scratch));
        for (int64_t task; (task = member.next()) >= 0;) {
            const StateTokens on = state_tokens(a, task / each);
            if (!on.state) continue;
            const int64_t head = task % each / parts, column = task % parts * kDeltaColumns;
            a.dtype == kBF16 ? delta_columns<bf16>(a, on, head, column, own)
                             : delta_columns<float>(a, on, head, column, own);
        }
    });
}

}  // namespace
}  // namespace kvik

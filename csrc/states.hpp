// Layers that keep a state for each sequence: a short convolution, and the gated delta rule or a state space. They
// process token by token, so that no result depends on how a prompt is divided into chunks; sums are fp32, in an order
// that depends only on the sizes.
//
// A state cannot take back a token. So the stored state covers no draft of the last step: the convolution keeps
// their inputs behind its own, and the recurrence logs theirs. The next step first repeats those that were accepted.
#pragma once

#include <cmath>

#include "activation.hpp"
#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

// max(x, 0) + log(1 + exp(-|x|)); log(1 + y) = 2 artanh(y / (2 + y)), whose argument is at most 1/3: the first term
// that is left out is below 1e-8 of the sum.
KVIK_INLINE F32 softplus(F32 x) {
    const F32 y = exp(sub(zero(), abs(x))), z = div(y, add(y, broadcast(2.0f))), square = mul(z, z);
    F32 series = broadcast(1.0f / 15.0f);
    for (int n = 13; n > 0; n -= 2) series = fma(series, square, broadcast(1.0f / float(n)));
    return fma(add(z, z), series, max(x, zero()));
}

KVIK_INLINE F32 gate_of(int64_t by, F32 x) {
    switch (by) {
        case kGateSilu: return silu(x);
        case kGateSigmoid: return sigmoid(x);
        case kGateSoftplus: return softplus(x);
        default: return x;
    }
}

template <class T, class G>
void gated_of(const gated_args& a, Team& team) {
    each_columns(team, a.rows, a.dim, kActivationsPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        const G* gate = static_cast<const G*>(a.gate) + row * a.gate_stride;
        T* y = static_cast<T*>(a.y) + row * a.y_stride;
        const int64_t width = a.dim / a.gate_dim;  // columns that share a gate
        for (int64_t part = begin, stop; part < end; part = stop) {
            stop = width == 1 ? end : (part / width + 1) * width < end ? (part / width + 1) * width : end;
            const F32 shared = width == 1 ? zero() : gate_of(a.by, broadcast(sum(load(gate + part / width, 1))));
            each_vector(part, stop, [&](int64_t i, auto n) KVIK_INLINED {
                store(y + i, mul(load(x + i, n), width == 1 ? gate_of(a.by, load(gate + i, n)) : shared), n);
            });
        }
    });
}

void gated(const gated_args& a, Team& team) {
    if (a.dtype != kBF16) return gated_of<float, float>(a, team);
    a.wide ? gated_of<bf16, float>(a, team) : gated_of<bf16, bf16>(a, team);
}

// The tokens of a sequence in this step, and its state.
struct StateTokens {
    int64_t first, count;
    int64_t row;      // of its state; negative: nothing to do
    bool fresh;       // the sequence begins in this step
    int64_t pending;  // tokens before this step that the state does not cover
    int64_t drafts;   // of the tokens
};

inline int64_t entry(const void* numbers, int64_t i) {
    return numbers ? static_cast<const int32_t*>(numbers)[i] : 0;
}

template <class Args>
StateTokens state_tokens(const Args& a, int64_t sequence) {
    const int64_t first = entry(a.starts, sequence), count = entry(a.starts, sequence + 1) - first;
    const int64_t row = count > 0 ? entry(a.state_rows, sequence) : -1;
    const bool fresh = entry(a.lengths, sequence) == count;
    return {first, count, row, fresh, entry(a.pending, sequence), entry(a.drafts, sequence)};
}

constexpr int64_t kConvChannels = 256;  // in a task, so that its last inputs stay in the cache
constexpr int64_t kConvTokens = 8;      // for which weights and last inputs are loaded once

// kTaps: width of the convolution, so that what it reads stays in registers; 0: any, which is slower.
template <class T, int kTaps>
void convolve(const causal_conv_args& a, const StateTokens& on, int64_t channel, int64_t count) {
    alignas(64) float last[(kMaxTaps - 1) * kConvChannels];
    const int64_t kept = (kTaps ? kTaps : a.width) - 1;
    float* state = static_cast<float*>(a.state) + on.row * a.state_stride + channel;
    const T* weight = static_cast<const T*>(a.weight) + channel;
    const T* inputs = static_cast<const T*>(a.x) + on.first * a.x_stride + channel;
    for (int64_t j = 0; j < kept; j++)
        for (int64_t c = 0; c < count; c++)
            last[j * kConvChannels + c] = on.fresh ? 0.0f : state[(on.pending + j) * a.channels + c];
    for (int64_t begin = 0; begin < on.count; begin += kConvTokens) {
        const int64_t end = begin + kConvTokens < on.count ? begin + kConvTokens : on.count;
        each_vector(0, count, [&](int64_t c, auto n) KVIK_INLINED {
            F32 past[kTaps ? kTaps : kMaxTaps], by[kTaps ? kTaps : kMaxTaps];
            for (int64_t j = 0; j < kept; j++) past[j] = load(last + j * kConvChannels + c);
            for (int64_t j = 0; j <= kept; j++) by[j] = load(weight + j * a.channels + c, n);
            const F32 bias = a.bias ? load(static_cast<const T*>(a.bias) + channel + c, n) : zero();
            for (int64_t token = begin; token < end; token++) {
                past[kept] = load(inputs + token * a.x_stride + c, n);
                F32 total = bias;
                for (int64_t j = 0; j <= kept; j++) total = fma(past[j], by[j], total);
                for (int64_t j = 0; j < kept; j++) past[j] = past[j + 1];
                T* y = static_cast<T*>(a.y) + (on.first + token) * a.y_stride + channel;
                store(y + c, a.silu ? silu(total) : total, n);
            }
            for (int64_t j = 0; j < kept; j++) store(last + j * kConvChannels + c, past[j]);
        });
    }
    // What the next step may need: inputs from `kept` before the first draft on. Older ones move forward.
    for (int64_t j = 0; j < kept + on.drafts; j++) {
        const int64_t token = on.count - on.drafts - kept + j;
        float* to = state + j * a.channels;
        each_vector(0, count, [&](int64_t c, auto n) KVIK_INLINED {
            const float* from = state + (on.pending + kept + token) * a.channels + c;
            store(to + c, token >= 0 ? load(inputs + token * a.x_stride + c, n) : on.fresh ? zero() : load(from, n), n);
        });
    }
}

void causal_conv(const causal_conv_args& a, Team& team) {
    const int64_t parts = (a.channels + kConvChannels - 1) / kConvChannels;
    each_task(team, a.num_seqs * parts, [&](int64_t task) {
        const StateTokens on = state_tokens(a, task / parts);
        if (on.row < 0) return;
        const int64_t channel = task % parts * kConvChannels, left = a.channels - channel;
        const int64_t count = left < kConvChannels ? left : kConvChannels;
        const auto run = [&]<class T>(T) {
            switch (a.width) {
                case 3: return convolve<T, 3>(a, on, channel, count);
                case 4: return convolve<T, 4>(a, on, channel, count);
                default: return convolve<T, 0>(a, on, channel, count);
            }
        };
        a.dtype == kBF16 ? run(bf16{}) : run(float{});
    });
}

// Columns of a state that a task takes through all tokens. They are copied to a tile in the L1 cache:
// memory is read once and written once, however many tokens there are.
constexpr int64_t kStateColumns = 2 * kLanes;
constexpr float kUnitEps = 1e-6f;

// to = x * scale / |x|.
template <class T>
void unit(float* to, const T* x, int64_t dim, float scale) {
    F32 square = zero();
    each_vector(0, dim, [&](int64_t i, auto n) KVIK_INLINED { square = fma(load(x + i, n), load(x + i, n), square); });
    const F32 by = broadcast(scale / sqrtf(sum(square) + kUnitEps));
    each_vector(0, dim, [&](int64_t i, auto n) KVIK_INLINED { store(to + i, mul(load(x + i, n), by), n); });
}

template <class T>
void widen(float* to, const T* x, int64_t count) {
    each_vector(0, count, [&](int64_t i, auto n) KVIK_INLINED { store(to + i, load(x + i, n), n); });
}

inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// What a token does to some columns of the state of a head.
struct HeadToken {
    F32 v0, v1, beta;
    F32 decay;    // of the state; 1 if each row has its own
    float *q, *k;
    float* rows;  // decay of each row, if it has its own
    float* seen;  // the key times these decays; or the key
};

// Sums over the rows of two vectors of columns. Even and odd rows are summed separately: more chains hide the latency.
struct ColumnSums {
    F32 even0, even1, odd0, odd1;

    F32 first() const { return add(even0, odd0); }
    F32 second() const { return add(even1, odd1); }
};

KVIK_INLINE ColumnSums no_sums() { return {zero(), zero(), zero(), zero()}; }

// Columns of the state of one head, in a tile, on their way through the tokens of a sequence.
template <bool kByRow>
struct HeadColumns {
    const recurrence_args& a;
    int64_t head, column;
    int first, second;  // of the columns: in the first vector and in the second
    float* tile;
    float rate, scale;
    const float* bias;  // of the head
    F32 skip;
    ColumnSums seen;  // S^T of what the next token sees; zeros in a state space

    template <class T>
    void prepare(HeadToken& token, const T* x, const T* gates) const {
        const int64_t key_head = head / (a.value_heads / a.key_heads), keys = a.key_heads * a.key_dim;
        const T *q = x + key_head * a.key_dim, *k = q + keys, *v = x + 2 * keys, *alpha = gates + a.value_heads;
        if (a.skip) {
            v = x;
            k = x + a.value_heads * a.value_dim + key_head * a.key_dim;
            q = k + keys;
            alpha = gates;
        }
        if (a.skip) {
            widen(token.q, q, a.key_dim);
            widen(token.k, k, a.key_dim);
        } else {
            unit(token.q, q, a.key_dim, scale);
            unit(token.k, k, a.key_dim, 1.0f);
            token.beta = broadcast(float(a.beta_scale) / (1.0f + expf(-sum(load(gates + head, 1)))));
        }
        if constexpr (kByRow) {
            alpha += head * a.key_dim;
            const bool bounded = a.bound < 0;
            const F32 by = broadcast(rate), fall = broadcast(bounded ? float(a.bound) : -rate);
            each_vector(0, a.key_dim, [&](int64_t i, auto n) KVIK_INLINED {
                const F32 gate = add(load(alpha + i, n), load(bias + i, n));
                const F32 decay = exp(mul(fall, bounded ? sigmoid(mul(by, gate)) : softplus(gate)));
                store(token.rows + i, decay, n);
                store(token.seen + i, mul(decay, load(token.k + i, n)), n);
            });
            token.decay = broadcast(1.0f);
        } else {
            const float step = softplus(sum(load(alpha + head, 1)) + *bias);
            token.decay = broadcast(expf(-rate * step));
            if (a.skip) token.beta = broadcast(step);
        }
        v += head * a.value_dim + column;
        token.v0 = load(v, first);
        token.v1 = second ? load(v + kLanes, second) : zero();
    }

    void begin(const HeadToken& token) {
        ColumnSums sums = no_sums();
        each_row([&](int64_t i, int odd) { add_row(sums, odd, load_row(i), broadcast(token.seen[i])); });
        seen = sums;
    }

    // Takes the tile through a token, and reads it for the next one (null: there is none, or a change does not
    // depend on the state) on the same way. y: the output of the head's columns; null: it is not needed.
    template <class T>
    void pass(const HeadToken& token, const HeadToken* next, T* y) {
        const F32 decay = token.decay, change0 = mul(token.beta, sub(token.v0, mul(decay, seen.first()))),
                  change1 = mul(token.beta, sub(token.v1, mul(decay, seen.second())));
        ColumnSums out = no_sums(), sums = no_sums();
        const auto update = [&](int64_t i, int odd) {
            const F32 key = broadcast(token.k[i]);
            const F32 kept = kByRow ? broadcast(token.rows[i]) : decay;
            const Row old = load_row(i);
            const Row row{fma(key, change0, mul(kept, old.a)), fma(key, change1, mul(kept, old.b))};
            store(tile + i * kStateColumns, row.a);
            store(tile + i * kStateColumns + kLanes, row.b);
            add_row(out, odd, row, broadcast(token.q[i]));
            return row;
        };
        if (next)
            each_row([&](int64_t i, int odd) { add_row(sums, odd, update(i, odd), broadcast(next->seen[i])); });
        else
            each_row(update);
        seen = sums;
        if (!y) return;
        store(y, fma(skip, token.v0, out.first()), first);
        if (second) store(y + kLanes, fma(skip, token.v1, out.second()), second);
    }

    struct Row {
        F32 a, b;
    };

    Row load_row(int64_t i) const { return {load(tile + i * kStateColumns), load(tile + i * kStateColumns + kLanes)}; }

    static void add_row(ColumnSums& sums, int odd, const Row& row, F32 by) {
        F32 *to0 = odd ? &sums.odd0 : &sums.even0, *to1 = odd ? &sums.odd1 : &sums.even1;
        *to0 = fma(row.a, by, *to0);
        *to1 = fma(row.b, by, *to1);
    }

    // Calls work(i, whether i is odd), which is a constant for the compiler.
    template <class Work>
    void each_row(const Work& work) const {
        int64_t i = 0;
        for (; i + 2 <= a.key_dim; i += 2) {
            work(i, 0);
            work(i + 1, 1);
        }
        if (i < a.key_dim) work(i, 0);
    }
};

inline int64_t inputs_width(const recurrence_args& a) {
    return 2 * a.key_heads * a.key_dim + a.value_heads * a.value_dim;
}

inline int64_t gates_width(const recurrence_args& a) {
    const int64_t each = a.by_channel ? a.value_dim : a.by_row ? a.key_dim : 1;
    return (a.skip ? each : each + 1) * a.value_heads;
}

template <class T, bool kByRow>
void head_columns(const recurrence_args& a, const StateTokens& on, int64_t head, int64_t column, float* scratch) {
    const int64_t n = a.value_dim - column < kStateColumns ? a.value_dim - column : kStateColumns;
    const int first = n < kLanes ? int(n) : kLanes, second = int(n) - first;
    float* state = static_cast<float*>(a.state) + on.row * a.state_stride + head * a.key_dim * a.value_dim + column;
    float *tile = scratch, *inputs = tile + a.key_dim * kStateColumns;
    for (int64_t i = 0; i < a.key_dim; i++) {
        const float* row = state + i * a.value_dim;
        store(tile + i * kStateColumns, on.fresh ? zero() : load(row, first));
        store(tile + i * kStateColumns + kLanes, on.fresh || !second ? zero() : load(row + kLanes, second));
    }
    HeadColumns<kByRow> columns{a,
                                head,
                                column,
                                first,
                                second,
                                tile,
                                expf(static_cast<const float*>(a.decay)[head]),
                                1.0f / sqrtf(float(a.key_dim)),
                                static_cast<const float*>(a.bias) + head * (kByRow ? a.key_dim : 1),
                                broadcast(a.skip ? static_cast<const float*>(a.skip)[head] : 0.0f),
                                no_sums()};
    HeadToken tokens[2];
    for (HeadToken& token : tokens) {
        token.q = inputs + 4 * (&token - tokens) * a.key_dim;
        token.k = token.q + a.key_dim;
        token.rows = token.k + a.key_dim;
        token.seen = kByRow ? token.rows + a.key_dim : token.k;
    }
    const int64_t width = inputs_width(a), certain = on.pending + on.count - on.drafts;
    const float* log = static_cast<const float*>(a.log) + on.row * a.log_stride;
    const auto prepare = [&](int64_t i) {
        const int64_t at = on.first + i - on.pending;
        if (i < on.pending) {
            const float* logged = log + i * (width + gates_width(a));
            columns.prepare(tokens[i & 1], logged, logged + width);
        } else {
            columns.prepare(tokens[i & 1], static_cast<const T*>(a.x) + at * a.x_stride,
                            static_cast<const T*>(a.gates) + at * a.gates_stride);
        }
    };
    prepare(0);
    if (!a.skip) columns.begin(tokens[0]);
    for (int64_t i = 0, count = on.pending + on.count; i < count; i++) {
        const bool last = i + 1 == count;
        if (!last) prepare(i + 1);
        T* y = static_cast<T*>(a.y) + (on.first + i - on.pending) * a.y_stride + head * a.value_dim + column;
        columns.pass(tokens[i & 1], last || a.skip ? nullptr : &tokens[~i & 1], i < on.pending ? nullptr : y);
        if (i + 1 != certain) continue;
        for (int64_t j = 0; j < a.key_dim; j++) {
            float* row = state + j * a.value_dim;
            store(row, load(tile + j * kStateColumns), first);
            if (second) store(row + kLanes, load(tile + j * kStateColumns + kLanes), second);
        }
    }
}

// Channels that a task takes through all tokens if each number of a state has its own decay. Such a state has few rows,
// so that a token takes little time: a task has several vectors of each row.
constexpr int64_t kScanChannels = 8 * kLanes;

template <class T>
struct Channels {
    const recurrence_args& a;
    int64_t head, channel, count;
    // state, rates: tiles [key_dim, kScanChannels]; a rate is the binary logarithm of the decay by a step of 1.
    float *state, *rates;
    float *keys, *queries;  // of a token

    int64_t first() const { return head * a.value_dim + channel; }

    // Takes the tile through a token with these inputs. y: the output; null: it is not needed.
    template <class X>
    void pass(const X* x, const X* gates, T* y) const {
        const int64_t key_head = head / (a.value_heads / a.key_heads);
        const X* k = x + a.value_heads * a.value_dim + key_head * a.key_dim;
        widen(keys, k, a.key_dim);
        widen(queries, k + a.key_heads * a.key_dim, a.key_dim);
        const float *bias = static_cast<const float*>(a.bias), *skip = static_cast<const float*>(a.skip);
        alignas(64) float steps[kScanChannels];  // first, as each takes long and none waits for another
        each_vector(0, count, [&](int64_t c, auto n) KVIK_INLINED {
            const int64_t at = first() + c;
            store(steps + c, softplus(add(load(gates + at, n), load(bias + at, n))));
        });
        each_vector(0, count, [&](int64_t c, auto n) KVIK_INLINED {
            const int64_t at = first() + c;
            const F32 value = load(x + at, n), step = load(steps + c), change = mul(step, value);
            F32 out = mul(value, load(skip + at, n)), odd = zero();
            for (int64_t i = 0; i < a.key_dim; i++) {
                float* number = state + i * kScanChannels + c;
                const F32 decay = power_of_two(mul(load(rates + i * kScanChannels + c), step));
                const F32 now = fma(broadcast(keys[i]), change, mul(decay, load(number)));
                store(number, now);
                F32& to = i & 1 ? odd : out;
                to = fma(now, broadcast(queries[i]), to);
            }
            if (y) store(y + at, add(out, odd), n);
        });
    }
};

template <class T>
void scan_channels(const recurrence_args& a, const StateTokens& on, int64_t head, int64_t channel, float* scratch) {
    const int64_t left = a.value_dim - channel, size = a.key_dim * kScanChannels;
    float* rates = scratch + size;
    const Channels<T> channels{a,       head,  channel,      left < kScanChannels ? left : kScanChannels,
                               scratch, rates, rates + size, rates + size + a.key_dim};
    const int64_t numbers = head * a.key_dim * a.value_dim + channel;
    float* state = static_cast<float*>(a.state) + on.row * a.state_stride + numbers;
    const T* x = static_cast<const T*>(a.x) + on.first * a.x_stride;
    const T* gates = static_cast<const T*>(a.gates) + on.first * a.gates_stride;
    T* y = static_cast<T*>(a.y) + on.first * a.y_stride;
    const auto each_number = [&](const auto& work) {
        for (int64_t i = 0; i < a.key_dim; i++)
            each_vector(0, channels.count, [&](int64_t c, auto n) KVIK_INLINED {
                work(i * a.value_dim + c, i * kScanChannels + c, n);
            });
    };
    const float* decay = static_cast<const float*>(a.decay) + numbers;
    each_number([&](int64_t from, int64_t to, auto n) KVIK_INLINED {
        store(channels.state + to, on.fresh ? zero() : load(state + from, n));
        store(rates + to, mul(broadcast(-1.44269504f), exp(load(decay + from, n))));
    });
    const int64_t width = inputs_width(a), certain = on.count - on.drafts;
    const float* log = static_cast<const float*>(a.log) + on.row * a.log_stride;
    const auto pass = [&](int64_t i) {
        channels.pass(x + i * a.x_stride, gates + i * a.gates_stride, y + i * a.y_stride);
    };
    for (int64_t i = 0; i < on.pending; i++, log += width + gates_width(a))
        channels.pass(log, log + width, static_cast<T*>(nullptr));
    for (int64_t i = 0; i < certain; i++) pass(i);
    each_number([&](int64_t to, int64_t from, auto n) KVIK_INLINED {
        store(state + to, load(channels.state + from), n);
    });
    for (int64_t i = certain; i < on.count; i++) pass(i);
}

template <class T>
void log_draft(const recurrence_args& a, const StateTokens& on, int64_t draft) {
    const int64_t token = on.first + on.count - on.drafts + draft, width = inputs_width(a), gates = gates_width(a);
    float* to = static_cast<float*>(a.log) + on.row * a.log_stride + draft * (width + gates);
    widen(to, static_cast<const T*>(a.x) + token * a.x_stride, width);
    widen(to + width, static_cast<const T*>(a.gates) + token * a.gates_stride, gates);
}

void recurrence(const recurrence_args& a, Team& team) {
    const int64_t columns = a.by_channel ? kScanChannels : kStateColumns;
    const int64_t parts = (a.value_dim + columns - 1) / columns, each = a.value_heads * parts;
    const size_t scratch = size_t(a.key_dim * ((a.by_channel ? 2 : 1) * columns + 8)) * sizeof(float);
    together(team, a.num_seqs * each, [&](Member& member) {
        float* own = static_cast<float*>(member.scratch(scratch));
        for (int64_t task; (task = member.next()) >= 0;) {
            const StateTokens on = state_tokens(a, task / each);
            if (on.row < 0) continue;
            const int64_t head = task % each / parts, column = task % parts * columns;
            if (a.by_channel)
                a.dtype == kBF16 ? scan_channels<bf16>(a, on, head, column, own)
                                 : scan_channels<float>(a, on, head, column, own);
            else if (a.by_row)
                a.dtype == kBF16 ? head_columns<bf16, true>(a, on, head, column, own)
                                 : head_columns<float, true>(a, on, head, column, own);
            else
                a.dtype == kBF16 ? head_columns<bf16, false>(a, on, head, column, own)
                                 : head_columns<float, false>(a, on, head, column, own);
        }
    });
    bool drafts = false;
    for (int64_t i = 0; i < a.num_seqs; i++) drafts |= entry(a.drafts, i) > 0;
    if (!drafts) return;
    // All heads have read the log by now.
    each_task(team, a.num_seqs, [&](int64_t sequence) {
        const StateTokens on = state_tokens(a, sequence);
        for (int64_t i = 0; on.row >= 0 && i < on.drafts; i++)
            a.dtype == kBF16 ? log_draft<bf16>(a, on, i) : log_draft<float>(a, on, i);
    });
}

}  // namespace
}  // namespace kvik

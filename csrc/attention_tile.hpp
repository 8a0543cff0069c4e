// One tile of 64 keys for a few query rows of one kv head: scores, a step of the online softmax, and the
// weighted sum of the values.
//
// The result of a row depends only on its own keys, to the bit: each lane of a score sums over head_dim in
// order, each column of the output sums over keys in order, and a key that a row does not see adds
// exactly zero (weight zero times a value set to zero), whichever rows share the tile.
#pragma once

#include "activation.hpp"
#include "attention_visible.hpp"
#include "kv_layout.hpp"
#include "simd.hpp"

namespace kvik {
namespace {
namespace paged {

constexpr int kStrips = kTile / kStrip;
constexpr int kRows = 4;                        // rows that share a load of the cache by vectors
constexpr int kVectors = kLanes == 16 ? 4 : 2;  // kRows x kVectors sums fit the registers

// What formats multiplied by vectors have in common.
struct ByVectors {
    static constexpr int kRows = paged::kRows;
    static constexpr bool kRegisters = false;
    struct Shapes {
        explicit Shapes(int64_t) {}
    };
};

// How elements of the cache are multiplied by q (scores) or by the weights (values): Cache is the type of a
// tile, Factor the type of packed q and weights, kPair the number of tokens or columns of a lane. Rows are
// packed kRows at a time.
struct Floats : ByVectors {
    using Cache = float;
    using Factor = float;
    using Vector = F32;
    static constexpr int kPair = 1;
    KVIK_INLINE Vector load(const float* p) { return kvik::load(p); }
    KVIK_INLINE Vector visible(Vector v, unsigned bits) { return bits & 1 ? v : zero(); }
    KVIK_INLINE F32 dot(F32 sum, Vector v, const float* factor) { return fma(v, broadcast(*factor), sum); }
};

// bf16 in the cache, q and weights in fp32: products are exact, and without an instruction for bf16 pairs
// this is also faster.
struct SplitPairs : ByVectors {
    using Cache = bf16;
    using Factor = float;
    struct Vector {
        F32 even, odd;
    };
    static constexpr int kPair = 2;
    KVIK_INLINE Vector load(const bf16* p) {
        const I32 pairs = iload(p);
        return {even_bf16(pairs), odd_bf16(pairs)};
    }
    KVIK_INLINE Vector visible(Vector v, unsigned bits) {
        return {bits & 1 ? v.even : zero(), bits & 2 ? v.odd : zero()};
    }
    KVIK_INLINE F32 dot(F32 sum, Vector v, const float* factor) {
        return fma(v.odd, broadcast(factor[1]), fma(v.even, broadcast(factor[0]), sum));
    }
};

struct DotPairs : ByVectors {
    using Cache = bf16;
    using Factor = bf16;
    using Vector = I32;
    static constexpr int kPair = 2;
    KVIK_INLINE Vector load(const bf16* p) { return iload(p); }
    KVIK_INLINE Vector visible(Vector v, unsigned bits) {
        return iand(v, ibroadcast(int32_t((bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u))));
    }
    KVIK_INLINE F32 dot(F32 sum, Vector v, const bf16* factor) {
        return dot_bf16(sum, v, ibroadcast(load_word(factor)));
    }
};

// The state of a row after some keys of its split: its sums over the values, the sum of weights by
// lane, and the largest score, in units of ln 2.
struct Record {
    static constexpr int64_t kTail = 32;
    static int64_t size(int64_t value_dim) { return value_dim + kTail; }
    KVIK_INLINE float* weights(float* record, int64_t value_dim) { return record + value_dim; }
    KVIK_INLINE float* largest(float* record, int64_t value_dim) { return record + value_dim + 16; }
    static void reset(float* record, int64_t value_dim) {
        std::memset(record, 0, size_t(value_dim + 16) * sizeof(float));
        *largest(record, value_dim) = -INFINITY;
    }
};

// What is added to the scores of a row: slope * (after + i) for key i of the tile; or with a table, the number for
// that distance, the table's middle being that for 0.
struct Bias {
    const float* table;  // or null
    float slope;
    int32_t after;  // the first key's position minus the query's
};

// The numbers of a table for keys at distances from `first` on; beyond the table, its first or last one.
KVIK_INLINE F32 numbers_at(const Bias& bias, int32_t first, int32_t reach) {
    if (first >= -reach && first + kLanes - 1 <= reach) return load(bias.table + first);
    alignas(64) float numbers[kLanes];
    for (int32_t i = 0; i < kLanes; i++) {
        const int32_t distance = first + i;
        numbers[i] = bias.table[distance < -reach ? -reach : distance > reach ? reach : distance];
    }
    return load(numbers);
}

// The keys and values of one kv head in a tile.
template <class Format>
struct Unit {
    const typename Format::Cache* keys[kStrips];
    const typename Format::Cache* values[kStrips];
    // What to prefetch while scores are computed, and while values are summed: a strip for each strip. It has
    // the bytes of a strip here, shifted right by `narrow`.
    const char* during_scores[kStrips];
    const char* during_values[kStrips];
    int narrow;
    bool fetch;
    const float* key_scales;         // [kTile], null without
    const float* value_scales;
    float scale;
    float softcap;  // 0: none
    const Bias* biases;  // of the rows; null without
    int32_t bias_reach;  // the largest distance in their tables
    bool adjusts() const { return softcap != 0.0f || biases; }
    int64_t head_dim, value_dim;
};

// Largest scores and differences between scores are in units of ln 2, so that weights are powers of two.
constexpr float kPerLn2 = 1.44269504f;

// 2^x for x <= 0, and exactly zero far below: then masked scores (-inf) need no second mask.
KVIK_INLINE F32 weight_of(F32 x) { return select(not_le(x, broadcast(-126.0f)), power_of_two(x), zero()); }

// With nothing visible yet, the largest score is -inf, and -inf - -inf would be NaN.
KVIK_INLINE float base_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// scores [R][kTile] of S strips from `strip` on. q: [head_dim / pair][R][pair].
template <class Format, int R, int S>
KVIK_INLINE void scores_of(const Unit<Format>& unit, int strip, const typename Format::Factor* q,
                           float (*scores)[kTile], bool fetch) {
    constexpr int P = Format::kPair, V = kStrip / kLanes, N = S * V;
    constexpr int kStep = kStrip * P;  // elements of a strip for one step over head_dim: 64 bytes
    constexpr int64_t kBytes = kStep * sizeof(typename Format::Cache);
    const typename Format::Cache* keys[S];
    const char* wanted[S];
    for (int s = 0; s < S; s++) {
        keys[s] = unit.keys[strip + s];
        wanted[s] = unit.during_scores[strip + s];
    }
    F32 sums[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sums[r][n] = zero();
    const int64_t steps = unit.head_dim / P;
    for (int64_t i = 0; i < steps; i++) {
        typename Format::Vector k[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) k[n] = Format::load(keys[n / V] + i * kStep + n % V * kLanes * P);
        if (fetch) {
#pragma GCC unroll 4
            for (int s = 0; s < S; s++) prefetch_near(wanted[s] + (i * kBytes >> unit.narrow));
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[r][n] = Format::dot(sums[r][n], k[n], q + (i * R + r) * P);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(scores[r] + strip * kStrip + n * kLanes, sums[r][n]);
}

KVIK_INLINE void store_weights(float* to, F32 weights) { store(to, weights); }
KVIK_INLINE void store_weights(bf16* to, F32 weights) { store(to, weights); }

// Scores scaled, capped and biased, in place.
template <class Format>
__attribute__((noinline)) void adjust_scores(const Unit<Format>& unit, float (*scores)[kTile], int64_t rows) {
    alignas(64) int32_t numbers[kLanes];
    for (int i = 0; i < kLanes; i++) numbers[i] = i;
    for (int64_t r = 0; r < rows; r++)
        for (int n = 0; n < kTile; n += kLanes) {
            const F32 factor = unit.key_scales ? load(unit.key_scales + n) : broadcast(unit.scale);
            F32 score = mul(load(scores[r] + n), factor);
            if (unit.softcap != 0.0f) score = softcap(score, broadcast(unit.softcap));
            if (unit.biases) {
                const Bias& bias = unit.biases[r];
                const F32 distance = to_float(iadd(iload(numbers), ibroadcast(bias.after + n)));
                score = bias.table ? add(score, numbers_at(bias, bias.after + n, unit.bias_reach))
                                   : fma(distance, broadcast(bias.slope), score);
            }
            store(scores[r] + n, score);
        }
}

// Turns scores into weights and updates the rows' records, except for the sums over values, which
// are still to be multiplied by `shrink`.
template <class Format, int R>
KVIK_INLINE void soften(const Unit<Format>& unit, float (*scores)[kTile], typename Format::Factor (*weights)[kTile],
                        const uint64_t* visible, float* records, float* shrink) {
    constexpr int N = kTile / kLanes;
    const int64_t stride = Record::size(unit.value_dim);
    float base[R];
    const float* key_scales = unit.key_scales;
    float factor = unit.scale * kPerLn2;
    if (unit.adjusts() || key_scales) factor = kPerLn2;
    if (unit.adjusts()) key_scales = nullptr;  // `adjust_scores` has multiplied by them
    F32 fall = zero();  // by row: the new largest score minus the old one
    for (int r = 0; r < R; r++) {
        F32 most = broadcast(-INFINITY);
        for (int n = 0; n < N; n++) {
            F32 score = load(scores[r] + n * kLanes);
            if (key_scales) score = mul(score, load(key_scales + n * kLanes));
            if (visible[r] != ~uint64_t(0))
                score = select(lanes_of(uint32_t(visible[r] >> (n * kLanes))), score, broadcast(-INFINITY));
            if (key_scales || visible[r] != ~uint64_t(0)) store(scores[r] + n * kLanes, score);
            most = max(most, score);
        }
        float* old = Record::largest(records + r * stride, unit.value_dim);
        const float tile = largest(most) * factor;
        const float now = tile > *old ? tile : *old;
        base[r] = base_of(now);
        fall = select(lanes_of(1u << r), broadcast(*old - base[r]), fall);
        *old = now;
    }
    float shrinks[kLanes];
    store(shrinks, weight_of(fall));
    for (int r = 0; r < R; r++) {
        F32 sum = zero();
        for (int n = 0; n < N; n++) {
            const F32 score = mul(load(scores[r] + n * kLanes), broadcast(factor));
            F32 weight = weight_of(sub(score, broadcast(base[r])));
            sum = add(sum, weight);
            if (unit.value_scales) {  // the scale of a key that was never written may be NaN
                weight = mul(weight, load(unit.value_scales + n * kLanes));
                if (visible[r] != ~uint64_t(0))
                    weight = select(lanes_of(uint32_t(visible[r] >> (n * kLanes))), weight, zero());
            }
            store_weights(weights[r] + n * kLanes, weight);
        }
        float* sums = Record::weights(records + r * stride, unit.value_dim);
        store(sums, fma(load(sums), broadcast(shrinks[r]), sum));
        shrink[r] = shrinks[r];
    }
}

// Columns [column, column + N * kLanes) of the rows' sums over values.
template <class Format, int R, int N>
KVIK_INLINE void sum_values(const Unit<Format>& unit, int64_t column, typename Format::Factor (*weights)[kTile],
                            const uint64_t* visible, uint64_t common, uint64_t any, float* records,
                            const float* shrink, bool fetch) {
    constexpr int P = Format::kPair, kSteps = kStrip / P;
    constexpr int64_t kBytes = N * kLanes * P * sizeof(typename Format::Cache);
    const int64_t stride = Record::size(unit.value_dim);
    F32 sums[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            sums[r][n] = mul(load(records + r * stride + column + n * kLanes), broadcast(shrink[r]));
    for (int s = 0; s < kStrips; s++) {
        if (!(any >> (s * kStrip) & 0xffff)) continue;
        const typename Format::Cache* values = unit.values[s] + column * P;
        const typename Format::Factor* factors = weights[0] + s * kStrip;
        const char* wanted = unit.during_values[s] + (column * kStrip * int64_t(sizeof(typename Format::Cache)) >> unit.narrow);
        if ((common >> (s * kStrip) & 0xffff) == 0xffff) {
            for (int i = 0; i < kSteps; i++) {
                typename Format::Vector v[N];
#pragma GCC unroll 4
                for (int n = 0; n < N; n++)
                    v[n] = Format::load(values + (i * unit.value_dim + n * kLanes) * P);
                if (fetch) {
#pragma GCC unroll 4
                    for (int64_t b = 0; b < kBytes; b += 64) prefetch_near(wanted + ((i * kBytes + b) >> unit.narrow));
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++) sums[r][n] = Format::dot(sums[r][n], v[n], factors + r * kTile + i * P);
                }
            }
        } else {
            for (int i = 0; i < kSteps; i++) {
                typename Format::Vector v[N];
                for (int n = 0; n < N; n++)
                    v[n] = Format::load(values + (i * unit.value_dim + n * kLanes) * P);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const unsigned bits = unsigned(visible[r] >> (s * kStrip + i * P));
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++)
                        sums[r][n] = Format::dot(sums[r][n], Format::visible(v[n], bits), factors + r * kTile + i * P);
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(records + r * stride + column + n * kLanes, sums[r][n]);
}

// A tile for R rows: q packed as above, visible and records one to a row.
template <class Format, int R>
void attend_tile(const Unit<Format>& unit, const typename Format::Factor* q, const uint64_t* visible,
                 float* records, bool first) {
    uint64_t common = ~uint64_t(0), any = 0;
    for (int r = 0; r < R; r++) {
        common &= visible[r];
        any |= visible[r];
    }
    if (!any) return;
    const bool fetch = unit.fetch && first;
    alignas(64) float scores[R][kTile];
    alignas(64) typename Format::Factor weights[R][kTile];
    float shrink[R];
    constexpr int kWide = kLanes == 16 ? kVectors : 1;  // strips at once
    int last = -1, strips = 0;
    for (int s = 0; s < kStrips; s++)
        if (any >> (s * kStrip) & 0xffff) {
            last = s;
            strips++;
        }
    if (strips == 1) {
        scores_of<Format, R, 1>(unit, last, q, scores, fetch);
    } else {
        // Four strips at once take little longer than one, because the sums of one strip wait for each other.
        for (int s = 0; s < kStrips; s += kWide) scores_of<Format, R, kWide>(unit, s, q, scores, fetch);
    }
    if (unit.adjusts()) adjust_scores(unit, scores, R);
    soften<Format, R>(unit, scores, weights, visible, records, shrink);
    int64_t column = 0;
    for (; column + kVectors * kLanes <= unit.value_dim; column += kVectors * kLanes)
        sum_values<Format, R, kVectors>(unit, column, weights, visible, common, any, records, shrink, fetch);
    if constexpr (kVectors == 4) {
        if (column + 2 * kLanes <= unit.value_dim) {
            sum_values<Format, R, 2>(unit, column, weights, visible, common, any, records, shrink, fetch);
            column += 2 * kLanes;
        }
        if (column < unit.value_dim)
            sum_values<Format, R, 1>(unit, column, weights, visible, common, any, records, shrink, fetch);
    }
}

// A tile for up to Format::kRows rows.
template <class Format>
void attend_rows(const Unit<Format>& unit, const typename Format::Factor* q, const uint64_t* visible, float* records,
                 int64_t rows, bool first) {
    static_assert(Format::kRows == 4);
    switch (rows) {
        case 1: attend_tile<Format, 1>(unit, q, visible, records, first); break;
        case 2: attend_tile<Format, 2>(unit, q, visible, records, first); break;
        case 3: attend_tile<Format, 3>(unit, q, visible, records, first); break;
        default: attend_tile<Format, 4>(unit, q, visible, records, first);
    }
}

}  // namespace paged
}  // namespace
}  // namespace kvik

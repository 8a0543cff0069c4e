// Products of some rows of x with one tile of weights (packed.hpp), sums kept in registers.
//
// Every sum is in the order of the inputs, whatever the number of rows: an output's bits depend only on
// its row. So each kind has one chain of additions per output, even where two would be faster.
#pragma once

#include "fp8.hpp"
#include "half.hpp"
#include "nibble_tables.hpp"
#include "packed.hpp"
#include "simd.hpp"

namespace kvik {
namespace {

// A span of the inputs of one tile, and the rows of x to multiply it by.
struct Span {
    const char* weight;  // [steps][32][4 bytes]
    int64_t steps;
    const char* x;  // [rows][steps of the same inputs]
    int64_t x_stride;  // bytes
    int rows;
    float* sums;  // [rows][32]
    bool first;  // otherwise `sums` holds the sums of the spans before
    bool last;   // otherwise sums of integers without groups stay integers
    // What to prefetch meanwhile, and the bytes from one step to the next.
    const char* ahead;
    int64_t ahead_stride;
    // For integers, and weights with groups. Such spans are whole groups (the last group of a matrix
    // may be short):
    int64_t group_steps;
    const char* scales;      // [groups][32] of scale_bytes; null without groups
    int scale_bytes;
    const float* x_scales;   // [rows][groups]; null where x has no scale for each group
    int64_t groups_stride;   // elements of x_scales and x_sums
    // for integers only
    const int32_t* x_sums;   // [rows][groups], times minus the weights' offset
    const char* zeros;       // [groups][32], zero points (uint8) or minima (fp16); or null
};

// Rows that are multiplied at once: with two vectors of outputs they fill the registers.
constexpr int kMaxRows = kLanes == 16 ? 12 : 4;
constexpr int64_t kAhead = 2048;  // bytes of a tile's stream to prefetch: about the latency of memory

// How a kind unpacks and multiplies a vector of weights. kParts: the number of vectors it unpacks to, each
// multiplied by four bytes of x. For floats kGroups: there may be groups, each with a scale. For integers
// kScaled: there are groups with scales; kZeros: they may have zero points; kMinima: they have minima. kShort:
// how many products are summed in 16 bits, pairs of at most kMost x 127 each, before they are added to 32-bit
// sums, where that is faster; 1: none. The caller scales the sums of all inputs.
struct TileF32 {
    static constexpr int kParts = 1;
    static constexpr bool kGroups = false;
    KVIK_INLINE void unpack(I32 v, I32* w) { w[0] = v; }
    KVIK_INLINE F32 dot(F32 sum, I32 w, I32 x) {
        return fma(__builtin_bit_cast(F32, w), __builtin_bit_cast(F32, x), sum);
    }
};

struct TileBF16 {
    static constexpr int kParts = 1;
    static constexpr bool kGroups = false;
    KVIK_INLINE void unpack(I32 v, I32* w) { w[0] = v; }
    KVIK_INLINE F32 dot(F32 sum, I32 w, I32 x) { return dot_bf16(sum, w, x); }
};

// Weights already widened to bf16. A separate kind, because scales cost plain bf16 a twentieth of its speed.
struct TileWidened : TileBF16 {
    static constexpr bool kGroups = true;
};

struct TileI8AsBF16 {
    static constexpr int kParts = 2;
    static constexpr bool kGroups = true;
    KVIK_INLINE void unpack(I32 v, I32* w) { widen_i8(ixor(v, ibroadcast(int32_t(0x80808080))), w[0], w[1]); }
    KVIK_INLINE F32 dot(F32 sum, I32 w, I32 x) { return dot_bf16(sum, w, x); }
};

struct TileFp8 {
    static constexpr int kParts = 2;
    static constexpr bool kGroups = true;
    KVIK_INLINE void unpack(I32 v, I32* w) { widen_fp8(v, w[0], w[1]); }
    KVIK_INLINE F32 dot(F32 sum, I32 w, I32 x) { return dot_bf16(sum, w, x); }
};

struct TileI8 {
    static constexpr int kParts = 1, kScaleBytes = 2;
    static constexpr bool kScaled = false, kZeros = false, kMinima = false;
    static constexpr int kShort = 1;
    KVIK_INLINE void unpack(I32 v, I32* w) { w[0] = v; }
    KVIK_INLINE I32 dot(I32 sum, I32 w, I32 x) { return dot_i8(sum, w, x); }
};

struct TileI8Groups : TileI8 {
    static constexpr bool kScaled = true;
};

struct TileI4 {
    static constexpr int kParts = 2, kScaleBytes = 2;
    static constexpr bool kScaled = true, kZeros = true, kMinima = false;
    static constexpr int kMost = 15, kShort = 8;
    KVIK_INLINE void unpack(I32 v, I32* w) {
        w[0] = low_nibbles(v);
        w[1] = high_nibbles(v);
    }
    KVIK_INLINE I32 dot(I32 sum, I32 w, I32 x) { return dot_i4(sum, w, x); }
};

struct TileI4Min : TileI4 {
    static constexpr bool kZeros = false, kMinima = true;
};

// Codes that stand for the numbers of a table.
template <const uint8_t* kTable>
struct TileTable : TileI4 {
    static constexpr bool kZeros = false;
    KVIK_INLINE void unpack(I32 v, I32* w) {
        w[0] = entries(kTable, low_nibbles(v));
        w[1] = entries(kTable, high_nibbles(v));
    }
};

struct TileFp4 : TileTable<kE2M1> {
    static constexpr int kMost = 24, kShort = 4;
};

struct TileMxfp4 : TileFp4 {
    static constexpr int kScaleBytes = 1;
};

// Tables of numbers up to 255.
template <const uint8_t* kTable>
struct TileByteTable : TileTable<kTable> {
    static constexpr int kShort = 1;
    KVIK_INLINE I32 dot(I32 sum, I32 w, I32 x) { return dot_i8(sum, w, x); }
};

using TileIq4 = TileByteTable<kIq4>;
using TileNf4 = TileByteTable<kNf4>;
using TileBnbFp4 = TileByteTable<kBnbFp4>;

// Four bytes of row m in all lanes. Rows are reached from every fourth one, so that the addresses of
// twelve rows take few registers.
template <int kRows>
struct Broadcast {
    static constexpr int kBases = (kRows + 3) / 4;
    const char* base[kBases];
    int64_t stride;

    inline __attribute__((always_inline)) Broadcast(const char* x, int64_t x_stride) : stride(x_stride) {
        for (int i = 0; i < kBases; i++) base[i] = x + 4 * i * x_stride;
    }
    inline __attribute__((always_inline)) I32 operator()(int m, int64_t offset) const {
        return ibroadcast(load_word(base[m / 4] + m % 4 * stride + offset));
    }
};

// Rows are divided evenly into blocks, so that this few rows are the only block: no other block reads these
// weights again before the next step. With that prefetch hint, Intel CPUs with AMX fetch at a third of the speed.
#if defined(__AMX_TILE__) || defined(KVIK_EMULATE_AMX)
constexpr bool kReadOnce = false;
#else
constexpr bool kReadOnce = true;
#endif

template <int kRows>
KVIK_INLINE void prefetch_for(const char* ahead) {
    if constexpr (kReadOnce && 2 * kRows < kMaxRows)
        prefetch_once(ahead);
    else
        prefetch(ahead);
}

// The scales of some outputs of a group: fp32, E8M0 or fp16, by their bytes.
KVIK_INLINE F32 load_scales(const char* scales, int64_t lane, int bytes) {
    if (bytes == 4) return load((const float*)scales + lane);
    return bytes == 1 ? load((const e8m0*)scales + lane) : load((const f16*)scales + lane);
}

// The same; 1 without groups.
KVIK_INLINE F32 group_scale(const Span& s, int64_t lane) {
    return s.scales ? load_scales(s.scales, lane, s.scale_bytes) : broadcast(1.0f);
}

// Steps [first, last): a group, or the whole span without groups. A separate function, because the
// compiler keeps all sums in registers only where the loop over the steps is the only one.
template <class Tile, int kRows, int kVectors>
__attribute__((noinline)) void multiply_floats(const Span& s, int first_vector, int64_t group, int64_t first,
                                               int64_t last) {
    constexpr int kParts = Tile::kParts;
    const bool grouped = Tile::kGroups && s.scales;
    const bool from_zero = grouped || s.first, x_scaled = grouped && s.x_scales;
    float* sums = s.sums + first_vector * kLanes;
    F32 acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) acc[m][v] = from_zero ? zero() : load(sums + m * kTile + v * kLanes);
    }
    const Broadcast<kRows> x(s.x, s.x_stride);
    const char* weight = s.weight + first * kStepBytes + first_vector * kLanes * 4;
    const char* ahead = s.ahead + first * s.ahead_stride + first_vector * kLanes * 4;
    const int64_t end = last * 4 * kParts;
    for (int64_t at = first * 4 * kParts; at < end; at += 4 * kParts) {
        I32 w[kVectors][kParts];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const char* p = weight + v * kLanes * 4;
            if (v * kLanes * 4 % 64 == 0) prefetch_for<kRows>(ahead + v * kLanes * 4);
            Tile::unpack(iload(p), w[v]);
        }
#pragma GCC unroll 2
        for (int part = 0; part < kParts; part++) {
#pragma GCC unroll 16
            for (int m = 0; m < kRows; m++) {
                const I32 b = x(m, at + part * 4);
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++) acc[m][v] = Tile::dot(acc[m][v], w[v][part], b);
            }
        }
        weight += kStepBytes;
        ahead += s.ahead_stride;
    }
    F32 scale[kVectors];
    for (int v = 0; v < kVectors; v++)
        scale[v] = grouped ? group_scale(s, group * kTile + (first_vector + v) * kLanes) : zero();
#pragma GCC unroll 16
    for (int m = 0; m < kRows; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            float* sum = sums + m * kTile + v * kLanes;
            if (x_scaled) acc[m][v] = mul(acc[m][v], broadcast(s.x_scales[m * s.groups_stride + group]));
            store(sum, grouped ? fma(acc[m][v], scale[v], load(sum)) : acc[m][v]);
        }
    }
}

KVIK_INLINE void clear_sums(const Span& s, int first_vector, int vectors) {
    float* sums = s.sums + first_vector * kLanes;
    for (int m = 0; m < s.rows; m++)
        for (int v = 0; v < vectors; v++) store(sums + m * kTile + v * kLanes, zero());
}

// Sums of integers without groups stay integers until the last span.
KVIK_INLINE void start_integers(const Span& s, int first_vector, int vectors) {
    float* sums = s.sums + first_vector * kLanes;
    for (int m = 0; m < s.rows; m++) {
        // minus the zero point times the sum of x: the weights are stored unsigned
        const I32 x_sum = ibroadcast(s.x_sums[m * s.groups_stride]);
        for (int v = 0; v < vectors; v++) istore(sums + m * kTile + v * kLanes, x_sum);
    }
}

KVIK_INLINE void end_integers(const Span& s, int first_vector, int vectors) {
    float* sums = s.sums + first_vector * kLanes;
    for (int m = 0; m < s.rows; m++)
        for (int v = 0; v < vectors; v++) {
            float* sum = sums + m * kTile + v * kLanes;
            store(sum, to_float(iload(sum)));
        }
}

#if defined(KVIK_SHORT_PRODUCTS)
constexpr bool kShortProducts = true;
#else
constexpr bool kShortProducts = false;  // 32 bits cost no more
KVIK_INLINE I32 dot_short(I32 acc, I32 u, I32 s) { return dot_i4(acc, u, s); }
KVIK_INLINE I32 add_short(I32 acc, I32 sums) { return iadd(acc, sums); }
#endif

// The integers of one group. Their sum is exact in any order: few rows use a chain for each part.
template <class Tile, int kRows, int kVectors>
__attribute__((noinline)) void multiply_group(const Span& s, int first_vector, int64_t group, int64_t first,
                                              int64_t last) {
    constexpr int kParts = Tile::kParts;
    constexpr bool kShort = kShortProducts && Tile::kShort > 1;
    constexpr int kChains = kRows <= 2 && !kShort ? kParts : 1;
    constexpr bool kScaled = Tile::kScaled, kMinima = Tile::kMinima;
    const int64_t lane = group * kTile + first_vector * kLanes, groups_stride = s.groups_stride;
    const char* packed_zeros = Tile::kZeros ? s.zeros : nullptr;
    const float* x_scales = s.x_scales + group;
    const int32_t* x_sums = s.x_sums + group;
    I32 acc[kChains][kRows][kVectors];
    I32 zeros[kVectors];
    for (int v = 0; v < kVectors; v++)
        zeros[v] = packed_zeros ? load_i8((const int8_t*)packed_zeros + lane + v * kLanes) : ibroadcast(1);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; m++) {
        // minus the zero point times the sum of x: the weights are stored unsigned
        const I32 x_sum = ibroadcast(x_sums[m * groups_stride]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            if (kScaled)
                acc[0][m][v] = kMinima ? izero() : packed_zeros ? short_mul(zeros[v], x_sum) : x_sum;
            else
                acc[0][m][v] = iload(s.sums + m * kTile + (first_vector + v) * kLanes);
            if (kChains > 1) acc[kChains - 1][m][v] = izero();
        }
    }
    const Broadcast<kRows> x(s.x, s.x_stride);
    const char* weight = s.weight + first * kStepBytes + first_vector * kLanes * 4;
    const char* ahead = s.ahead + first * s.ahead_stride + first_vector * kLanes * 4;
    int64_t at = first * 4 * kParts;
    const int64_t end = last * 4 * kParts;
    const auto until = [&](int64_t stop, const auto& add) KVIK_INLINED {
        do {
            I32 w[kVectors][kParts];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                const char* p = weight + v * kLanes * 4;
                if (v * kLanes * 4 % 64 == 0) prefetch_for<kRows>(ahead + v * kLanes * 4);
                Tile::unpack(iload(p), w[v]);
            }
#pragma GCC unroll 2
            for (int part = 0; part < kParts; part++) {
#pragma GCC unroll 16
                for (int m = 0; m < kRows; m++) {
                    const I32 b = x(m, at + part * 4);
#pragma GCC unroll 4
                    for (int v = 0; v < kVectors; v++) add(part, m, v, w[v][part], b);
                }
            }
            weight += kStepBytes;
            ahead += s.ahead_stride;
            at += 4 * kParts;
        } while (at < stop);
    };
    if constexpr (kShort) {
        static_assert(Tile::kShort * 2 * Tile::kMost * 127 <= INT16_MAX && Tile::kShort % kParts == 0);
        do {
            I32 few[kRows][kVectors];
#pragma GCC unroll 16
            for (int m = 0; m < kRows; m++) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++) few[m][v] = izero();
            }
            const int64_t most = at + 4 * Tile::kShort;
            until(most < end ? most : end, [&](int, int m, int v, I32 w, I32 b) KVIK_INLINED {
                few[m][v] = dot_short(few[m][v], w, b);
            });
#pragma GCC unroll 16
            for (int m = 0; m < kRows; m++) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++) acc[0][m][v] = add_short(acc[0][m][v], few[m][v]);
            }
        } while (at < end);
    } else {
        until(end, [&](int part, int m, int v, I32 w, I32 b) KVIK_INLINED {
            acc[part % kChains][m][v] = Tile::dot(acc[part % kChains][m][v], w, b);
        });
    }
    float* sums = s.sums + first_vector * kLanes;
    F32 scale[kVectors], minimum[kVectors];
    for (int v = 0; v < kVectors; v++) {
        scale[v] = kScaled ? load_scales(s.scales, lane + v * kLanes, Tile::kScaleBytes) : broadcast(1.0f);
        minimum[v] = kMinima ? load((const f16*)s.zeros + lane + v * kLanes) : zero();
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; m++) {
        const F32 x_scale = broadcast(kScaled ? x_scales[m * groups_stride] : 1.0f);
        const F32 x_sum = kMinima ? mul(to_float(ibroadcast(x_sums[m * groups_stride])), x_scale) : zero();
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const I32 whole = kChains > 1 ? iadd(acc[0][m][v], acc[kChains - 1][m][v]) : acc[0][m][v];
            float* sum = sums + m * kTile + v * kLanes;
            if (!kScaled) {
                istore(sum, whole);
                continue;
            }
            F32 total = fma(to_float(whole), mul(scale[v], x_scale), load(sum));
            if (kMinima) total = fma(minimum[v], x_sum, total);
            store(sum, total);
        }
    }
}

template <class Tile>
constexpr bool kIsInteger = requires { Tile::kScaled; };

template <class Tile, int kRows, int kVectors>
KVIK_INLINE void multiply_vectors(const Span& s, int first_vector) {
    constexpr auto kMultiply = [] {
        if constexpr (kIsInteger<Tile>)
            return multiply_group<Tile, kRows, kVectors>;
        else
            return multiply_floats<Tile, kRows, kVectors>;
    }();
    if constexpr (!kIsInteger<Tile>) {
        if (!s.scales) return kMultiply(s, first_vector, 0, 0, s.steps);
    } else if constexpr (!Tile::kScaled) {
        // Not in `multiply_group`: with a choice for each sum the compiler keeps the sums in memory.
        if (s.first) start_integers(s, first_vector, kVectors);
        if (s.steps) kMultiply(s, first_vector, 0, 0, s.steps);
        if (s.last) end_integers(s, first_vector, kVectors);
        return;
    }
    if (s.first) clear_sums(s, first_vector, kVectors);
    for (int64_t group = 0, step = 0; step < s.steps; group++) {
        const int64_t last = step + s.group_steps < s.steps ? step + s.group_steps : s.steps;
        kMultiply(s, first_vector, group, step, last);
        step = last;
    }
}

constexpr int kTileVectors = kTile / kLanes;

template <class Tile, int kRows>
void multiply(const Span& s) {
    constexpr int kVectors = kRows <= 2 ? kTileVectors : 2;
    for (int v = 0; v < kTileVectors; v += kVectors) multiply_vectors<Tile, kRows, kVectors>(s, v);
}

using Multiply = void (*)(const Span&);

#if defined(KVIK_WIDE_PRODUCTS)
// Four bits for one or two rows, all groups in one loop: the sums stay in registers, and high
// nibbles are multiplied as 16 times their value, which saves a shift of each. The integers of a group, and the
// order in which groups are added, are the same as in multiply_group.
template <class Tile, int kRows>
void multiply_few(const Span& s) {
    constexpr int kVectors = kTileVectors;
    F32 total[kRows][kVectors];
    for (int m = 0; m < kRows; m++)
        for (int v = 0; v < kVectors; v++) total[m][v] = s.first ? zero() : load(s.sums + m * kTile + v * kLanes);
    const Broadcast<kRows> x(s.x, s.x_stride);
    const char *weight = s.weight, *ahead = s.ahead, *scales = s.scales, *zeros = s.zeros;
    const int64_t stride = s.ahead_stride, groups_stride = s.groups_stride;
    const int64_t scale_bytes = kTile * Tile::kScaleBytes, zero_bytes = Tile::kMinima ? kTile * 2 : kTile;
    int64_t at = 0;
    for (int64_t group = 0, step = 0; step < s.steps; group++) {
        const int64_t last = step + s.group_steps < s.steps ? step + s.group_steps : s.steps, end = last * 8;
        I32 low[kRows][kVectors], high[kRows][kVectors];
        for (int m = 0; m < kRows; m++) {
            const I32 x_sum = ibroadcast(s.x_sums[m * groups_stride + group]);
            for (int v = 0; v < kVectors; v++) {
                low[m][v] = Tile::kMinima ? izero()
                            : zeros ? short_mul(load_i8((const int8_t*)zeros + v * kLanes), x_sum)
                                    : x_sum;
                high[m][v] = izero();
            }
        }
        do {
            I32 w[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                if (v * kLanes * 4 % 64 == 0) prefetch_for<kRows>(ahead + v * kLanes * 4);
                w[v] = iload(weight + v * kLanes * 4);
            }
#pragma GCC unroll 2
            for (int m = 0; m < kRows; m++) {
                const I32 first = x(m, at), second = x(m, at + 4);
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++) {
                    low[m][v] = dot_i4(low[m][v], low_nibbles(w[v]), first);
                    high[m][v] = dot_i4(high[m][v], nibbles_times_16(w[v]), second);
                }
            }
            weight += kStepBytes;
            ahead += stride;
            at += 8;
        } while (at < end);
        step = last;
        for (int v = 0; v < kVectors; v++) {
            const F32 scale = load_scales(scales, v * kLanes, Tile::kScaleBytes);
            for (int m = 0; m < kRows; m++) {
                const F32 x_scale = broadcast(s.x_scales[m * groups_stride + group]);
                const F32 whole = to_float(iadd(low[m][v], by_16(high[m][v])));
                total[m][v] = fma(whole, mul(scale, x_scale), total[m][v]);
                if (Tile::kMinima) {
                    const F32 x_sum = mul(to_float(ibroadcast(s.x_sums[m * groups_stride + group])), x_scale);
                    total[m][v] = fma(load((const f16*)zeros + v * kLanes), x_sum, total[m][v]);
                }
            }
        }
        scales += scale_bytes;
        if (zeros) zeros += zero_bytes;
    }
    for (int m = 0; m < kRows; m++)
        for (int v = 0; v < kVectors; v++) store(s.sums + m * kTile + v * kLanes, total[m][v]);
}

// Integers of four bits, which have zero points or minima.
template <class Tile>
constexpr bool kNibbles = requires { requires Tile::kZeros || Tile::kMinima; };
#endif

template <class Tile>
Multiply multiply_for(int rows) {
#if defined(KVIK_WIDE_PRODUCTS)
    if constexpr (kNibbles<Tile>)
        if (rows <= 2) return rows == 1 ? multiply_few<Tile, 1> : multiply_few<Tile, 2>;
#endif
    static constexpr Multiply table[] = {
        multiply<Tile, 1>, multiply<Tile, 2>, multiply<Tile, 3>, multiply<Tile, 4>,
#if defined(__AVX512F__)
        multiply<Tile, 5>, multiply<Tile, 6>, multiply<Tile, 7>, multiply<Tile, 8>,
        multiply<Tile, 9>, multiply<Tile, 10>, multiply<Tile, 11>, multiply<Tile, 12>,
#endif
    };
    static_assert(sizeof table / sizeof table[0] == kMaxRows);
    return table[rows - 1];
}

// Expands the weights of a tile to twice the bytes, for products that need wider elements.
using Unpack = void (*)(const char* weight, int64_t steps, char* wide);

// Unpacks weights [steps][32][4] as the vectors do: [2 steps][32][4].
template <class Tile>
void unpack_tile(const char* weight, int64_t steps, char* wide) {
    static_assert(Tile::kParts == 2);
    for (int64_t step = 0; step < steps; step++) {
        prefetch(weight + kAhead);
        prefetch(weight + kAhead + 64);
        for (int v = 0; v < kTileVectors; v++) {
            I32 w[2];
            Tile::unpack(iload(weight + v * kLanes * 4), w);
            istore(wide + v * kLanes * 4, w[0]);
            istore(wide + v * kLanes * 4 + kStepBytes, w[1]);
        }
        weight += kStepBytes;
        wide += 2 * kStepBytes;
    }
}

// From this many rows on, eight-bit weights are widened to bf16 once for all rows. Where vectors are long,
// the products hide the widening for each block of rows, and less memory is touched.
constexpr int64_t kWidenFrom = kLanes == 16 ? INT64_MAX : 16;

// The interface of an instruction set to `linear`; tiles_amx.hpp defines it differently.
struct VectorTiles {
    // Bytes of x of a row between visits to its sums: with many rows, a block of rows of this many bytes fits
    // the L1 cache, and the weights of the same inputs stay in L2.
    static constexpr int64_t kSpanBytes = 2048;
    // The most rows of x that are multiplied at once; and the unit that blocks of rows are multiples of.
    static int64_t block_rows(const linear_args&) { return kMaxRows; }
    static int64_t row_unit(const linear_args&) { return 1; }

    // How weights are unpacked before they are multiplied, or null.
    static bool reads_spread(const linear_args&) { return false; }
    static Unpack unpack_of(const linear_args& a) {
        if (a.rows < kWidenFrom) return nullptr;
        return a.kind == kMatrixI8WeightOnly ? unpack_tile<TileI8AsBF16>
               : a.kind == kMatrixFp8         ? unpack_tile<TileFp8>
                                             : nullptr;
    }

    void multiply(int64_t kind, bool unpacked, const Span& s) const {
        multiply_of(kind, s.scales != nullptr, unpacked, s.rows)(s);
    }

    static Multiply multiply_of(int64_t kind, bool grouped, bool unpacked, int rows) {
        switch (kind) {
            case kMatrixF32: return multiply_for<TileF32>(rows);
            case kMatrixBF16: return multiply_for<TileBF16>(rows);
            case kMatrixI8: return grouped ? multiply_for<TileI8Groups>(rows) : multiply_for<TileI8>(rows);
            case kMatrixI4: return multiply_for<TileI4>(rows);
            case kMatrixI4Min: return multiply_for<TileI4Min>(rows);
            case kMatrixMxfp4: return multiply_for<TileMxfp4>(rows);
            case kMatrixIq4: return multiply_for<TileIq4>(rows);
            case kMatrixFp4: return multiply_for<TileFp4>(rows);
            case kMatrixNf4: return multiply_for<TileNf4>(rows);
            case kMatrixBnbFp4: return multiply_for<TileBnbFp4>(rows);
            case kMatrixFp8: return unpacked ? multiply_for<TileWidened>(rows) : multiply_for<TileFp8>(rows);
            default: return unpacked ? multiply_for<TileWidened>(rows) : multiply_for<TileI8AsBF16>(rows);
        }
    }
};

}  // namespace
}  // namespace kvik

// Products with the AMX tile registers: up to 32 rows of x with the 32 outputs of a tile.
//
// 16 steps of packed weights (packed.hpp) are two right operands of a product side by side, and 64 bytes of
// 16 prepared rows of x are a left one. A product treats each of its rows separately, and one row is multiplied
// in the same way as many: so here too an output's bits depend only on its row. Floats are summed 16 steps at a time
// from the first input on. Sums of integers are exact, and have the same bits as with other instruction sets.
#pragma once

#include "amx.hpp"
#include "packed.hpp"
#include "simd.hpp"
#include "tiles.hpp"

namespace kvik {
namespace {

constexpr int kRegisterRows = 16;
constexpr int kRegisterBytes = 64;  // of a row
constexpr int64_t kProductSteps = 16;

// Registers by number: the sums of 2 x 16 rows and 2 x 16 outputs, x, weights.
constexpr int kSumsTile = 0, kXTile = 4, kWeightTile = 6;

// The shapes of this thread's registers. Their contents are lost when the shapes change.
class TileShapes {
public:
    TileShapes() = default;
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;
    ~TileShapes() {
        if (rows_ != 0) tile_release();
    }

    // For this many rows of x and steps of a product.
    void set(int64_t rows, int64_t steps) {
        if (rows == rows_ && steps == steps_) return;
        rows_ = rows;
        steps_ = steps;
        TileConfig config = {};
        config.palette = 1;
        const auto shape = [&](int tile, int64_t tile_rows, int64_t row_bytes) {
            config.rows[tile] = uint8_t(tile_rows);
            config.row_bytes[tile] = uint16_t(tile_rows ? row_bytes : 0);
        };
        for (int half = 0; half < 2; half++) {
            const int64_t left = rows - half * kRegisterRows;
            const int64_t half_rows = left < 0 ? 0 : left < kRegisterRows ? left : kRegisterRows;
            shape(kSumsTile + 2 * half, half_rows, kRegisterBytes);
            shape(kSumsTile + 2 * half + 1, half_rows, kRegisterBytes);
            shape(kXTile + half, half_rows, 4 * steps);
            shape(kWeightTile + half, steps, kRegisterBytes);
        }
        tile_config(config);
    }

private:
    int64_t rows_ = 0, steps_ = 0;
};

struct ProductBF16 {
    template <int kSums, int kX, int kW>
    KVIK_INLINE void add() { tile_dot_bf16<kSums, kX, kW>(); }
};

struct ProductI8 {
    template <int kSums, int kX, int kW>
    KVIK_INLINE void add() { tile_dot_i8<kSums, kX, kW>(); }
};

// Part of a span, and the sums [rows][32] of four bytes it is added to. The steps are a multiple of those
// of a product.
struct Part {
    int64_t first, steps, product_steps;
    char* sums;
    bool from_zero;
    bool streamed;  // weights come from memory; otherwise they were just unpacked
};

// Sums in the registers of one half of the rows.
template <int kHalf>
KVIK_INLINE void open_sums(const Part& p) {
    constexpr int kLeft = kSumsTile + 2 * kHalf;
    char* sums = p.sums + kHalf * kRegisterRows * kStepBytes;
    if (p.from_zero) {
        tile_zero<kLeft>();
        tile_zero<kLeft + 1>();
    } else {
        tile_load<kLeft>(sums, kStepBytes);
        tile_load<kLeft + 1>(sums + kRegisterBytes, kStepBytes);
    }
}

template <int kHalf>
KVIK_INLINE void store_sums(const Part& p) {
    constexpr int kLeft = kSumsTile + 2 * kHalf;
    char* sums = p.sums + kHalf * kRegisterRows * kStepBytes;
    tile_store<kLeft>(sums, kStepBytes);
    tile_store<kLeft + 1>(sums + kRegisterBytes, kStepBytes);
}

template <class Product, int kHalf>
KVIK_INLINE void add_product(const char* x, int64_t x_stride) {
    constexpr int kLeft = kSumsTile + 2 * kHalf;
    tile_load<kXTile + kHalf>(x + kHalf * kRegisterRows * x_stride, x_stride);
    Product::template add<kLeft, kXTile + kHalf, kWeightTile>();
    Product::template add<kLeft + 1, kXTile + kHalf, kWeightTile + 1>();
}

// kBoth: more than 16 rows; then there may be several blocks, and the prefetches are divided among them.
// `p` is copied, because the compiler assumes that every instruction changes memory. It is copied here: a copy made
// by the caller would be read in longer words than it was written, and so wait for all stores of the block before.
template <class Product, bool kBoth>
void add_part(const Span& s, const Part& part) {
    const Part p = part;
    open_sums<0>(p);
    if constexpr (kBoth) open_sums<1>(p);
    const char* x = s.x + p.first * 4;
    const char* weight = s.weight + p.first * kStepBytes;
    const int64_t x_stride = s.x_stride, weight_bytes = p.product_steps * kStepBytes;
    for (int64_t step = 0; step < p.steps; step += p.product_steps) {
        if (kBoth && p.streamed) {
            const char* ahead = s.ahead + (p.first + step) * s.ahead_stride;
            for (int64_t line = 0; line < p.product_steps * s.ahead_stride; line += 64) prefetch(ahead + line);
        } else if (p.streamed) {
            for (int64_t line = 0; line < weight_bytes; line += 64) prefetch(weight + kAhead + line);
        }
        tile_load<kWeightTile>(weight, kStepBytes);
        tile_load<kWeightTile + 1>(weight + kRegisterBytes, kStepBytes);
        add_product<Product, 0>(x, x_stride);
        if constexpr (kBoth) add_product<Product, 1>(x, x_stride);
        x += p.product_steps * 4;
        weight += weight_bytes;
    }
    store_sums<0>(p);
    if constexpr (kBoth) store_sums<1>(p);
}

// Any number of steps: the rest that is too short for a product takes a shorter one.
template <class Product>
void add_steps(TileShapes& shapes, const Span& s, Part p) {
    const auto add = s.rows > kRegisterRows ? add_part<Product, true> : add_part<Product, false>;
    const int64_t rest = p.steps % p.product_steps;
    shapes.set(s.rows, p.product_steps);
    p.steps -= rest;
    add(s, p);
    if (rest == 0) return;
    shapes.set(s.rows, rest);
    p.first += p.steps;
    p.steps = p.product_steps = rest;
    p.from_zero = false;
    add(s, p);
}

void multiply_bf16(TileShapes& shapes, const Span& s, bool streamed) {
    add_steps<ProductBF16>(shapes, s, {0, s.steps, kProductSteps, (char*)s.sums, s.first, streamed});
}

// Adds the integers of a group to the sums, as `multiply_group` of the vectors does. The fields of `s` that the loop
// reads are copied: the compiler would read them again after each store.
template <bool kMinima, bool kZeros>
void add_group(const Span& s, int64_t group, const int32_t* integers) {
    static constexpr float kOne = 1.0f;
    const float* x_scales = s.x_scales ? s.x_scales + group : &kOne;
    const int32_t* x_sums = s.x_sums + group;
    const int64_t stride = s.groups_stride, scales_stride = s.x_scales ? stride : 0;
    float* sums = s.sums;
    I32 zeros[kTileVectors];
    F32 scale[kTileVectors], minimum[kTileVectors];
    for (int v = 0; v < kTileVectors; v++) {
        const int64_t lane = group * kTile + v * kLanes;
        scale[v] = group_scale(s, lane);
        zeros[v] = kZeros ? load_i8((const int8_t*)s.zeros + lane) : izero();
        minimum[v] = kMinima ? load((const f16*)s.zeros + lane) : zero();
    }
#pragma GCC unroll 4
    for (int m = 0, rows = s.rows; m < rows; m++) {
        const F32 x_scale = broadcast(*x_scales);
        const I32 x_sum = ibroadcast(*x_sums);
        const F32 x_total = kMinima ? mul(to_float(x_sum), x_scale) : zero();
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; v++) {
            const I32 found = iload(integers + v * kLanes);
            const I32 whole = kMinima ? found : iadd(found, kZeros ? short_mul(zeros[v], x_sum) : x_sum);
            F32 total = fma(to_float(whole), mul(scale[v], x_scale), load(sums + v * kLanes));
            if (kMinima) total = fma(minimum[v], x_total, total);
            store(sums + v * kLanes, total);
        }
        integers += kTile;
        sums += kTile;
        x_scales += scales_stride;
        x_sums += stride;
    }
}

// Integers without groups. Their sums become floats, in place, with the last span.
void multiply_whole_i8(TileShapes& shapes, const Span& s, bool streamed) {
    add_steps<ProductI8>(shapes, s, {0, s.steps, kProductSteps, (char*)s.sums, s.first, streamed});
    if (!s.last) return;
    for (int m = 0; m < s.rows; m++) {
        const I32 x_sum = ibroadcast(s.x_sums[m * s.groups_stride]);
        for (int v = 0; v < kTileVectors; v++) {
            float* sum = s.sums + m * kTile + v * kLanes;
            store(sum, to_float(iadd(iload(sum), x_sum)));
        }
    }
}

template <bool kMinima>
void multiply_groups_i8(TileShapes& shapes, const Span& s, bool streamed) {
    // The integers of one group are added while the next one is multiplied: they wait for their stores.
    alignas(64) int32_t integers[2][2 * kRegisterRows * kTile];
    const auto add = kMinima ? add_group<true, false> : s.zeros ? add_group<false, true> : add_group<false, false>;
    if (s.first) std::memset(s.sums, 0, size_t(s.rows) * kTile * sizeof(float));
    // one length for all products of a group: other shapes cost time
    int64_t product_steps = kProductSteps;
    while (s.group_steps % product_steps) product_steps--;
    int64_t group = 0;
    for (int64_t step = 0; step < s.steps; group++, step += s.group_steps) {
        const int64_t steps = s.steps - step < s.group_steps ? s.steps - step : s.group_steps;
        add_steps<ProductI8>(shapes, s, {step, steps, product_steps, (char*)integers[group % 2], true, streamed});
        if (group) add(s, group - 1, integers[(group - 1) % 2]);
    }
    if (group) add(s, group - 1, integers[(group - 1) % 2]);
}

// Up to this many rows, vectors multiply four bits faster, as tile registers need them unpacked:
// 1.5 times for one row, 1.3 for eight, 1.04 for 16 (from memory; two threads of a Xeon, 2026-11-26).
constexpr int64_t kFewRows = 8;

// Up to this many outputs, copying rows of x that are spread over the L1 cache costs more than it gains. Rows of
// 3,072 numbers: it loses 6 % of the speed with 768 outputs and 2,048 rows, and gains 3 to 7 % with 2,048 outputs
// and more (2026-11-27).
constexpr int64_t kFewOutputs = 1024;

// The kinds as the registers multiply them; floats of 32 bits and those in groups are left to the vectors, and
// so are four bits for few rows.
class AmxTiles {
public:
    // See `VectorTiles`. Here the weights of a span fit the L1 cache, along with a block of rows,
    // which comes from L2: twice as many bytes cost a sixth of the speed.
    static constexpr int64_t kSpanBytes = 512;
    static int64_t block_rows(const linear_args& a) {
        return by_vectors(a) ? VectorTiles::block_rows(a) : 2 * kRegisterRows;
    }
    static int64_t row_unit(const linear_args& a) {
        return by_vectors(a) ? VectorTiles::row_unit(a) : kRegisterRows;
    }
    // Whether rows of x are read in place: they must consist of whole cache lines and not share too few sets of the
    // L1 cache. With few outputs it is enough that not all rows share the same set.
    static bool reads_spread(const linear_args& a) {
        const int64_t bytes = a.x_stride * (a.dtype == kBF16 ? 2 : 4), spread = a.outputs <= kFewOutputs ? 64 : 16;
        return !by_vectors(a) && (uintptr_t(a.x) | uintptr_t(bytes)) % 64 == 0 && bytes / 64 % spread != 0;
    }
    static Unpack unpack_of(const linear_args& a) {
        if (by_vectors(a)) return VectorTiles::unpack_of(a);
        return a.kind == kMatrixI8WeightOnly ? unpack_tile<TileI8AsBF16>
               : a.kind == kMatrixFp8         ? unpack_tile<TileFp8>
               : a.kind == kMatrixMxfp4       ? unpack_tile<TileMxfp4>
               : a.kind == kMatrixFp4         ? unpack_tile<TileFp4>
               : a.kind == kMatrixIq4         ? unpack_tile<TileIq4>
               : a.kind == kMatrixNf4         ? unpack_tile<TileNf4>
               : a.kind == kMatrixBnbFp4      ? unpack_tile<TileBnbFp4>
               : is_int4(a.kind)             ? unpack_tile<TileI4>
                                             : nullptr;
    }

    void multiply(int64_t kind, bool unpacked, const Span& s) {
        const bool few = !unpacked && is_int4(kind);
        if (few || by_vectors(kind, s.scales != nullptr)) return vectors_.multiply(kind, unpacked, s);
        switch (kind) {
            case kMatrixI8:
                if (!s.scales) return multiply_whole_i8(shapes_, s, !unpacked);
                return multiply_groups_i8<false>(shapes_, s, !unpacked);
            case kMatrixMxfp4:
            case kMatrixIq4:
            case kMatrixFp4:
            case kMatrixNf4:
            case kMatrixBnbFp4:
            case kMatrixI4: return multiply_groups_i8<false>(shapes_, s, !unpacked);
            case kMatrixI4Min: return multiply_groups_i8<true>(shapes_, s, !unpacked);
            default: return multiply_bf16(shapes_, s, !unpacked);
        }
    }

private:
    static bool by_vectors(const linear_args& a) {
        return (is_int4(a.kind) && a.rows <= kFewRows) || by_vectors(a.kind, a.group != 0);
    }
    static bool by_vectors(int64_t kind, bool grouped) {
        return kind == kMatrixF32 || (grouped && (kind == kMatrixI8WeightOnly || kind == kMatrixFp8));
    }

    VectorTiles vectors_;
    TileShapes shapes_;
};

}  // namespace
}  // namespace kvik

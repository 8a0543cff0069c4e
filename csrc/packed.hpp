// The layout of a packed matrix, the same for every instruction set and number of rows.
//
// Outputs are divided into tiles of 32, inputs into steps that take four bytes of an output:
//   weight  [tiles][steps][32 outputs][4 bytes]
// so that a vector holds neighbouring outputs, a sum never crosses lanes, and a tile is one stream.
//   kind   inputs per step   the four bytes
//   f32    1                 one float
//   bf16   2                 two bf16
//   int8   4                 w + 128, unsigned; the same for both kinds
//   int4   8                 low halves: inputs 0..3 of the step, high halves: inputs 4..7
//   mxfp4  8                 as int4, codes of E2M1; iq4, fp4, nf4 and bnb_fp4 likewise
//   fp8    4                 inputs 0, 2, 1, 3: bytes two apart become a pair
//   scales  of integers and fp8, one tile after another: fp32 [32], a factor of each output, then
//           [groups][32] to multiply it by, fp16 (fp8: fp32; mxfp4: E8M0). Without groups the factor is the
//           scale.
//   zeros   int4 with zero points: uint8 [tiles][groups][32]; with minima: fp16 of the same shape, times
//           the factor
// tiles = ceil(outputs / 32), steps = ceil(inputs / inputs per step), groups = ceil(inputs / group) or 0.
// A factor is 1, or a power of two where fp16 would not hold all scales and minima of an output. For mxfp4 it is
// 1/2, because its values are stored as integers, twice the numbers of E2M1.
//
// Paired (gate and up of silu_and_mul, outputs = 2 * inner): the 32 outputs of a tile are 16 of the
// gate, then the same 16 of up; tiles = ceil(inner / 16).
//
// Padding outputs and inputs in the last tile and step have weight zero.
#pragma once

#include "arguments.hpp"
#include "simd.hpp"

namespace kvik {
namespace {

constexpr int kTile = 32;
constexpr int kHalfTile = kTile / 2;
constexpr int64_t kStepBytes = kTile * 4;
constexpr int kSymmetricZero = 8;  // of four-bit values without zero points

KVIK_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Four-bit kinds, which are multiplied as integers.
KVIK_INLINE bool is_int4(int64_t kind) {
    switch (kind) {
        case kMatrixI4:
        case kMatrixI4Min:
        case kMatrixMxfp4:
        case kMatrixIq4:
        case kMatrixFp4:
        case kMatrixNf4:
        case kMatrixBnbFp4: return true;
        default: return false;
    }
}
KVIK_INLINE int64_t inputs_per_step(int64_t kind) {
    return kind == kMatrixF32 ? 1 : kind == kMatrixBF16 ? 2 : is_int4(kind) ? 8 : 4;
}
KVIK_INLINE bool has_scales(int64_t kind) { return kind != kMatrixF32 && kind != kMatrixBF16; }

KVIK_INLINE int64_t count_groups(int64_t inputs, int64_t group) { return group ? divide_up(inputs, group) : 0; }

// Bytes of a group's scale: fp32, E8M0 or fp16.
KVIK_INLINE int scale_bytes(int64_t kind) { return kind == kMatrixFp8 ? 4 : kind == kMatrixMxfp4 ? 1 : 2; }
// Bytes of the scales of a tile: of the factors, of one group, of all.
constexpr int64_t kFactorBytes = kTile * 4;
KVIK_INLINE int64_t group_scale_bytes(int64_t kind) { return kTile * scale_bytes(kind); }
KVIK_INLINE int64_t tile_scale_bytes(int64_t kind, int64_t groups) {
    return kFactorBytes + groups * group_scale_bytes(kind);
}
// Bytes of the zero points or minima of one group of a tile.
KVIK_INLINE int64_t group_zero_bytes(int64_t kind) { return kTile * (kind == kMatrixI4Min ? 2 : 1); }

KVIK_INLINE int64_t count_tiles(int64_t outputs, bool paired) {
    return paired ? divide_up(outputs / 2, kHalfTile) : divide_up(outputs, kTile);
}

// The output in a lane of a tile, or -1 for padding.
KVIK_INLINE int64_t output_at(int64_t tile, int lane, int64_t outputs, bool paired) {
    if (!paired) {
        const int64_t output = tile * kTile + lane;
        return output < outputs ? output : -1;
    }
    const int64_t inner = outputs / 2, column = tile * kHalfTile + lane % kHalfTile;
    if (column >= inner) return -1;
    return lane < kHalfTile ? column : inner + column;
}

}  // namespace
}  // namespace kvik

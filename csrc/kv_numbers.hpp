// How the numbers of a KV cache are stored: as floats, or rounded to int8, fp8 or int4 by a scale for each
// vector (K or V of one token and kv head). The scale is rounded first, and the numbers are rounded with it.
//
// int8: q in -127..127, x = scale * q. fp8: E4M3, x = scale * q, |q| at most 448. Their scale word is a
// bf16. int4: q in 0..15, x = scale * (q - zero) over a range that includes 0; the word holds the scale's
// exponent and the upper 4 bits of its mantissa, then the zero point in 4 bits.
//
// The rounded numbers cannot hold NaN or infinity: the scale becomes NaN or infinite, which affects only its vector.
#pragma once

#include "fp8.hpp"
#include "simd.hpp"

namespace kvik {
namespace {
namespace cache {

struct Fp8 {
    uint8_t bits;
};
// Two numbers.
struct Int4s {
    uint8_t bits;
};

// Calls use with a number of the type that a cache stores.
template <class Use>
void with_stored(int64_t kv_dtype, const Use& use) {
    if (kv_dtype == kF32) use(float());
    if (kv_dtype == kBF16) use(bf16());
    if (kv_dtype == kI8) use(int8_t());
    if (kv_dtype == kFP8) use(Fp8());
    if (kv_dtype == kI4) use(Int4s());
}

template <class Stored>
constexpr bool kScaled = sizeof(Stored) == 1;
template <class Stored>
constexpr int kNumbers = 1;  // in one Stored
template <>
constexpr int kNumbers<Int4s> = 2;
template <class Stored>
constexpr int kPair = sizeof(Stored) == 4 ? 1 : 2;  // tokens or columns of a lane

constexpr float kInt8Most = 127.0f;
constexpr int kInt4Most = 15;
// The range of magnitudes that are scaled. A smaller vector would have a denormal scale; it is stored as zero.
constexpr float kLeast = 1e-30f, kMost = 3e38f;

// To nearest even; |value| at most 448.
KVIK_INLINE uint8_t fp8_of(float value) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    const float step = 16384.0f;  // its last bit is worth 2^-9, as in E4M3 numbers below 2^-6
    const uint32_t small = bits_of(float_of(size) + step) - bits_of(step);
    return uint8_t((bits >> 24 & 0x80) | (size < bits_of(0x1p-6f) ? small : normal));
}
KVIK_INLINE float fp8_to_float(uint8_t bits) {
    const uint32_t size = bits & 0x7f;
    const float value = size < 8 ? float(size) * 0x1p-9f : float_of((size << 20) + (120u << 23));
    return bits & 0x80 ? -value : value;
}

KVIK_INLINE float int4_scale(uint16_t word) { return float_of(uint32_t(word & 0xfff0) << 15); }
KVIK_INLINE int int4_zero(uint16_t word) { return word & 15; }
// The scale word of a scale >= 0, rounded to nearest even.
KVIK_INLINE uint16_t int4_word(float scale) {
    const uint32_t bits = bits_of(scale);
    if (bits > 0x7f800000) return 0xff80;
    return uint16_t((bits + 0x3ffff + (bits >> 19 & 1)) >> 15 & 0xfff0);
}

KVIK_INLINE float cut(float value, float low, float high) {
    return value < low ? low : value > high ? high : value;
}

// The largest magnitude of some numbers; NaN if one of them is NaN.
KVIK_INLINE float absmax(const float* from, int64_t count) {
    float most = 0.0f;
    for (int64_t d = 0; d < count; d++) {
        const float size = std::fabs(from[d]);
        if (!(size <= most)) most = size;
        if (most != most) break;
    }
    return most;
}

// Chooses a bf16 scale that maps magnitudes up to `size` to at most `most`; 0 where there is nothing to scale.
// Returns the inverse, or 0 where all numbers are stored as 0.
KVIK_INLINE float choose_scale(float size, float most, uint16_t* word) {
    const bool usable = size >= kLeast && size <= kMost;
    *word = to_bf16(usable ? size * (1.0f / most) : size < kLeast ? 0.0f : size);
    return usable ? 1.0f / to_float(*word) : 0.0f;
}

inline void write_zeros(void* to, int64_t count) {
    for (int64_t d = 0; d < count; d += kLanes) store_i8(static_cast<int8_t*>(to) + d, izero());
}

// Floats need no scale.
inline void encode(float* to, const float* from, int64_t count, uint16_t*) {
    std::memcpy(to, from, size_t(count) * sizeof(float));
}
inline void encode(bf16* to, const float* from, int64_t count, uint16_t*) {
    for (int64_t d = 0; d < count; d += kLanes) store(to + d, load(from + d));
}

inline void encode(int8_t* to, const float* from, int64_t count, uint16_t* word) {
    const float inverse = choose_scale(absmax(from, count), kInt8Most, word);
    if (inverse == 0.0f) return write_zeros(to, count);
    const F32 low = broadcast(-kInt8Most), high = broadcast(kInt8Most);
    for (int64_t d = 0; d < count; d += kLanes)
        store_i8(to + d, to_int(max(low, min(high, mul(load(from + d), broadcast(inverse))))));
}

inline void encode(Fp8* to, const float* from, int64_t count, uint16_t* word) {
    const float inverse = choose_scale(absmax(from, count), kFp8Most, word);
    if (inverse == 0.0f) return write_zeros(to, count);
    for (int64_t d = 0; d < count; d++) to[d].bits = fp8_of(cut(from[d] * inverse, -kFp8Most, kFp8Most));
}

// to: a byte for each number.
inline void encode_int4(uint8_t* to, const float* from, int64_t count, uint16_t* word) {
    const float size = absmax(from, count);
    if (!(size >= kLeast && size <= kMost)) {
        *word = int4_word(size < kLeast ? 0.0f : size);
        return write_zeros(to, count);
    }
    F32 above = zero(), below = zero();
    for (int64_t d = 0; d < count; d += kLanes) {
        above = max(above, load(from + d));
        below = max(below, sub(zero(), load(from + d)));
    }
    const float high = largest(above), low = -largest(below);
    // Each divided first: the difference of two finite numbers may be infinite.
    *word = int4_word(high * (1.0f / kInt4Most) - low * (1.0f / kInt4Most));
    const float inverse = 1.0f / int4_scale(*word);
    const F32 zero_point = round(min(broadcast(kInt4Most), mul(broadcast(-low), broadcast(inverse))));
    alignas(64) int32_t lanes[kLanes];
    istore(lanes, to_int(zero_point));
    *word |= uint16_t(lanes[0]);
    for (int64_t d = 0; d < count; d += kLanes) {
        const F32 q = add(round(mul(load(from + d), broadcast(inverse))), zero_point);
        alignas(64) int8_t bytes[kLanes];
        store_i8(bytes, to_int(max(zero(), min(broadcast(kInt4Most), q))));
        std::memcpy(to + d, bytes, kLanes);
    }
}

inline float decode(float value, uint16_t) { return value; }
inline float decode(bf16 value, uint16_t) { return to_float(value); }
inline float decode(int8_t value, uint16_t word) { return float(value) * to_float(word); }
inline float decode(Fp8 value, uint16_t word) { return fp8_to_float(value.bits) * to_float(word); }
inline float decode_int4(int value, uint16_t word) { return float(value - int4_zero(word)) * int4_scale(word); }

}  // namespace cache
}  // namespace
}  // namespace kvik

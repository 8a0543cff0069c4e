// 16-bit floats with a 5-bit exponent (fp16), which checkpoints use for scales.
#pragma once

#include "simd.hpp"

namespace kvik {
namespace {

struct f16 {
    uint16_t bits;
};

KVIK_INLINE float to_float(f16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
    if (rest < 0x400) {  // denormal, as an integer
        const float size = float(rest) * 0x1p-24f;
        return sign ? -size : size;
    }
    const uint32_t exponent = rest < 0x7c00 ? 112u << 23 : 224u << 23;
    return float_of(sign | ((rest << 13) + exponent));
}

// Round to nearest even; numbers that are too large become infinity, NaN stays NaN.
KVIK_INLINE f16 to_f16(float value) {
    const uint32_t all_bits = bits_of(value), bits = all_bits & 0x7fffffff;
    const uint16_t sign = uint16_t(all_bits >> 16 & 0x8000);
    if (bits > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (bits >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
    if (bits < 0x38800000) {  // denormal: adding 1/2 leaves multiples of 2^-24
        const float shifted = float_of(bits) + 0.5f;
        return {uint16_t(sign | (bits_of(shifted) & 0x7fff))};
    }
    return {uint16_t(sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13))};
}

#if defined(__AVX512F__)
KVIK_INLINE F32 load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#elif defined(__AVX2__)
KVIK_INLINE F32 load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#elif defined(KVIK_NEON)
KVIK_INLINE float32x4_t load_four(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
KVIK_INLINE F32 load(const f16* p) { return {load_four(p), load_four(p + 4)}; }
#else
KVIK_INLINE F32 load(const f16* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; i++) lanes[i] = to_float(p[i]);
    return load(lanes);
}
#endif

}  // namespace
}  // namespace kvik

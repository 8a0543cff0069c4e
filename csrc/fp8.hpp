// Eight-bit floats, E4M3 (Micikevicius et al. 2022), as bf16, which represents all of them exactly.
#pragma once

#include "simd.hpp"

namespace kvik {
namespace {

constexpr int kFp8Nan = 0x7f;  // of the seven bits without the sign; there are no infinities

// The bits of NaN are read as 480, here and below.
KVIK_INLINE bf16 fp8_to_bf16(uint8_t value) {
    const int size = value & 0x7f, sign = (value & 0x80) << 8;
    return bf16(sign | (size < 8 ? kSmallFp8[size] : (size << 4) + (120 << 7)));
}

constexpr float kFp8Most = 448.0f;

// The nearest E4M3 numbers, ties to even; larger ones are clamped, NaN stays NaN. The last bit of an E4M3 number
// is worth 2^(e-3), with e at least -6; so is the last bit of 1.5 * 2^(e+20) in fp32.
KVIK_INLINE F32 nearest_fp8(F32 v) {
    const F32 q = max(broadcast(-kFp8Most), min(broadcast(kFp8Most), v));  // with a NaN, the second operand is kept
    const F32 power = __builtin_bit_cast(F32, iand(__builtin_bit_cast(I32, q), ibroadcast(0x7f800000)));
    const F32 large = mul(max(broadcast(0x1p-6f), power), broadcast(0x1.8p20f));
    return sub(add(q, large), large);
}

// Four E4M3 to a lane -> two vectors of pairs of bf16: bytes 0 and 2 of each lane, bytes 1 and 3.
#if defined(__AVX512F__)

KVIK_INLINE void widen_fp8(I32 v, I32& first, I32& second) {
    const I32 small = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kSmallFp8));
    const I32 sign = _mm512_set1_epi16(int16_t(0x8000));
    const I32 size = _mm512_set1_epi16(0x7f0), bias = _mm512_set1_epi16(120 << 7);
    const I32 low = _mm512_add_epi16(_mm512_and_si512(_mm512_slli_epi16(v, 4), size), bias);
    const I32 high = _mm512_add_epi16(_mm512_and_si512(_mm512_srli_epi16(v, 4), size), bias);
    const __mmask32 low_small = _mm512_testn_epi16_mask(v, _mm512_set1_epi16(0x78));
    const __mmask32 high_small = _mm512_testn_epi16_mask(v, _mm512_set1_epi16(0x7800));
    // only the lowest bits of an index count
    const I32 low_size = _mm512_mask_permutexvar_epi16(low, low_small, v, small);
    const I32 high_size = _mm512_mask_permutexvar_epi16(high, high_small, _mm512_srli_epi16(v, 8), small);
    constexpr int kSignOrSize = 0xea;  // a & b | c
    first = _mm512_ternarylogic_epi32(_mm512_slli_epi16(v, 8), sign, low_size, kSignOrSize);
    second = _mm512_ternarylogic_epi32(v, sign, high_size, kSignOrSize);
}

#elif defined(__AVX2__)

// Of words below 256.
KVIK_INLINE I32 widen_fp8_words(I32 v) {
    const I32 normal = _mm256_add_epi16(_mm256_and_si256(_mm256_slli_epi16(v, 4), _mm256_set1_epi16(0x7f0)),
                                        _mm256_set1_epi16(120 << 7));
    // bytes 2 i and 2 i + 1 of the small numbers
    const I32 index = _mm256_add_epi16(_mm256_mullo_epi16(_mm256_and_si256(v, _mm256_set1_epi16(7)),
                                                          _mm256_set1_epi16(0x202)),
                                       _mm256_set1_epi16(0x100));
    const I32 small = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kSmallFp8));
    const I32 is_small = _mm256_cmpeq_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x78)), _mm256_setzero_si256());
    const I32 sign = _mm256_and_si256(_mm256_slli_epi16(v, 8), _mm256_set1_epi16(int16_t(0x8000)));
    return _mm256_or_si256(sign, _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(small, index), is_small));
}

KVIK_INLINE void widen_fp8(I32 v, I32& first, I32& second) {
    first = widen_fp8_words(_mm256_and_si256(v, _mm256_set1_epi16(0xff)));
    second = widen_fp8_words(_mm256_srli_epi16(v, 8));
}

#elif defined(KVIK_NEON)

KVIK_INLINE void widen_fp8(I32 v, I32& first, I32& second) {
    first = {even_fp8(v.low), even_fp8(v.high)};
    second = {odd_fp8(v.low), odd_fp8(v.high)};
}

#else

KVIK_INLINE I4 widen_fp8(I4 v, int byte) {
    return pair_words(fp8_to_bf16((U4)v >> (8 * byte) & 0xffu), fp8_to_bf16((U4)v >> (8 * byte + 16) & 0xffu));
}
KVIK_INLINE void widen_fp8(I32 v, I32& first, I32& second) {
    first = {widen_fp8(v.low, 0), widen_fp8(v.high, 0)};
    second = {widen_fp8(v.low, 1), widen_fp8(v.high, 1)};
}

#endif

}  // namespace
}  // namespace kvik

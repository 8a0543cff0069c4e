// Vectors of one instruction set. This file, and every kernel that includes it, is compiled once per
// instruction set with its own flags; everything here has internal linkage, because the linker merges
// inline functions of the same name and might keep a copy that this machine cannot run.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
// GCC 12 warns about variables in its own header that are uninitialised on purpose; clang lacks the warning.
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#elif defined(KVIK_NEON)
#include <arm_neon.h>
#endif

#define KVIK_INLINE static inline __attribute__((always_inline))
#define KVIK_INLINED __attribute__((always_inline))  // of a lambda

namespace kvik {
namespace {

using bf16 = uint16_t;

// ------------------------------------------------------------------------------------ one number

KVIK_INLINE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
KVIK_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

KVIK_INLINE float to_float(bf16 value) { return float_of(uint32_t(value) << 16); }

// Round to nearest even; NaN stays NaN.
KVIK_INLINE bf16 to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
    return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

KVIK_INLINE int32_t load_word(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return word;
}

// bf16 of the E4M3 numbers below 2^-6, whose exponent is 0: i / 512.
alignas(16) constexpr bf16 kSmallFp8[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

// bf16 of i - 16.
alignas(64) constexpr bf16 kShifted[32] = {
    0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0,
    0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

// ------------------------------------------------------------------------------------ vectors
// F32: kLanes floats. I32: kLanes 32-bit words, which also hold pairs of bf16 and fours of int8.

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using F32 = __m512;
using I32 = __m512i;
using Mask = __mmask16;

KVIK_INLINE F32 zero() { return _mm512_setzero_ps(); }
KVIK_INLINE F32 broadcast(float v) { return _mm512_set1_ps(v); }
KVIK_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
KVIK_INLINE void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
KVIK_INLINE Mask first_lanes(int n) { return Mask(n >= kLanes ? 0xffff : (1u << n) - 1); }
KVIK_INLINE F32 load(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
KVIK_INLINE void store(float* p, F32 v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
KVIK_INLINE F32 widen(__m256i v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
KVIK_INLINE F32 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
KVIK_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
KVIK_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
KVIK_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
KVIK_INLINE F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
KVIK_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
KVIK_INLINE F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
KVIK_INLINE F32 abs(F32 a) { return _mm512_abs_ps(a); }
KVIK_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
constexpr bool kFused = true;                                                  // fma rounds once
KVIK_INLINE F32 round(F32 a) { return _mm512_roundscale_ps(a, 0); }            // to nearest even
KVIK_INLINE F32 select(Mask m, F32 yes, F32 no) { return _mm512_mask_blend_ps(m, no, yes); }
KVIK_INLINE Mask not_le(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }  // a > b, or a NaN
KVIK_INLINE uint32_t bits(Mask m) { return m; }  // bit i: lane i
KVIK_INLINE float sum(F32 a) { return _mm512_reduce_add_ps(a); }
KVIK_INLINE float largest(F32 a) { return _mm512_reduce_max_ps(a); }
KVIK_INLINE F32 times_power_of_two(F32 a, F32 n) { return _mm512_scalef_ps(a, n); }

KVIK_INLINE I32 izero() { return _mm512_setzero_si512(); }
KVIK_INLINE I32 ibroadcast(int32_t v) { return _mm512_set1_epi32(v); }
KVIK_INLINE I32 iload(const void* p) { return _mm512_loadu_si512(p); }
KVIK_INLINE void istore(void* p, I32 v) { _mm512_storeu_si512(p, v); }
KVIK_INLINE I32 iadd(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
KVIK_INLINE I32 iand(I32 a, I32 b) { return _mm512_and_si512(a, b); }
KVIK_INLINE I32 ixor(I32 a, I32 b) { return _mm512_xor_si512(a, b); }
KVIK_INLINE I32 low_nibbles(I32 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
KVIK_INLINE I32 high_nibbles(I32 a) {
    return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}
KVIK_INLINE F32 to_float(I32 a) { return _mm512_cvtepi32_ps(a); }
KVIK_INLINE I32 to_int(F32 a) { return _mm512_cvtps_epi32(a); }  // to nearest even
KVIK_INLINE int32_t sum(I32 a) { return _mm512_reduce_add_epi32(a); }
KVIK_INLINE void store_i8(int8_t* p, I32 v) {  // lanes must fit
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v));
}
KVIK_INLINE I32 load_i8(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
KVIK_INLINE Mask lanes_of(uint32_t bits) { return Mask(bits); }
KVIK_INLINE Mask less(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
KVIK_INLINE F32 even_bf16(I32 a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
KVIK_INLINE F32 odd_bf16(I32 a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int(0xffff0000))));
}
KVIK_INLINE I32 load_i8_pairs(const int8_t* p) {  // pairs of int8 as pairs of bf16, exactly
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
    const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}
KVIK_INLINE I32 load_fp8_pairs(const void* p) {  // the same for E4M3; the bits of NaN give 480
    const __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    const __m512i size = _mm512_and_si512(v, _mm512_set1_epi16(0x7f));
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(v, 8), _mm512_set1_epi16(int16_t(0x8000)));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    const __m512i small = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kSmallFp8));
    const __mmask32 is_small = _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8));
    return _mm512_or_si512(_mm512_mask_permutexvar_epi16(normal, is_small, size, small), sign);
}
// Bytes of two nibbles -> pairs of words, the low nibble first.
KVIK_INLINE I32 load_nibbles(const void* p) {
    const __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm512_or_si512(_mm512_and_si512(v, _mm512_set1_epi32(15)),
                           _mm512_and_si512(_mm512_slli_epi32(v, 12), _mm512_set1_epi32(15 << 16)));
}
// 8 pairs of such bytes -> 16 pairs of words: the low nibbles of each pair, then the high ones. Returns
// kLanes of these from lane `first` on.
KVIK_INLINE I32 load_paired_nibbles(const void* p, int) {
    const __m256i pairs = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(pairs), _mm256_srli_epi32(pairs, 4), 1);
    return _mm512_or_si512(_mm512_and_si512(v, _mm512_set1_epi32(15)),
                           _mm512_and_si512(_mm512_slli_epi32(v, 8), _mm512_set1_epi32(15 << 16)));
}
// Pairs of words from 0 to 31 -> pairs of bf16, less 16.
KVIK_INLINE I32 shifted_to_bf16(I32 v) { return _mm512_permutexvar_epi16(v, _mm512_load_si512(kShifted)); }

KVIK_INLINE __m256i narrow(F32 v) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, even), _mm512_set1_epi32(0x7fff)), 16);
    const Mask nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0)));
#endif
}
KVIK_INLINE void store(bf16* p, F32 v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }

// acc + a.even * b.even + a.odd * b.odd, lane by lane, for pairs of bf16.
KVIK_INLINE F32 dot_bf16(F32 acc, I32 a, I32 b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    const I32 odd = _mm512_set1_epi32(int(0xffff0000));
    acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, odd)),
                           _mm512_castsi512_ps(_mm512_and_si512(b, odd)), acc);
#endif
}
#if defined(__AVX512VNNI__)
// Not the intrinsic: its operands have a different vector type than I32, and with many live sums gcc then
// copies each of them through the stack.
KVIK_INLINE I32 dpbusd(I32 acc, I32 u, I32 s) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
    return acc;
}
// Products of bytes above 127 do not saturate: high nibbles need no shift and count 16 times.
#define KVIK_WIDE_PRODUCTS
KVIK_INLINE I32 nibbles_times_16(I32 a) { return _mm512_and_si512(a, _mm512_set1_epi8(-16)); }
KVIK_INLINE I32 by_16(I32 a) { return _mm512_srai_epi32(a, 4); }
#endif
// acc + sum of four products per lane; u unsigned, s signed bytes. Exact.
KVIK_INLINE I32 dot_i8(I32 acc, I32 u, I32 s) {
#if defined(__AVX512VNNI__)
    return dpbusd(acc, u, s);
#else
    const I32 even = _mm512_madd_epi16(_mm512_and_si512(u, _mm512_set1_epi16(0xff)),
                                       _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
    const I32 odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(s, 8));
    return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#endif
}
// The same where u is at most 127: pairs of products then fit 16 bits.
KVIK_INLINE I32 dot_i4(I32 acc, I32 u, I32 s) {
#if defined(__AVX512VNNI__)
    return dpbusd(acc, u, s);
#else
    return _mm512_add_epi32(
        acc, _mm512_madd_epi16(_mm512_maddubs_epi16(u, s), _mm512_set1_epi16(1)));
#endif
}

// Four int8 to a lane -> two vectors of pairs of bf16, exactly: the first two of each lane, the others.
KVIK_INLINE void widen_i8(I32 v, I32& first, I32& second) {
    const I32 f0 = (I32)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24));
    const I32 f1 = (I32)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 16), 24));
    const I32 f2 = (I32)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 8), 24));
    const I32 f3 = (I32)_mm512_cvtepi32_ps(_mm512_srai_epi32(v, 24));
    first = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(f0, 16), f1);
    second = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(f2, 16), f3);
}
// a * b, where both fit in 15 bits and a is not negative.
KVIK_INLINE I32 short_mul(I32 a, I32 b) { return _mm512_madd_epi16(a, b); }

using F64 = __m512d;  // kLanes / 2 doubles
KVIK_INLINE F64 dzero() { return _mm512_setzero_pd(); }
KVIK_INLINE F64 add(F64 a, F64 b) { return _mm512_add_pd(a, b); }
KVIK_INLINE F64 widen_low(F32 a) { return _mm512_cvtps_pd(_mm512_castps512_ps256(a)); }
KVIK_INLINE F64 widen_high(F32 a) {
    return _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
}
KVIK_INLINE double sum(F64 a) { return _mm512_reduce_add_pd(a); }

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using F32 = __m256;
using I32 = __m256i;
using Mask = __m256;  // all bits of a lane, or none

KVIK_INLINE F32 zero() { return _mm256_setzero_ps(); }
KVIK_INLINE F32 broadcast(float v) { return _mm256_set1_ps(v); }
KVIK_INLINE F32 load(const float* p) { return _mm256_loadu_ps(p); }
KVIK_INLINE void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
KVIK_INLINE Mask first_lanes(int n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
}
KVIK_INLINE F32 load(const float* p, int n) {
    return _mm256_maskload_ps(p, _mm256_castps_si256(first_lanes(n)));
}
KVIK_INLINE void store(float* p, F32 v, int n) {
    _mm256_maskstore_ps(p, _mm256_castps_si256(first_lanes(n)), v);
}
KVIK_INLINE F32 widen(__m128i v) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
KVIK_INLINE F32 load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
KVIK_INLINE F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
KVIK_INLINE F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
KVIK_INLINE F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
KVIK_INLINE F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
KVIK_INLINE F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
KVIK_INLINE F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
KVIK_INLINE F32 abs(F32 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
KVIK_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
constexpr bool kFused = true;
KVIK_INLINE F32 round(F32 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KVIK_INLINE F32 select(Mask m, F32 yes, F32 no) { return _mm256_blendv_ps(no, yes, m); }
KVIK_INLINE Mask not_le(F32 a, F32 b) { return _mm256_cmp_ps(a, b, _CMP_NLE_UQ); }
KVIK_INLINE uint32_t bits(Mask m) { return uint32_t(_mm256_movemask_ps(m)); }
KVIK_INLINE float sum(F32 a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
KVIK_INLINE float largest(F32 a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
KVIK_INLINE F32 times_power_of_two(F32 a, F32 n) {  // |n| below 127
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(power));
}

KVIK_INLINE I32 izero() { return _mm256_setzero_si256(); }
KVIK_INLINE I32 ibroadcast(int32_t v) { return _mm256_set1_epi32(v); }
KVIK_INLINE I32 iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
KVIK_INLINE void istore(void* p, I32 v) { _mm256_storeu_si256((__m256i*)p, v); }
KVIK_INLINE I32 iadd(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
KVIK_INLINE I32 iand(I32 a, I32 b) { return _mm256_and_si256(a, b); }
KVIK_INLINE I32 ixor(I32 a, I32 b) { return _mm256_xor_si256(a, b); }
KVIK_INLINE I32 low_nibbles(I32 a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
KVIK_INLINE I32 high_nibbles(I32 a) {
    return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15));
}
KVIK_INLINE F32 to_float(I32 a) { return _mm256_cvtepi32_ps(a); }
KVIK_INLINE I32 to_int(F32 a) { return _mm256_cvtps_epi32(a); }
KVIK_INLINE int32_t sum(I32 a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
KVIK_INLINE void store_i8(int8_t* p, I32 v) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
KVIK_INLINE I32 load_i8(const int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
KVIK_INLINE Mask lanes_of(uint32_t bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lane), lane));
}
KVIK_INLINE Mask less(F32 a, F32 b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
KVIK_INLINE F32 even_bf16(I32 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
KVIK_INLINE F32 odd_bf16(I32 a) {
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(int(0xffff0000))));
}
KVIK_INLINE I32 load_i8_pairs(const int8_t* p) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256 even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16));
    const __m256 odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16));
    return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd));
}
KVIK_INLINE I32 load_fp8_pairs(const void* p) {
    const __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i size = _mm256_and_si256(v, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(v, 8), _mm256_set1_epi16(int16_t(0x8000)));
    const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(size, 4), _mm256_set1_epi16(120 << 7));
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kSmallFp8));
    // bytes 2 i and 2 i + 1 of the table, where i = size is below 8
    const __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(size, _mm256_set1_epi16(0x0202)), _mm256_set1_epi16(0x0100));
    const __m256i small = _mm256_shuffle_epi8(table, bytes);
    const __m256i is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), size);
    return _mm256_or_si256(_mm256_blendv_epi8(normal, small, is_small), sign);
}
KVIK_INLINE I32 load_nibbles(const void* p) {
    const __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi32(15)),
                           _mm256_and_si256(_mm256_slli_epi32(v, 12), _mm256_set1_epi32(15 << 16)));
}
KVIK_INLINE I32 load_paired_nibbles(const void* p, int first) {
    const __m256i pairs = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i v = first ? _mm256_srli_epi32(pairs, 4) : pairs;
    return _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi32(15)),
                           _mm256_and_si256(_mm256_slli_epi32(v, 8), _mm256_set1_epi32(15 << 16)));
}
KVIK_INLINE I32 shifted_to_bf16(I32 shifted) {
    const __m256i v = _mm256_sub_epi16(shifted, _mm256_set1_epi16(16));
    const __m256 even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 16), 16));
    const __m256 odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(v, 16));
    return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd));
}

KVIK_INLINE __m128i narrow(F32 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, even), _mm256_set1_epi32(0x7fff)), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    const __m256i words = _mm256_packus_epi32(rounded, rounded);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08));
}
KVIK_INLINE void store(bf16* p, F32 v) { _mm_storeu_si128((__m128i*)p, narrow(v)); }

KVIK_INLINE F32 dot_bf16(F32 acc, I32 a, I32 b) {
    const I32 odd = _mm256_set1_epi32(int(0xffff0000));
    acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
                          _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), acc);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, odd)),
                           _mm256_castsi256_ps(_mm256_and_si256(b, odd)), acc);
}
#if defined(__AVXVNNI__)
KVIK_INLINE I32 dpbusd(I32 acc, I32 u, I32 s) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u), "x"(s));
    return acc;
}
#define KVIK_WIDE_PRODUCTS
KVIK_INLINE I32 nibbles_times_16(I32 a) { return _mm256_and_si256(a, _mm256_set1_epi8(-16)); }
KVIK_INLINE I32 by_16(I32 a) { return _mm256_srai_epi32(a, 4); }
#endif
KVIK_INLINE I32 dot_i8(I32 acc, I32 u, I32 s) {
#if defined(__AVXVNNI__)
    return dpbusd(acc, u, s);
#else
    const I32 even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)),
                                       _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const I32 odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
#endif
}
#if defined(__AVXVNNI__)
KVIK_INLINE I32 dot_i4(I32 acc, I32 u, I32 s) { return dpbusd(acc, u, s); }
#else
#define KVIK_SHORT_PRODUCTS
// Sums of pairs in 16 bits. The compiler would add two products first and spill the accumulator.
KVIK_INLINE I32 dot_short(I32 acc, I32 u, I32 s) {
    I32 pairs;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc), "=&x"(pairs) : "x"(u), "x"(s));
    return acc;
}
KVIK_INLINE I32 add_short(I32 acc, I32 sums) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
}
KVIK_INLINE I32 dot_i4(I32 acc, I32 u, I32 s) { return add_short(acc, _mm256_maddubs_epi16(u, s)); }
#endif

KVIK_INLINE void widen_i8(I32 v, I32& first, I32& second) {
    const I32 f0 = (I32)_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24), 24));
    const I32 f1 = (I32)_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 16), 24));
    const I32 f2 = (I32)_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 8), 24));
    const I32 f3 = (I32)_mm256_cvtepi32_ps(_mm256_srai_epi32(v, 24));
    first = _mm256_blend_epi16(_mm256_srli_epi32(f0, 16), f1, 0xaa);
    second = _mm256_blend_epi16(_mm256_srli_epi32(f2, 16), f3, 0xaa);
}
KVIK_INLINE I32 short_mul(I32 a, I32 b) { return _mm256_madd_epi16(a, b); }

using F64 = __m256d;
KVIK_INLINE F64 dzero() { return _mm256_setzero_pd(); }
KVIK_INLINE F64 add(F64 a, F64 b) { return _mm256_add_pd(a, b); }
KVIK_INLINE F64 widen_low(F32 a) { return _mm256_cvtps_pd(_mm256_castps256_ps128(a)); }
KVIK_INLINE F64 widen_high(F32 a) { return _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)); }
KVIK_INLINE double sum(F64 a) {
    const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}

#elif defined(KVIK_NEON)

#include "simd_neon.hpp"

#else  // any machine: two vectors of the compiler, which it keeps in registers of 16 bytes if there are some

constexpr int kLanes = 8;
template <class T>
struct FourOf {
    typedef T type __attribute__((vector_size(4 * sizeof(T))));
};
template <class T>
using Four = typename FourOf<T>::type;
using F4 = Four<float>;
using I4 = Four<int32_t>;
using U4 = Four<uint32_t>;
using Words = int16_t __attribute__((vector_size(16)));
struct F32 { F4 low, high; };
struct I32 { I4 low, high; };
using Mask = I32;  // all bits of a lane, or none

#define KVIK_LANES for (int i = 0; i < kLanes; i++)
template <class V>
KVIK_INLINE V read(const void* p) {
    V r;
    std::memcpy(&r, p, sizeof r);
    return r;
}
template <class T>
KVIK_INLINE U4 read_four(const T* p) {  // unsigned numbers
    return __builtin_convertvector(read<Four<T>>(p), U4);
}
KVIK_INLINE F4 widen(U4 words) { return (F4)(words << 16); }
KVIK_INLINE U4 narrow(F4 a) {
    const U4 bits = (U4)a;
    const I4 nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
KVIK_INLINE F4 round(F4 a) { for (int i = 0; i < 4; i++) a[i] = std::nearbyintf(a[i]); return a; }
KVIK_INLINE F4 times_power_of_two(F4 a, F4 n) {  // |n| below 127, or NaN where a is; ldexp would be a call
    return a * (F4)((U4)(__builtin_convertvector(n, I4) + 127) << 23);
}

KVIK_INLINE F32 broadcast(float x) { return {F4{x, x, x, x}, F4{x, x, x, x}}; }
KVIK_INLINE F32 zero() { return broadcast(0.0f); }
KVIK_INLINE F32 load(const float* p) { return read<F32>(p); }
KVIK_INLINE void store(float* p, F32 a) { std::memcpy(p, &a, sizeof a); }
KVIK_INLINE Mask first_lanes(int n) { return {I4{0, 1, 2, 3} < n, I4{4, 5, 6, 7} < n}; }
KVIK_INLINE F32 load(const float* p, int n) {
    float lanes[kLanes] = {};
    for (int i = 0; i < n && i < kLanes; i++) lanes[i] = p[i];
    return load(lanes);
}
KVIK_INLINE void store(float* p, F32 a, int n) {
    float lanes[kLanes];
    store(lanes, a);
    for (int i = 0; i < n && i < kLanes; i++) p[i] = lanes[i];
}
KVIK_INLINE F32 load(const bf16* p) { return {widen(read_four(p)), widen(read_four(p + 4))}; }
KVIK_INLINE void store(bf16* p, F32 a) {
    const auto low = __builtin_convertvector(narrow(a.low), Four<bf16>);
    const auto high = __builtin_convertvector(narrow(a.high), Four<bf16>);
    std::memcpy(p, &low, sizeof low);
    std::memcpy(p + 4, &high, sizeof high);
}
KVIK_INLINE F32 add(F32 a, F32 b) { return {a.low + b.low, a.high + b.high}; }
KVIK_INLINE F32 sub(F32 a, F32 b) { return {a.low - b.low, a.high - b.high}; }
KVIK_INLINE F32 mul(F32 a, F32 b) { return {a.low * b.low, a.high * b.high}; }
KVIK_INLINE F32 div(F32 a, F32 b) { return {a.low / b.low, a.high / b.high}; }
KVIK_INLINE F32 select(Mask m, F32 yes, F32 no) {
    return {m.low ? yes.low : no.low, m.high ? yes.high : no.high};
}
KVIK_INLINE Mask less(F32 a, F32 b) { return {a.low < b.low, a.high < b.high}; }
KVIK_INLINE F32 max(F32 a, F32 b) { return select(less(b, a), a, b); }
KVIK_INLINE F32 min(F32 a, F32 b) { return select(less(a, b), a, b); }
KVIK_INLINE F32 abs(F32 a) { return {(F4)((U4)a.low & 0x7fffffffu), (F4)((U4)a.high & 0x7fffffffu)}; }
KVIK_INLINE F32 fma(F32 a, F32 b, F32 c) { return add(c, mul(a, b)); }
constexpr bool kFused = false;
KVIK_INLINE F32 round(F32 a) { return {round(a.low), round(a.high)}; }
KVIK_INLINE Mask not_le(F32 a, F32 b) { return {~(a.low <= b.low), ~(a.high <= b.high)}; }
KVIK_INLINE uint32_t bits(Mask m) {
    const I4 one = (m.low & I4{1, 2, 4, 8}) | (m.high & I4{16, 32, 64, 128});
    return uint32_t(one[0] | one[1] | one[2] | one[3]);
}
KVIK_INLINE float sum(F32 a) {
    const F4 pairs = a.low + a.high;
    return (pairs[0] + pairs[2]) + (pairs[1] + pairs[3]);
}
KVIK_INLINE float largest(F32 a) {
    float lanes[kLanes], m;
    store(lanes, a);
    m = lanes[0];
    KVIK_LANES m = lanes[i] > m ? lanes[i] : m;
    return m;
}
KVIK_INLINE F32 times_power_of_two(F32 a, F32 n) {
    return {times_power_of_two(a.low, n.low), times_power_of_two(a.high, n.high)};
}

KVIK_INLINE I32 ibroadcast(int32_t x) { return {I4{x, x, x, x}, I4{x, x, x, x}}; }
KVIK_INLINE I32 izero() { return ibroadcast(0); }
KVIK_INLINE I32 iload(const void* p) { return read<I32>(p); }
KVIK_INLINE void istore(void* p, I32 a) { std::memcpy(p, &a, sizeof a); }
KVIK_INLINE I32 iadd(I32 a, I32 b) {  // may wrap
    return {(I4)((U4)a.low + (U4)b.low), (I4)((U4)a.high + (U4)b.high)};
}
KVIK_INLINE I32 iand(I32 a, I32 b) { return {a.low & b.low, a.high & b.high}; }
KVIK_INLINE I32 ixor(I32 a, I32 b) { return {a.low ^ b.low, a.high ^ b.high}; }
KVIK_INLINE I32 low_nibbles(I32 a) { return iand(a, ibroadcast(0x0f0f0f0f)); }
KVIK_INLINE I32 high_nibbles(I32 a) { return low_nibbles({a.low >> 4, a.high >> 4}); }
KVIK_INLINE F32 to_float(I32 a) { return {__builtin_convertvector(a.low, F4), __builtin_convertvector(a.high, F4)}; }
KVIK_INLINE I32 to_int(F32 a) {
    return {__builtin_convertvector(round(a.low), I4), __builtin_convertvector(round(a.high), I4)};
}
KVIK_INLINE int32_t sum(I32 a) {
    const I4 pairs = a.low + a.high;
    return (pairs[0] + pairs[2]) + (pairs[1] + pairs[3]);
}
KVIK_INLINE void store_i8(int8_t* p, I32 a) {
    int32_t lanes[kLanes];
    istore(lanes, a);
    KVIK_LANES p[i] = int8_t(lanes[i]);
}
KVIK_INLINE I32 load_i8(const int8_t* p) {
    return {__builtin_convertvector(read<Four<int8_t>>(p), I4), __builtin_convertvector(read<Four<int8_t>>(p + 4), I4)};
}
KVIK_INLINE Mask lanes_of(uint32_t bits) {
    const int32_t b = int32_t(bits);
    return {(I4{1, 2, 4, 8} & b) != 0, (I4{16, 32, 64, 128} & b) != 0};
}
KVIK_INLINE F32 even_bf16(I32 a) { return {widen((U4)a.low), widen((U4)a.high)}; }
KVIK_INLINE F32 odd_bf16(I32 a) { return {(F4)((U4)a.low & 0xffff0000u), (F4)((U4)a.high & 0xffff0000u)}; }
KVIK_INLINE I4 pair_words(U4 even, U4 odd) { return (I4)((even & 0xffffu) | odd << 16); }
KVIK_INLINE U4 exact_bf16(I4 a) { return (U4)__builtin_convertvector(a, F4) >> 16; }  // of numbers that bf16 has
KVIK_INLINE I4 pair_bf16(I4 even, I4 odd) { return pair_words(exact_bf16(even), exact_bf16(odd)); }
KVIK_INLINE I4 byte_of(I4 a, int byte) { return (I4)((U4)a << (24 - 8 * byte)) >> 24; }  // signed
KVIK_INLINE I4 load_i8_pairs_of_four(const int8_t* p) {
    const I4 pairs = pair_words(read_four((const uint16_t*)p), read_four((const uint16_t*)p) >> 8);
    return pair_bf16(byte_of(pairs, 0), byte_of(pairs, 2));
}
KVIK_INLINE I32 load_i8_pairs(const int8_t* p) { return {load_i8_pairs_of_four(p), load_i8_pairs_of_four(p + 8)}; }
KVIK_INLINE U4 fp8_to_bf16(U4 v) {  // of bytes
    const U4 size = v & 0x7fu;
    const U4 small = (U4)(__builtin_convertvector((I4)size, F4) * 0x1p-9f) >> 16;
    return (size < 8u ? small : (size << 4) + (120u << 7)) | (v & 0x80u) << 8;
}
KVIK_INLINE I4 load_fp8_pairs_of_four(const uint8_t* p) {
    const U4 pairs = read_four((const uint16_t*)p);
    return pair_words(fp8_to_bf16(pairs & 0xffu), fp8_to_bf16(pairs >> 8));
}
KVIK_INLINE I32 load_fp8_pairs(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    return {load_fp8_pairs_of_four(bytes), load_fp8_pairs_of_four(bytes + 8)};
}
KVIK_INLINE I32 load_nibbles(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    const U4 low = read_four(bytes), high = read_four(bytes + 4);
    return {pair_words(low & 15u, low >> 4), pair_words(high & 15u, high >> 4)};
}
KVIK_INLINE I32 load_paired_nibbles(const void* p, int first) {
    const auto* pairs = static_cast<const uint16_t*>(p);
    const U4 low = read_four(pairs) >> (first ? 4 : 0), high = read_four(pairs + 4) >> (first ? 4 : 0);
    return {pair_words(low & 15u, low >> 8 & 15u), pair_words(high & 15u, high >> 8 & 15u)};
}
KVIK_INLINE I4 shifted_to_bf16(I4 v) { return pair_bf16((v & 31) - 16, (v >> 16 & 31) - 16); }
KVIK_INLINE I32 shifted_to_bf16(I32 v) { return {shifted_to_bf16(v.low), shifted_to_bf16(v.high)}; }

KVIK_INLINE I4 widen_i8(I4 v, int byte) { return pair_bf16(byte_of(v, byte), byte_of(v, byte + 1)); }
KVIK_INLINE void widen_i8(I32 v, I32& first, I32& second) {
    first = {widen_i8(v.low, 0), widen_i8(v.high, 0)};
    second = {widen_i8(v.low, 2), widen_i8(v.high, 2)};
}
KVIK_INLINE I32 short_mul(I32 a, I32 b) { return {a.low * b.low, a.high * b.high}; }

KVIK_INLINE F32 dot_bf16(F32 acc, I32 a, I32 b) {
    return fma(odd_bf16(a), odd_bf16(b), fma(even_bf16(a), even_bf16(b), acc));
}
KVIK_INLINE I4 dot_i8(I4 acc, I4 u, I4 s) {  // products of bytes fit 16 bits
    const I4 even = (I4)((Words)(u & 0x00ff00ff) * ((Words)s << 8 >> 8));
    const I4 odd = (I4)((Words)((u >> 8) & 0x00ff00ff) * ((Words)s >> 8));
    return acc + (even << 16 >> 16) + (even >> 16) + (odd << 16 >> 16) + (odd >> 16);
}
KVIK_INLINE I32 dot_i8(I32 acc, I32 u, I32 s) {
    return {dot_i8(acc.low, u.low, s.low), dot_i8(acc.high, u.high, s.high)};
}
KVIK_INLINE I32 dot_i4(I32 acc, I32 u, I32 s) { return dot_i8(acc, u, s); }

struct F64 { double v[kLanes / 2]; };
KVIK_INLINE F64 dzero() { return F64{}; }
KVIK_INLINE F64 add(F64 a, F64 b) { for (int i = 0; i < kLanes / 2; i++) a.v[i] += b.v[i]; return a; }
KVIK_INLINE F64 widen_low(F32 a) { return {a.low[0], a.low[1], a.low[2], a.low[3]}; }
KVIK_INLINE F64 widen_high(F32 a) { return {a.high[0], a.high[1], a.high[2], a.high[3]}; }
KVIK_INLINE double sum(F64 a) { double s = 0; for (int i = 0; i < kLanes / 2; i++) s += a.v[i]; return s; }
#undef KVIK_LANES

#endif

// ------------------------------------------------------------------------------------ on top

// The first n lanes of bf16, then zeros.
KVIK_INLINE F32 load(const bf16* p, int n) {
    bf16 lanes[kLanes] = {};
    std::memcpy(lanes, p, size_t(n) * sizeof(bf16));
    return load(lanes);
}
KVIK_INLINE void store(bf16* p, F32 v, int n) {
    bf16 lanes[kLanes];
    store(lanes, v);
    std::memcpy(p, lanes, size_t(n) * sizeof(bf16));
}

// Calls work(i, n) for the vectors of [begin, end); n: `AllLanes`, or how many lanes the last one has.
struct AllLanes {};
template <class T>
KVIK_INLINE F32 load(const T* p, AllLanes) {
    return load(p);
}
template <class T>
KVIK_INLINE void store(T* p, F32 v, AllLanes) {
    store(p, v);
}
template <class Work>
KVIK_INLINE void each_vector(int64_t begin, int64_t end, const Work& work) {
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) work(i, AllLanes());
    if (i < end) work(i, int(end - i));
}

KVIK_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// To the L2 cache, which keeps more requests in flight than L1.
KVIK_INLINE void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 2); }
// For data that is read once, so that it does not evict everything else from the caches.
KVIK_INLINE void prefetch_once(const void* p) { __builtin_prefetch(p, 0, 0); }

// e^x, relative error below 2e-7; x is cut to [-87, 88], NaN stays NaN. e^0 is exactly 1.
KVIK_INLINE F32 exp(F32 x) {
    const F32 clamped = max(broadcast(-87.0f), min(broadcast(88.0f), x));  // with a NaN, the second operand is kept
    const F32 n = round(mul(clamped, broadcast(1.44269504f)));
    // x - n ln 2 in two parts, because n ln 2 alone would lose the low bits
    F32 f = fma(n, broadcast(-0.693359375f), clamped);
    f = fma(n, broadcast(2.12194440e-4f), f);
    F32 p = broadcast(1.9875691500e-4f);
    p = fma(p, f, broadcast(1.3981999507e-3f));
    p = fma(p, f, broadcast(8.3334519073e-3f));
    p = fma(p, f, broadcast(4.1665795894e-2f));
    p = fma(p, f, broadcast(1.6666665459e-1f));
    p = fma(p, f, broadcast(5.0000001201e-1f));
    p = add(fma(p, mul(f, f), f), broadcast(1.0f));
    return times_power_of_two(p, n);
}

// 2^x for x <= 0, relative error below 2e-7; x is cut at -126, NaN stays NaN. 2^0 is exactly 1. The polynomial was
// fitted to (2^f - 1) / f over [-0.5, 0.5].
KVIK_INLINE F32 power_of_two(F32 x) {
    const F32 cut = max(broadcast(-126.0f), x), n = round(cut), f = sub(cut, n);
    F32 p = broadcast(1.3264727313e-3f);
    p = fma(p, f, broadcast(9.6715129912e-3f));
    p = fma(p, f, broadcast(5.5507335812e-2f));
    p = fma(p, f, broadcast(2.4022242427e-1f));
    p = fma(p, f, broadcast(6.9314700365e-1f));
    return times_power_of_two(fma(p, f, broadcast(1.0f)), n);
}

// tanh x, relative error below 4e-7; NaN stays NaN. Near 0, where the difference would cancel, a polynomial
// that was fitted to (tanh x / x - 1) / x^2.
KVIK_INLINE F32 tanh(F32 x) {
    const F32 size = abs(x), square = mul(x, x);
    F32 p = broadcast(1.6432008781e-2f);
    p = fma(p, square, broadcast(-5.2668025893e-2f));
    p = fma(p, square, broadcast(1.3320643329e-1f));
    p = fma(p, square, broadcast(-3.3332941164e-1f));
    const F32 near = fma(mul(p, square), x, x);
    const F32 t = exp(mul(size, broadcast(-2.0f)));
    const F32 far = div(sub(broadcast(1.0f), t), add(broadcast(1.0f), t));
    return select(less(size, broadcast(0.55f)), near, select(less(x, zero()), sub(zero(), far), far));
}

}  // namespace
}  // namespace kvik

// Four-bit codes that stand for the numbers of a table: E2M1, whose groups share a power of two (E8M0), from the
// OCP Microscaling formats; IQ4 of GGUF files, whose numbers are closer together near 0; and NF4 and FP4 of
// bitsandbytes, whose numbers are rounded.
#pragma once

#include "simd.hpp"

namespace kvik {
namespace {

// Twice the number of each code (an integer), plus kE2M1Zero, so that none is negative.
constexpr int kE2M1Zero = 12;
alignas(16) constexpr uint8_t kE2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// The numbers of IQ4, plus kIq4Zero.
constexpr int kIq4Zero = 128;
alignas(16) constexpr uint8_t kIq4[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                          129, 141, 153, 166, 181, 197, 217, 241};
// 112 times the numbers of NF4, rounded, plus kNf4Zero. No other integer up to 127 gives a smaller mean square error.
constexpr int kNf4Zero = 112;
alignas(16) constexpr uint8_t kNf4[16] = {0, 34, 53, 68, 80, 91, 102, 112,
                                          121, 130, 140, 150, 161, 175, 193, 224};
// 120 times the numbers of bitsandbytes' FP4, plus kBnbFp4Zero. Only the smallest, 1/192, is rounded.
constexpr int kBnbFp4Zero = 120;
alignas(16) constexpr uint8_t kBnbFp4[16] = {120, 121, 200, 240, 160, 180, 140, 150,
                                             120, 119, 40, 0, 80, 60, 100, 90};

// 2^(bits - 127); 255, which is NaN in E8M0, gives infinity.
struct e8m0 {
    uint8_t bits;
};

constexpr uint32_t kSmallestE8M0 = 1u << 22;  // 2^-127 is denormal in fp32

KVIK_INLINE float to_float(e8m0 value) {
    return float_of(value.bits ? uint32_t(value.bits) << 23 : kSmallestE8M0);
}

#if defined(__AVX512F__)
KVIK_INLINE F32 load(const e8m0* p) {
    const I32 bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(bits, ibroadcast(kSmallestE8M0)));
}
// Codes in bytes -> their entries in a table.
KVIK_INLINE I32 entries(const uint8_t* table, I32 codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), codes);
}
#elif defined(__AVX2__)
KVIK_INLINE F32 load(const e8m0* p) {
    const I32 bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, ibroadcast(kSmallestE8M0)));
}
KVIK_INLINE I32 entries(const uint8_t* table, I32 codes) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), codes);
}
#elif defined(KVIK_NEON)
KVIK_INLINE float32x4_t of_exponents(uint16x4_t exponents) {
    const uint32x4_t bits = vshlq_n_u32(vmovl_u16(exponents), 23);
    return vreinterpretq_f32_u32(vmaxq_u32(bits, vdupq_n_u32(kSmallestE8M0)));
}
KVIK_INLINE F32 load(const e8m0* p) {
    const uint16x8_t words = vmovl_u8(vld1_u8(&p->bits));
    return {of_exponents(vget_low_u16(words)), of_exponents(vget_high_u16(words))};
}
KVIK_INLINE int32x4_t entries(const uint8_t* table, int32x4_t codes) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_s32(codes)));
}
KVIK_INLINE I32 entries(const uint8_t* table, I32 codes) {
    return {entries(table, codes.low), entries(table, codes.high)};
}
#else
KVIK_INLINE F32 load(const e8m0* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; i++) lanes[i] = to_float(p[i]);
    return load(lanes);
}
KVIK_INLINE I32 entries(const uint8_t* table, I32 codes) {
    uint8_t bytes[sizeof codes];
    std::memcpy(bytes, &codes, sizeof codes);
    for (uint8_t& byte : bytes) byte = table[byte];
    std::memcpy(&codes, bytes, sizeof codes);
    return codes;
}
#endif

}  // namespace
}  // namespace kvik

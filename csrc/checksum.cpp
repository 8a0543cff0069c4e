// The method of Gopal et al. 2009, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction": 128 bits times a power of x, modulo the polynomial, are added to the bits that distance
// later. This leaves 16 bytes with the same checksum, which are processed byte by byte.
#include "checksum.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvik {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // bits reversed: x^31 is bit 0

constexpr std::array<uint32_t, 256> make_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
        table[i] = value;
    }
    return table;
}

constexpr auto kTable = make_table();

uint32_t by_bytes(const uint8_t* bytes, size_t count, uint32_t state) {
    for (size_t i = 0; i < count; i++) state = kTable[(state ^ bytes[i]) & 0xFF] ^ (state >> 8);
    return state;
}

#if defined(__x86_64__)

// x^power modulo the polynomial, reversed within 33 bits: the product of two reversed numbers is
// shifted by one.
constexpr uint64_t power_of_x(int power) {
    uint32_t value = 0x80000000;  // x^0
    for (int i = 0; i < power; i++) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
    return uint64_t(value) << 1;
}

__attribute__((target("pclmul,sse2"))) inline __m128i load(const uint8_t* bytes) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

// `low` for the first 8 bytes, `high` for the last 8, which are 64 bits later.
__attribute__((target("pclmul,sse2"))) inline __m128i fold(__m128i value, __m128i factors, __m128i later) {
    const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00);
    const __m128i high = _mm_clmulepi64_si128(value, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), later);
}

// Factors that move 16 bytes on.
__attribute__((target("pclmul,sse2"))) inline __m128i factors_of(uint64_t low, uint64_t high) {
    return _mm_set_epi64x(int64_t(high), int64_t(low));
}

constexpr uint64_t kFarLow = power_of_x(512 + 32), kFarHigh = power_of_x(512 - 32);  // 64 bytes on

// 256 bytes at a time; `count` is at least 256. Returns the number of bytes in `parts`.
__attribute__((target("avx512f,vpclmulqdq,pclmul,sse2"))) size_t by_wide_products(const uint8_t* bytes, size_t count,
                                                                                uint32_t state, __m128i* parts) {
    constexpr uint64_t wide_low = power_of_x(2048 + 32), wide_high = power_of_x(2048 - 32);
    const __m512i wide = _mm512_set4_epi64(wide_high, wide_low, wide_high, wide_low);
    const __m512i far = _mm512_set4_epi64(kFarHigh, kFarLow, kFarHigh, kFarLow);
    __m512i sums[4];
    for (int i = 0; i < 4; i++) sums[i] = _mm512_loadu_si512(bytes + 64 * i);
    const __m512i first = _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(state)));
    sums[0] = _mm512_xor_si512(sums[0], first);
    size_t at = 256;
    // 0x96: the sum of three.
    for (; at + 256 <= count; at += 256)
        for (int i = 0; i < 4; i++)
            sums[i] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sums[i], wide, 0x00),
                                                _mm512_clmulepi64_epi128(sums[i], wide, 0x11),
                                                _mm512_loadu_si512(bytes + at + 64 * i), 0x96);
    for (int i = 1; i < 4; i++)
        sums[i] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sums[i - 1], far, 0x00),
                                            _mm512_clmulepi64_epi128(sums[i - 1], far, 0x11), sums[i], 0x96);
    _mm512_storeu_si512(parts, sums[3]);
    return at;
}

bool has_wide_products() {
    static const bool found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
    return found;
}

__attribute__((target("pclmul,sse2"))) uint32_t by_products(const uint8_t* bytes, size_t count, uint32_t state,
                                                            bool wide) {
    constexpr uint64_t near_low = power_of_x(128 + 32), near_high = power_of_x(128 - 32);
    const __m128i far = factors_of(kFarLow, kFarHigh), near = factors_of(near_low, near_high);
    __m128i parts[4];
    size_t at = 64;
    if (wide && count >= 256) {
        at = by_wide_products(bytes, count, state, parts);
    } else {
        for (int i = 0; i < 4; i++) parts[i] = load(bytes + 16 * i);
        parts[0] = _mm_xor_si128(parts[0], _mm_cvtsi32_si128(int(state)));
    }
    for (; at + 64 <= count; at += 64)
        for (int i = 0; i < 4; i++) parts[i] = fold(parts[i], far, load(bytes + at + 16 * i));
    __m128i rest = parts[0];
    for (int i = 1; i < 4; i++) rest = fold(rest, near, parts[i]);
    for (; at + 16 <= count; at += 16) rest = fold(rest, near, load(bytes + at));
    uint8_t left[16];
    std::memcpy(left, &rest, sizeof left);
    return by_bytes(bytes + at, count - at, by_bytes(left, sizeof left, 0));
}

#endif

}  // namespace

bool has_crc32() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("pclmul");
#else
    return false;
#endif
}

uint32_t crc32(const uint8_t* bytes, size_t count, uint32_t start, [[maybe_unused]] bool wide) {
    uint32_t state = ~start;
#if defined(__x86_64__)
    if (count >= 64) return ~by_products(bytes, count, state, wide && has_wide_products());
#endif
    return ~by_bytes(bytes, count, state);
}

}  // namespace kvik

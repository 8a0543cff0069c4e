// Convert rounded numbers of a KV cache to bf16, exactly, 64 at a time: each byte of a result is looked up in
// a table, which takes half the instructions of computing it.
#pragma once

#include "kv_layout.hpp"
#include "kv_numbers.hpp"
#include "simd.hpp"

#if defined(__AVX512VBMI__)

namespace kvik {
namespace {
namespace cache {

// bf16 of the magnitudes 0 to 127, the lower bytes apart from the upper ones.
struct alignas(64) ByteTables {
    uint8_t low[128], high[128];
};

constexpr bf16 bf16_of_size(int size) {  // of an integer of at most 7 bits
    if (size == 0) return 0;
    const int exponent = 31 - __builtin_clz(unsigned(size));
    return bf16((127 + exponent) << 7 | (size << (7 - exponent) & 0x7f));
}
constexpr bf16 bf16_of_fp8(int size) { return size < 8 ? kSmallFp8[size] : bf16((size << 4) + (120 << 7)); }

constexpr ByteTables tables_of(bf16 (*number)(int)) {
    ByteTables tables{};
    for (int size = 0; size < 128; size++) {
        tables.low[size] = uint8_t(number(size));
        tables.high[size] = uint8_t(number(size) >> 8);
    }
    return tables;
}
constexpr ByteTables kInt8Tables = tables_of(bf16_of_size), kFp8Tables = tables_of(bf16_of_fp8);

KVIK_INLINE const ByteTables& tables_for(const int8_t*) { return kInt8Tables; }
KVIK_INLINE const ByteTables& tables_for(const Fp8*) { return kFp8Tables; }
// A lookup takes the lowest 7 bits.
KVIK_INLINE __m512i size_of(const int8_t*, __m512i v) { return _mm512_abs_epi8(v); }
KVIK_INLINE __m512i size_of(const Fp8*, __m512i v) { return v; }

template <class Stored>
KVIK_INLINE void widen_bytes(bf16* to, const Stored* from, int64_t count) {  // a multiple of 64
    const ByteTables& tables = tables_for(from);
    const __m512i low_0 = _mm512_load_si512(tables.low), low_1 = _mm512_load_si512(tables.low + 64);
    const __m512i high_0 = _mm512_load_si512(tables.high), high_1 = _mm512_load_si512(tables.high + 64);
    // Bytes are interleaved within quarters of a vector: the first half of each, then the second.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i sign = _mm512_set1_epi8(int8_t(0x80));
    for (int64_t i = 0; i < count; i += 64) {
        const __m512i v = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i));
        const __m512i size = size_of(from, v);
        const __m512i low = _mm512_permutex2var_epi8(low_0, size, low_1);
        const __m512i plain = _mm512_permutex2var_epi8(high_0, size, high_1);
        const __m512i high = _mm512_ternarylogic_epi64(plain, v, sign, 0xf8);  // plain | (v & sign)
        _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(low, high));
        _mm512_storeu_si512(to + i + 32, _mm512_unpackhi_epi8(low, high));
    }
}

// bf16 of i - 16, for i from 0 to 31, the range of a nibble minus its zero point.
struct alignas(64) ShiftedTables {
    uint8_t low[64], high[64];
};
constexpr ShiftedTables shifted_tables() {
    ShiftedTables tables{};
    for (int i = 0; i < 32; i++) {
        tables.low[i] = uint8_t(kShifted[i]);
        tables.high[i] = uint8_t(kShifted[i] >> 8);
    }
    return tables;
}
constexpr ShiftedTables kShiftedTables = shifted_tables();

// 64 numbers, one to a byte and ordered as above.
KVIK_INLINE void store_shifted(bf16* to, __m512i v) {
    const __m512i low = _mm512_permutexvar_epi8(v, _mm512_load_si512(kShiftedTables.low));
    const __m512i high = _mm512_permutexvar_epi8(v, _mm512_load_si512(kShiftedTables.high));
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(low, high));
}

// 16 - zero point of each token of a strip.
KVIK_INLINE void read_shifts(uint8_t* shifts, const uint16_t* words) {
    for (int t = 0; t < kStrip; t++) shifts[t] = uint8_t(16 - int4_zero(words[t]));
}

// A strip of keys in four bits, [head_dim / 2][16 tokens].
KVIK_INLINE void widen_nibble_keys(bf16* to, const uint8_t* from, const uint8_t* shifts, int64_t head_dim) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i by_token = _mm512_permutexvar_epi64(
        _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3),
        _mm512_castsi256_si512(_mm256_mullo_epi16(
            _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)shifts)), _mm256_set1_epi16(0x101))));
    const __m512i nibbles = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < head_dim / 2; i += 2) {  // two columns of 16 tokens, and the next two
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)(from + i * 16));
        const __m512i words = _mm512_cvtepu8_epi16(_mm256_permutevar8x32_epi32(bytes, order));
        const __m512i v = _mm512_ternarylogic_epi64(words, _mm512_slli_epi16(words, 4), nibbles, 0xa8);  // (a | b) & c
        store_shifted(to + i * 32, _mm512_add_epi8(v, by_token));
    }
}

// Two tokens of values in four bits, [head_dim / 16][8 columns][2 tokens].
KVIK_INLINE void widen_nibble_values(bf16* to, const uint8_t* from, const uint8_t* shifts, int64_t head_dim) {
    // Columns 0 to 7 of two groups, quarter by quarter, from their low bits; then 8 to 15 from the high ones.
    const __m512i order = _mm512_setr_epi64(0, 2, 1, 3, 0, 2, 1, 3);
    const __m512i low_bits = _mm512_set1_epi64(0x3830282018100800);
    const __m512i bits = _mm512_add_epi8(low_bits, _mm512_setr_epi64(0, 0, 0, 0, 0x0404040404040404, 0x0404040404040404,
                                                                     0x0404040404040404, 0x0404040404040404));
    int16_t two;
    std::memcpy(&two, shifts, 2);
    const __m512i by_token = _mm512_set1_epi16(two);
    const __m512i nibbles = _mm512_set1_epi8(15);
    for (int64_t d = 0; d < head_dim; d += 32) {
        const bool both = d + 32 <= head_dim;
        const __m256i bytes = both ? _mm256_loadu_si256((const __m256i*)(from + d))
                                   : _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(from + d)));
        const __m512i twice = _mm512_permutexvar_epi64(order, _mm512_castsi256_si512(bytes));
        const __m512i v = _mm512_add_epi8(_mm512_and_si512(_mm512_multishift_epi64_epi8(bits, twice), nibbles), by_token);
        if (both) {
            store_shifted(to + 2 * d, v);
        } else {
            alignas(64) bf16 last[64];
            store_shifted(last, v);
            std::memcpy(to + 2 * d, last, 64);
        }
    }
}

}  // namespace cache
}  // namespace
}  // namespace kvik

#endif

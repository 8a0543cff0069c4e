// The values of a strip of latents, which are the first columns of its keys, in the layout of values
// (kv_layout.hpp). Not inlined: its use of registers would slow down ordinary attention, which shares the loop.
#pragma once

#include "kv_layout.hpp"
#include "kv_numbers.hpp"
#include "simd.hpp"

namespace kvik {
namespace {
namespace cache {

__attribute__((noinline)) void values_of_keys(float* to, const float* keys, int64_t value_dim) {
    for (int64_t first = 0; first < value_dim; first += kStrip)
        for (int t = 0; t < kStrip; t++) {
            float* row = to + value_place<1>(t, first, value_dim);
            for (int d = 0; d < kStrip; d++) row[d] = keys[key_place<1>(t, first + d)];
        }
}

#if defined(__AVX512BW__)

// A vector of keys has two columns of 16 tokens. From eight such vectors, 16 columns of a pair of tokens make a vector
// of values: once the four numbers of two tokens are in order, 8 x 8 quarters of 64 bits are transposed.
__attribute__((noinline)) void values_of_keys(bf16* to, const bf16* keys, int64_t value_dim) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    for (int64_t first = 0; first < value_dim; first += kStrip) {
        __m512i v[8], pairs[8], fours[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            v[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(keys + (first / 2 + i) * 2 * kStrip), order);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            pairs[i] = _mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]);  // quarters 0, 2, 4, 6
            pairs[i + 4] = _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]);
        }
#pragma GCC unroll 2
        for (int h = 0; h < 8; h += 4) {
            fours[h] = _mm512_shuffle_i32x4(pairs[h], pairs[h + 1], 0x88);      // 0 and 4 of the first two
            fours[h + 1] = _mm512_shuffle_i32x4(pairs[h + 2], pairs[h + 3], 0x88);
            fours[h + 2] = _mm512_shuffle_i32x4(pairs[h], pairs[h + 1], 0xdd);  // 2 and 6
            fours[h + 3] = _mm512_shuffle_i32x4(pairs[h + 2], pairs[h + 3], 0xdd);
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                const __m512i low = fours[4 * h + 2 * n], high = fours[4 * h + 2 * n + 1];
                bf16* at = to + value_place<2>(2 * (h + 2 * n), first, value_dim);
                _mm512_storeu_si512(at, _mm512_shuffle_i32x4(low, high, 0x88));
                _mm512_storeu_si512(at + value_place<2>(8, 0, value_dim), _mm512_shuffle_i32x4(low, high, 0xdd));
            }
        }
    }
}

#else

__attribute__((noinline)) void values_of_keys(bf16* to, const bf16* keys, int64_t value_dim) {
    for (int64_t d = 0; d < value_dim; d += 2)
        for (int t = 0; t < kStrip; t += 2) {
            const uint32_t first = uint32_t(load_word(keys + key_place<2>(t, d)));
            const uint32_t second = uint32_t(load_word(keys + key_place<2>(t + 1, d)));
            const uint32_t columns[2] = {(first & 0xffff) | second << 16, first >> 16 | (second & 0xffff0000u)};
            std::memcpy(to + value_place<2>(t, d, value_dim), columns, sizeof columns);
        }
}

#endif

}  // namespace cache
}  // namespace
}  // namespace kvik

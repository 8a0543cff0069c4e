// Convert strips of rounded keys and values (kv_numbers.hpp) to bf16, exactly: scales are not applied here but
// to scores and weights. The result has the layout of a bf16 cache (kv_layout.hpp).
#pragma once

#include "kv_byte_tables.hpp"
#include "kv_layout.hpp"
#include "kv_numbers.hpp"
#include "simd.hpp"

namespace kvik {
namespace {
namespace cache {

#if defined(__AVX512VBMI__)

// One byte is one number, so the order stays.
template <class Stored>
KVIK_INLINE void widen_keys(bf16* to, const Stored* from, const uint16_t*, int64_t head_dim) {
    widen_bytes(to, from, kStrip * head_dim);
}
KVIK_INLINE void widen_keys(bf16* to, const Int4s* from, const uint16_t* words, int64_t head_dim) {
    alignas(16) uint8_t shifts[kStrip];
    read_shifts(shifts, words);
    widen_nibble_keys(to, &from->bits, shifts, head_dim);
}
KVIK_INLINE void widen_values(bf16* to, const Int4s* from, const uint16_t* words, int64_t head_dim) {
    alignas(16) uint8_t shifts[kStrip];
    read_shifts(shifts, words);
    for (int t = 0; t < kStrip; t += 2)
        widen_nibble_values(to + t * head_dim, &from[t / 2 * head_dim].bits, shifts + t, head_dim);
}

#else

KVIK_INLINE I32 load_pairs(const int8_t* p) { return load_i8_pairs(p); }
KVIK_INLINE I32 load_pairs(const Fp8* p) { return load_fp8_pairs(p); }

template <class Stored>
KVIK_INLINE void widen_keys(bf16* to, const Stored* from, const uint16_t*, int64_t head_dim) {
    for (int64_t i = 0; i < kStrip * head_dim; i += 2 * kLanes) istore(to + i, load_pairs(from + i));
}
// q - zero is computed as q + (16 - zero), which is never negative, minus 16.
KVIK_INLINE void widen_keys(bf16* to, const Int4s* from, const uint16_t* words, int64_t head_dim) {
    constexpr int V = kStrip / kLanes;
    alignas(64) int32_t lanes[kStrip];
    for (int t = 0; t < kStrip; t++) lanes[t] = (16 - int4_zero(words[t])) * 0x10001;
    I32 shifts[V];
    for (int n = 0; n < V; n++) shifts[n] = iload(lanes + n * kLanes);
    for (int64_t i = 0; i < head_dim / 2; i++)
        for (int n = 0; n < V; n++) {
            const I32 q = load_nibbles(from + i * kStrip + n * kLanes);
            istore(to + 2 * (i * kStrip + n * kLanes), shifted_to_bf16(iadd(q, shifts[n])));
        }
}
KVIK_INLINE void widen_values(bf16* to, const Int4s* from, const uint16_t* words, int64_t head_dim) {
    for (int t = 0; t < kStrip; t += 2) {
        const I32 shifts = ibroadcast((16 - int4_zero(words[t])) | (16 - int4_zero(words[t + 1])) << 16);
        for (int64_t d = 0; d < head_dim; d += 16)
            for (int first = 0; first < 16; first += kLanes) {
                const I32 q = load_paired_nibbles(from + value_byte(t, d, head_dim), first);
                istore(to + value_place<2>(t, d + first, head_dim), shifted_to_bf16(iadd(q, shifts)));
            }
    }
}

#endif

template <class Stored>
KVIK_INLINE void widen_values(bf16* to, const Stored* from, const uint16_t* words, int64_t head_dim) {
    widen_keys(to, from, words, head_dim);
}

// Scales of a strip's tokens, times `by`.
template <class Stored>
KVIK_INLINE void read_scales(float* to, const uint16_t* words, F32 by) {
    alignas(64) float scales[kStrip];
    for (int t = 0; t < kStrip; t++) scales[t] = kNumbers<Stored> == 2 ? int4_scale(words[t]) : to_float(words[t]);
    for (int n = 0; n < kStrip; n += kLanes) store(to + n, mul(load(scales + n), by));
}

}  // namespace cache
}  // namespace
}  // namespace kvik

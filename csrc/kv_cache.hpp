// Store keys and values in the paged cache, and load them.
#pragma once

#include "arguments.hpp"
#include "kv_layout.hpp"
#include "kv_numbers.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {
namespace cache {

constexpr int kMaxHeadDim = 576;

// One head of one token, in fp32.
inline void read_head(float* to, const void* from, int64_t index, int64_t head_dim, int64_t dtype) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        if (dtype == kF32)
            store(to + d, load(static_cast<const float*>(from) + index + d));
        else
            store(to + d, load(static_cast<const bf16*>(from) + index + d));
    }
}
inline void write_head(void* to, int64_t index, const float* from, int64_t head_dim, int64_t dtype) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        if (dtype == kF32)
            store(static_cast<float*>(to) + index + d, load(from + d));
        else
            store(static_cast<bf16*>(to) + index + d, load(from + d));
    }
}

// Writes one head of one token, encoded, into a strip at place t.
template <class Stored>
void write_key(Stored* strip, int64_t t, const Stored* stored, int64_t head_dim) {
    constexpr int P = kPair<Stored>;
    for (int64_t d = 0; d < head_dim; d += P) std::memcpy(strip + key_place<P>(t, d), stored + d, P * sizeof(Stored));
}
template <class Stored>
void write_value(Stored* strip, int64_t t, const Stored* stored, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d++) strip[value_place<kPair<Stored>>(t, d, head_dim)] = stored[d];
}
// The values of two consecutive tokens, the first at an even place: they share words.
inline void write_values(bf16* strip, int64_t t, const bf16* even, const bf16* odd, int64_t head_dim) {
    bf16* to = strip + value_place<2>(t, 0, head_dim);
    for (int64_t d = 0; d < head_dim; d++) {
        const uint32_t word = even[d] | uint32_t(odd[d]) << 16;
        std::memcpy(to + 2 * d, &word, sizeof(word));
    }
}

// Writes one head of one token into a strip, at place t: stored numbers, or bytes of them. Scaled
// types also have a scale word.
template <class Stored>
void put_key(Stored* strip, int64_t t, const float* from, int64_t head_dim, uint16_t* word) {
    alignas(64) Stored stored[kMaxHeadDim];
    encode(stored, from, head_dim, word);
    write_key(strip, t, stored, head_dim);
}
template <class Stored>
void put_value(Stored* strip, int64_t t, const float* from, int64_t head_dim, uint16_t* word) {
    alignas(64) Stored stored[kMaxHeadDim];
    encode(stored, from, head_dim, word);
    write_value(strip, t, stored, head_dim);
}
inline void put_key(Int4s* strip, int64_t t, const float* from, int64_t head_dim, uint16_t* word) {
    alignas(64) uint8_t stored[kMaxHeadDim];
    encode_int4(stored, from, head_dim, word);
    for (int64_t d = 0; d < head_dim; d += 2)
        strip[key_byte(t, d)].bits = uint8_t(stored[d] | stored[d + 1] << 4);
}
inline void put_value(Int4s* strip, int64_t t, const float* from, int64_t head_dim, uint16_t* word) {
    alignas(64) uint8_t stored[kMaxHeadDim];
    encode_int4(stored, from, head_dim, word);
    for (int64_t first = 0; first < head_dim; first += 16)
        for (int64_t d = first; d < first + 8; d++)
            strip[value_byte(t, d, head_dim)].bits = uint8_t(stored[d] | stored[d + 8] << 4);
}

// And back: column d.
template <class Stored>
float key_at(const Stored* strip, int64_t t, int64_t d, uint16_t word) {
    return decode(strip[key_place<kPair<Stored>>(t, d)], word);
}
template <class Stored>
float value_at(const Stored* strip, int64_t t, int64_t d, int64_t head_dim, uint16_t word) {
    return decode(strip[value_place<kPair<Stored>>(t, d, head_dim)], word);
}
inline float key_at(const Int4s* strip, int64_t t, int64_t d, uint16_t word) {
    return decode_int4(strip[key_byte(t, d)].bits >> 4 * (d % 2) & 15, word);
}
inline float value_at(const Int4s* strip, int64_t t, int64_t d, int64_t head_dim, uint16_t word) {
    return decode_int4(strip[value_byte(t, d, head_dim)].bits >> d % 16 / 8 * 4 & 15, word);
}

// Calls body(row, head, strip, scale place, token of the strip) for all heads. Rows without a place
// (negative slots) are left out.
template <class Args, class Body>
void each_head(const Args& a, Team& team, const Body& body) {
    const KvLayout layout{a.kv_heads, a.head_dim, a.block_size};
    const auto* slots = static_cast<const int64_t*>(a.slot_mapping);
    // Even a few heads are divided between threads: the first write to a page waits until the system allocates it.
    each_range(team, a.rows * a.kv_heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t row = item / a.kv_heads, head = item % a.kv_heads;
            if (slots[row] < 0) continue;
            const int64_t block = slots[row] / a.block_size, offset = slots[row] % a.block_size;
            body(row, head, layout.strip(block, head, offset), layout.token(block, head, offset), offset % kStrip);
        }
    });
}

// Numbers that are stored as they come.
void store_bf16(const store_kv_args& a, Team& team) {
    const auto* slots = static_cast<const int64_t*>(a.slot_mapping);
    each_head(a, team, [&](int64_t row, int64_t head, int64_t strip, int64_t, int64_t t) {
        const bf16* k = static_cast<const bf16*>(a.k) + row * a.k_stride + head * a.head_dim;
        const bf16* v = static_cast<const bf16*>(a.v) + row * a.v_stride + head * a.head_dim;
        bf16* values = static_cast<bf16*>(a.v_cache) + strip;
        write_key(static_cast<bf16*>(a.k_cache) + strip, t, k, a.head_dim);
        if (t % 2 == 0 && row + 1 < a.rows && slots[row + 1] == slots[row] + 1)
            write_values(values, t, v, v + a.v_stride, a.head_dim);
        else if (t % 2 == 0 || row == 0 || slots[row - 1] != slots[row] - 1)
            write_value(values, t, v, a.head_dim);
    });
}

template <class Stored>
void store_as(const store_kv_args& a, Team& team) {
    if (std::is_same_v<Stored, bf16> && a.dtype == kBF16 && a.value_dim == a.head_dim) return store_bf16(a, team);
    each_head(a, team, [&](int64_t row, int64_t head, int64_t strip, int64_t place, int64_t t) {
        alignas(64) float floats[kMaxHeadDim];
        uint16_t none;
        uint16_t* key_word = kScaled<Stored> ? static_cast<uint16_t*>(a.k_scales) + place : &none;
        uint16_t* value_word = kScaled<Stored> ? static_cast<uint16_t*>(a.v_scales) + place : &none;
        strip /= kNumbers<Stored>;
        read_head(floats, a.k, row * a.k_stride + head * a.head_dim, a.head_dim, a.dtype);
        put_key(static_cast<Stored*>(a.k_cache) + strip, t, floats, a.head_dim, key_word);
        read_head(floats, a.v, row * a.v_stride + head * a.value_dim, a.value_dim, a.dtype);
        for (int64_t d = a.value_dim; d < a.head_dim; d += kLanes) store(floats + d, zero());
        put_value(static_cast<Stored*>(a.v_cache) + strip, t, floats, a.head_dim, value_word);
    });
}

template <class Stored>
void store_latent_as(const store_latent_args& a, Team& team) {
    store_kv_args keys{};
    keys.slot_mapping = a.slot_mapping;
    keys.rows = a.rows;
    keys.kv_heads = 1;
    keys.head_dim = a.head_dim;
    keys.block_size = a.block_size;
    each_head(keys, team, [&](int64_t row, int64_t, int64_t strip, int64_t place, int64_t t) {
        alignas(64) float floats[kMaxHeadDim];
        uint16_t none;
        uint16_t* word = kScaled<Stored> ? static_cast<uint16_t*>(a.scales) + place : &none;
        read_head(floats, a.latent, row * a.latent_stride, a.latent_dim, a.dtype);
        read_head(floats + a.latent_dim, a.rope, row * a.rope_stride, a.head_dim - a.latent_dim, a.dtype);
        put_key(static_cast<Stored*>(a.cache) + strip, t, floats, a.head_dim, word);
    });
}

template <class Stored>
void load_as(const load_kv_args& a, Team& team) {
    each_head(a, team, [&](int64_t row, int64_t head, int64_t strip, int64_t place, int64_t t) {
        alignas(64) float floats[kMaxHeadDim];
        const uint16_t key_word = kScaled<Stored> ? static_cast<const uint16_t*>(a.k_scales)[place] : 0;
        strip /= kNumbers<Stored>;
        const auto* keys = static_cast<const Stored*>(a.k_cache) + strip;
        for (int64_t d = 0; d < a.head_dim; d++) floats[d] = key_at(keys, t, d, key_word);
        write_head(a.k, row * a.k_stride + head * a.head_dim, floats, a.head_dim, a.dtype);
        if (!a.v_cache) return;
        const uint16_t value_word = kScaled<Stored> ? static_cast<const uint16_t*>(a.v_scales)[place] : 0;
        const auto* values = static_cast<const Stored*>(a.v_cache) + strip;
        for (int64_t d = 0; d < a.head_dim; d++) floats[d] = value_at(values, t, d, a.head_dim, value_word);
        write_head(a.v, row * a.v_stride + head * a.head_dim, floats, a.head_dim, a.dtype);
    });
}

}  // namespace cache

void store_kv(const store_kv_args& a, Team& team) {
    cache::with_stored(a.kv_dtype, [&](auto stored) { cache::store_as<decltype(stored)>(a, team); });
}

// Not for caches of four bits.
void store_latent(const store_latent_args& a, Team& team) {
    cache::with_stored(a.kv_dtype, [&](auto stored) { cache::store_latent_as<decltype(stored)>(a, team); });
}

void keep_queries(const keep_queries_args& a, Team& team) {
    const auto* starts = static_cast<const int32_t*>(a.starts);
    const F32 scale = broadcast(float(a.scale));
    each_range(team, a.num_seqs, 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; s++) {
            const int64_t count = starts[s + 1] - starts[s], row = static_cast<const int32_t*>(a.state_rows)[s];
            const int64_t cached = static_cast<const int32_t*>(a.lengths)[s] - count;
            for (int64_t i = count > a.last ? count - a.last : 0; i < count; i++) {
                float* to = static_cast<float*>(a.ring) + (row * a.last + (cached + i) % a.last) * a.dim;
                cache::read_head(to, a.q, (starts[s] + i) * a.q_stride, a.dim, a.dtype);
                for (int64_t d = 0; d < a.dim; d += kLanes) store(to + d, mul(load(to + d), scale));
            }
        }
    });
}

void load_kv(const load_kv_args& a, Team& team) {
    cache::with_stored(a.kv_dtype, [&](auto stored) { cache::load_as<decltype(stored)>(a, team); });
}

}  // namespace
}  // namespace kvik

// Move keys and values from one place of the paged cache to another, as they are stored.
#pragma once

#include "arguments.hpp"
#include "kv_layout.hpp"
#include "kv_numbers.hpp"
#include "share.hpp"
#include "team.hpp"

namespace kvik {
namespace {
namespace cache {

// One head of one token, from place `t` of a strip to place `to_t` of another.
template <class Stored>
void copy_key(Stored* to, int64_t to_t, const Stored* from, int64_t t, int64_t head_dim) {
    constexpr int P = kPair<Stored>;
    for (int64_t d = 0; d < head_dim; d += P)
        std::memcpy(to + key_place<P>(to_t, d), from + key_place<P>(t, d), P * sizeof(Stored));
}
template <class Stored>
void copy_value(Stored* to, int64_t to_t, const Stored* from, int64_t t, int64_t head_dim) {
    constexpr int P = kPair<Stored>;
    for (int64_t d = 0; d < head_dim; d++) to[value_place<P>(to_t, d, head_dim)] = from[value_place<P>(t, d, head_dim)];
}
inline void copy_key(Int4s* to, int64_t to_t, const Int4s* from, int64_t t, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d += 2) to[key_byte(to_t, d)] = from[key_byte(t, d)];
}
inline void copy_value(Int4s* to, int64_t to_t, const Int4s* from, int64_t t, int64_t head_dim) {
    for (int64_t first = 0; first < head_dim; first += 16)
        for (int64_t d = first; d < first + 8; d++) to[value_byte(to_t, d, head_dim)] = from[value_byte(t, d, head_dim)];
}

constexpr int64_t kMovedPerThread = 4096;  // numbers

// Threads share the heads; the tokens of a head are moved in their order.
template <class Stored>
void move_as(const move_kv_args& a, Team& team) {
    const KvLayout layout{a.kv_heads, a.head_dim, a.block_size};
    const auto* source = static_cast<const int64_t*>(a.source);
    const auto* target = static_cast<const int64_t*>(a.target);
    auto* keys = static_cast<Stored*>(a.k_cache);
    auto* values = static_cast<Stored*>(a.v_cache);
    auto* key_words = static_cast<uint16_t*>(a.k_scales);
    auto* value_words = static_cast<uint16_t*>(a.v_scales);
    const int64_t moved = a.rows * a.head_dim;  // numbers of a head
    each_range(team, a.kv_heads, kMovedPerThread / (moved > 0 ? moved : 1), [&](int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; head++)
        for (int64_t row = 0; row < a.rows; row++) {
            const int64_t from = source[row] / a.block_size, t = source[row] % a.block_size;
            const int64_t to = target[row] / a.block_size, to_t = target[row] % a.block_size;
            const int64_t from_strip = layout.strip(from, head, t) / kNumbers<Stored>;
            const int64_t to_strip = layout.strip(to, head, to_t) / kNumbers<Stored>;
            copy_key(keys + to_strip, to_t % kStrip, keys + from_strip, t % kStrip, a.head_dim);
            if constexpr (kScaled<Stored>)
                key_words[layout.token(to, head, to_t)] = key_words[layout.token(from, head, t)];
            if (!a.v_cache) continue;
            copy_value(values + to_strip, to_t % kStrip, values + from_strip, t % kStrip, a.head_dim);
            if constexpr (kScaled<Stored>)
                value_words[layout.token(to, head, to_t)] = value_words[layout.token(from, head, t)];
        }
    });
}

}  // namespace cache

void move_kv(const move_kv_args& a, Team& team) {
    cache::with_stored(a.kv_dtype, [&](auto stored) { cache::move_as<decltype(stored)>(a, team); });
}

}  // namespace
}  // namespace kvik

// Keys and values into the paged cache, and back.
#pragma once

#include "arguments.hpp"
#include "kv_layout.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {
namespace cache {

constexpr int kMaxHeadDim = 256;

template <class Stored>
constexpr int kPair = sizeof(Stored) == 4 ? 1 : 2;

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

// To the stored type, in place of the scale if it has one.
inline void encode(float* to, const float* from, int64_t head_dim, float*) {
    std::memcpy(to, from, size_t(head_dim) * sizeof(float));
}
inline void encode(bf16* to, const float* from, int64_t head_dim, float*) {
    for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, load(from + d));
}
inline void encode(int8_t* to, const float* from, int64_t head_dim, float* scale) {
    float most = 0.0f;
    for (int64_t d = 0; d < head_dim; d++) {
        const float size = std::fabs(from[d]);
        if (!(size <= most)) most = size;
        if (most != most) break;  // NaN has no place in int8: the scale carries it
    }
    // Below this the scale would be denormal; such a head is zero beside any other.
    const bool usable = most >= 1e-30f && most <= 3e38f;
    *scale = usable ? most / 127.0f : most < 1e-30f ? 0.0f : most;
    const F32 inverse = all(usable ? 127.0f / most : 0.0f);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        if (usable)
            store_i8(to + d, to_int(mul(load(from + d), inverse)));
        else
            store_i8(to + d, izero());
    }
}

inline float decode(float value, float) { return value; }
inline float decode(bf16 value, float) { return to_float(value); }
inline float decode(int8_t value, float scale) { return float(value) * scale; }

// Calls body(row, head, strip, scale place, token of the strip) for this thread's share. Rows without
// a place (negative slots) are left out.
template <class Args, class Body>
void each_head(const Args& a, const Team& team, const Body& body) {
    const KvLayout layout{a.kv_heads, a.head_dim, a.block_size};
    const auto* slots = static_cast<const int64_t*>(a.slot_mapping);
    const int64_t items = a.rows * a.kv_heads;
    const int64_t end = items * (team.rank + 1) / team.size;
    for (int64_t item = items * team.rank / team.size; item < end; item++) {
        const int64_t row = item / a.kv_heads, head = item % a.kv_heads;
        if (slots[row] < 0) continue;
        const int64_t block = slots[row] / a.block_size, offset = slots[row] % a.block_size;
        body(row, head, layout.strip(block, head, offset), layout.token(block, head, offset), offset % kStrip);
    }
}

template <class Stored>
void store_as(const store_kv_args& a, Team& team) {
    constexpr int P = kPair<Stored>;
    const bool scaled = sizeof(Stored) == 1;
    each_head(a, team, [&](int64_t row, int64_t head, int64_t strip, int64_t place, int64_t t) {
        alignas(64) float floats[kMaxHeadDim];
        alignas(64) Stored stored[kMaxHeadDim];
        auto* keys = static_cast<Stored*>(a.k_cache) + strip;
        read_head(floats, a.k, row * a.k_stride + head * a.head_dim, a.head_dim, a.dtype);
        encode(stored, floats, a.head_dim, scaled ? static_cast<float*>(a.k_scales) + place : nullptr);
        for (int64_t d = 0; d < a.head_dim; d += P)
            std::memcpy(keys + key_place<P>(t, d), stored + d, P * sizeof(Stored));
        auto* values = static_cast<Stored*>(a.v_cache) + strip;
        read_head(floats, a.v, row * a.v_stride + head * a.head_dim, a.head_dim, a.dtype);
        encode(stored, floats, a.head_dim, scaled ? static_cast<float*>(a.v_scales) + place : nullptr);
        for (int64_t d = 0; d < a.head_dim; d++) values[value_place<P>(t, d, a.head_dim)] = stored[d];
    });
}

template <class Stored>
void load_as(const load_kv_args& a, Team& team) {
    constexpr int P = kPair<Stored>;
    const bool scaled = sizeof(Stored) == 1;
    each_head(a, team, [&](int64_t row, int64_t head, int64_t strip, int64_t place, int64_t t) {
        alignas(64) float floats[kMaxHeadDim];
        const auto* keys = static_cast<const Stored*>(a.k_cache) + strip;
        const float key_scale = scaled ? static_cast<const float*>(a.k_scales)[place] : 1.0f;
        for (int64_t d = 0; d < a.head_dim; d++) floats[d] = decode(keys[key_place<P>(t, d)], key_scale);
        write_head(a.k, row * a.k_stride + head * a.head_dim, floats, a.head_dim, a.dtype);
        const auto* values = static_cast<const Stored*>(a.v_cache) + strip;
        const float value_scale = scaled ? static_cast<const float*>(a.v_scales)[place] : 1.0f;
        for (int64_t d = 0; d < a.head_dim; d++)
            floats[d] = decode(values[value_place<P>(t, d, a.head_dim)], value_scale);
        write_head(a.v, row * a.v_stride + head * a.head_dim, floats, a.head_dim, a.dtype);
    });
}

}  // namespace cache

void store_kv(const store_kv_args& a, Team& team) {
    if (a.kv_dtype == kF32) cache::store_as<float>(a, team);
    if (a.kv_dtype == kBF16) cache::store_as<bf16>(a, team);
    if (a.kv_dtype == kI8) cache::store_as<int8_t>(a, team);
}

void load_kv(const load_kv_args& a, Team& team) {
    if (a.kv_dtype == kF32) cache::load_as<float>(a, team);
    if (a.kv_dtype == kBF16) cache::load_as<bf16>(a, team);
    if (a.kv_dtype == kI8) cache::load_as<int8_t>(a, team);
}

}  // namespace
}  // namespace kvik

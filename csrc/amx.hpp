// The AMX tile instructions that products use: 8 registers of up to 16 rows of up to 64 bytes.
//
// Inline assembly, because GCC 12's intrinsics do not declare that they read memory.
#pragma once

#include "simd.hpp"

namespace kvik {
namespace {

// What `ldtilecfg` reads.
struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

#if defined(__AMX_TILE__)

// Sets the shapes of the registers and clears them.
KVIK_INLINE void tile_config(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
KVIK_INLINE void tile_release() { asm volatile("tilerelease"); }

template <int kRegister>
KVIK_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kRegister));
}
// Rows `stride` bytes apart.
template <int kRegister>
KVIK_INLINE void tile_load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
KVIK_INLINE void tile_store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kRegister) : "memory");
}
// sums [m][n] += x [m][k] * w [k][n], where an element of x and w is a pair of bf16.
template <int kSums, int kX, int kW>
KVIK_INLINE void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kW));
}
// The same with four bytes to an element, signed in x and unsigned in w. Exact.
template <int kSums, int kX, int kW>
KVIK_INLINE void tile_dot_i8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kW));
}

#endif

}  // namespace
}  // namespace kvik

#if !defined(__AMX_TILE__)
#include "amx_emulation.hpp"
#endif

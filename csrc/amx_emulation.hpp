// The instructions of amx.hpp in plain C++, for tests on machines without them. Operation by operation as
// Intel's manual describes them, faults included, and only to be right.
#pragma once

#include "amx.hpp"
#include "simd.hpp"

namespace kvik {
namespace {

struct EmulatedTile {
    union {
        uint8_t bytes[16][64];
        int8_t signs[16][64];
        bf16 halves[16][32];
        float floats[16][16];
        int32_t words[16][16];
    };
};

struct EmulatedTiles {
    TileConfig config;
    EmulatedTile registers[8];
};

thread_local EmulatedTiles emulated_tiles;  // all zero: no register has a shape

KVIK_INLINE void fault_unless(bool fine) {
    if (!fine) __builtin_trap();
}

KVIK_INLINE int emulated_rows(int tile) { return emulated_tiles.config.rows[tile]; }
KVIK_INLINE int emulated_row_bytes(int tile) { return emulated_tiles.config.row_bytes[tile]; }

KVIK_INLINE EmulatedTile& emulated_tile(int tile) {
    fault_unless(emulated_tiles.config.palette == 1 && emulated_rows(tile) > 0);
    return emulated_tiles.registers[tile];
}

void tile_config(const TileConfig& config) {
    fault_unless(config.palette == 1 && config.start_row == 0);
    for (uint8_t byte : config.reserved) fault_unless(byte == 0);
    for (int tile = 0; tile < 16; tile++) {
        const int rows = config.rows[tile], row_bytes = config.row_bytes[tile];
        fault_unless(tile < 8 ? rows <= 16 && row_bytes <= 64 : rows + row_bytes == 0);
        fault_unless((rows == 0) == (row_bytes == 0));
    }
    emulated_tiles = {};
    emulated_tiles.config = config;
}

void tile_release() { emulated_tiles = {}; }

template <int kRegister>
void tile_zero() {
    emulated_tile(kRegister) = {};
}

template <int kRegister>
void tile_load(const void* p, int64_t stride) {
    EmulatedTile& tile = emulated_tile(kRegister) = {};
    for (int row = 0; row < emulated_rows(kRegister); row++)
        std::memcpy(tile.bytes[row], (const char*)p + row * stride, size_t(emulated_row_bytes(kRegister)));
}

template <int kRegister>
void tile_store(void* p, int64_t stride) {
    const EmulatedTile& tile = emulated_tile(kRegister);
    for (int row = 0; row < emulated_rows(kRegister); row++)
        std::memcpy((char*)p + row * stride, tile.bytes[row], size_t(emulated_row_bytes(kRegister)));
}

KVIK_INLINE void fault_unless_shapes_fit(int sums, int x, int w) {
    fault_unless(sums != x && sums != w && x != w);
    fault_unless(emulated_row_bytes(sums) % 4 == 0 && emulated_row_bytes(x) % 4 == 0);
    fault_unless(emulated_rows(sums) == emulated_rows(x));
    fault_unless(emulated_row_bytes(sums) == emulated_row_bytes(w));
    fault_unless(emulated_row_bytes(x) == 4 * emulated_rows(w));
}

// Denormal numbers are zero, before an operation and after it.
KVIK_INLINE float flushed(float value) {
    return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}
KVIK_INLINE float flushed_fma(bf16 a, bf16 b, float sum) {
    return flushed(__builtin_fmaf(flushed(to_float(a)), flushed(to_float(b)), sum));
}
KVIK_INLINE float flushed_add(float a, float b) { return flushed(flushed(a) + flushed(b)); }

template <int kSums, int kX, int kW>
void tile_dot_bf16() {
    EmulatedTile& sums = emulated_tile(kSums);
    const EmulatedTile &x = emulated_tile(kX), &w = emulated_tile(kW);
    fault_unless_shapes_fit(kSums, kX, kW);
    for (int m = 0; m < emulated_rows(kSums); m++) {
        float even[16] = {}, odd[16] = {};
        for (int k = 0; k < emulated_rows(kW); k++) {
            for (int n = 0; n < emulated_row_bytes(kSums) / 4; n++) {
                even[n] = flushed_fma(x.halves[m][2 * k], w.halves[k][2 * n], even[n]);
                odd[n] = flushed_fma(x.halves[m][2 * k + 1], w.halves[k][2 * n + 1], odd[n]);
            }
        }
        for (int n = 0; n < emulated_row_bytes(kSums) / 4; n++)
            sums.floats[m][n] = flushed_add(sums.floats[m][n], flushed_add(even[n], odd[n]));
    }
}

template <int kSums, int kX, int kW>
void tile_dot_i8() {
    EmulatedTile& sums = emulated_tile(kSums);
    const EmulatedTile &x = emulated_tile(kX), &w = emulated_tile(kW);
    fault_unless_shapes_fit(kSums, kX, kW);
    for (int m = 0; m < emulated_rows(kSums); m++)
        for (int k = 0; k < emulated_rows(kW); k++)
            for (int n = 0; n < emulated_row_bytes(kSums) / 4; n++)
                for (int i = 0; i < 4; i++)
                    sums.words[m][n] += int32_t(x.signs[m][4 * k + i]) * int32_t(w.bytes[k][4 * n + i]);
}

}  // namespace
}  // namespace kvik

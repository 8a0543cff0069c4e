// The instructions of amx.hpp in plain C++, for tests on machines without them. They follow Intel's manual
// operation by operation, faults included, and are not optimised.
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

// A register and its shape. Looked up once for each instruction: access to a thread-local variable takes a
// call, which is slow under a sanitizer.
struct EmulatedRegister {
    EmulatedTile& tile;
    int rows, row_bytes;
};

EmulatedRegister emulated_register(int tile) {
    EmulatedTiles& tiles = emulated_tiles;
    fault_unless(tiles.config.palette == 1 && tiles.config.rows[tile] > 0);
    return {tiles.registers[tile], tiles.config.rows[tile], tiles.config.row_bytes[tile]};
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
    emulated_register(kRegister).tile = {};
}

template <int kRegister>
void tile_load(const void* p, int64_t stride) {
    const EmulatedRegister to = emulated_register(kRegister);
    to.tile = {};
    for (int row = 0; row < to.rows; row++)
        std::memcpy(to.tile.bytes[row], (const char*)p + row * stride, size_t(to.row_bytes));
}

template <int kRegister>
void tile_store(void* p, int64_t stride) {
    const EmulatedRegister from = emulated_register(kRegister);
    for (int row = 0; row < from.rows; row++)
        std::memcpy((char*)p + row * stride, from.tile.bytes[row], size_t(from.row_bytes));
}

// sums [rows][columns] += x [rows][steps] * w [steps][columns]
struct EmulatedProduct {
    EmulatedTile& sums;
    const EmulatedTile &x, &w;
    int rows, steps, columns;
};

EmulatedProduct emulated_product(int sums_tile, int x_tile, int w_tile) {
    fault_unless(sums_tile != x_tile && sums_tile != w_tile && x_tile != w_tile);
    const EmulatedRegister sums = emulated_register(sums_tile);
    const EmulatedRegister x = emulated_register(x_tile), w = emulated_register(w_tile);
    fault_unless(sums.row_bytes % 4 == 0 && x.row_bytes % 4 == 0);
    fault_unless(sums.rows == x.rows && sums.row_bytes == w.row_bytes && x.row_bytes == 4 * w.rows);
    return {sums.tile, x.tile, w.tile, sums.rows, w.rows, sums.row_bytes / 4};
}

// Denormals become zero, in operands and results.
KVIK_INLINE float flushed(float value) {
    return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}
KVIK_INLINE float flushed_fma(bf16 a, bf16 b, float sum) {
    return flushed(__builtin_fmaf(flushed(to_float(a)), flushed(to_float(b)), sum));
}
KVIK_INLINE float flushed_add(float a, float b) { return flushed(flushed(a) + flushed(b)); }

template <int kSums, int kX, int kW>
void tile_dot_bf16() {
    const EmulatedProduct p = emulated_product(kSums, kX, kW);
    for (int m = 0; m < p.rows; m++) {
        float even[16] = {}, odd[16] = {};
        for (int k = 0; k < p.steps; k++) {
            for (int n = 0; n < p.columns; n++) {
                even[n] = flushed_fma(p.x.halves[m][2 * k], p.w.halves[k][2 * n], even[n]);
                odd[n] = flushed_fma(p.x.halves[m][2 * k + 1], p.w.halves[k][2 * n + 1], odd[n]);
            }
        }
        for (int n = 0; n < p.columns; n++)
            p.sums.floats[m][n] = flushed_add(p.sums.floats[m][n], flushed_add(even[n], odd[n]));
    }
}

template <int kSums, int kX, int kW>
void tile_dot_i8() {
    const EmulatedProduct p = emulated_product(kSums, kX, kW);
    for (int m = 0; m < p.rows; m++)
        for (int k = 0; k < p.steps; k++)
            for (int n = 0; n < p.columns; n++)
                for (int i = 0; i < 4; i++)
                    p.sums.words[m][n] += int32_t(p.x.signs[m][4 * k + i]) * int32_t(p.w.bytes[k][4 * n + i]);
}

}  // namespace
}  // namespace kvik

// Pack matrices into the layout of packed.hpp, and read rows back from it.
#pragma once

#include "arguments.hpp"
#include "fp8.hpp"
#include "half.hpp"
#include "nibble_tables.hpp"
#include "pack_scales.hpp"
#include "packed.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

// Copying a number of bytes known at compile time is one instruction; otherwise it is a call.
KVIK_INLINE uint32_t load_bytes(const char* from, int64_t left) {
    uint32_t word = 0;
    if (left >= 4)
        std::memcpy(&word, from, 4);
    else
        std::memcpy(&word, from, size_t(left));
    return word;
}

// The four bytes of one output and one step. row: null for outputs that pad a tile.
KVIK_INLINE uint32_t word_f32(const char* row, int64_t step, int64_t) {
    return row ? load_bytes(row + 4 * step, 4) : 0;
}

KVIK_INLINE uint32_t word_f32_of_bf16(const char* row, int64_t step, int64_t) {
    return row ? uint32_t(((const bf16*)row)[step]) << 16 : 0;
}

KVIK_INLINE uint32_t word_bf16(const char* row, int64_t step, int64_t inputs) {
    return row ? load_bytes(row + 4 * step, 2 * inputs - 4 * step) : 0;
}

KVIK_INLINE uint32_t word_bf16_of_f32(const char* row, int64_t step, int64_t inputs) {
    if (!row) return 0;
    const float* pair = (const float*)row + 2 * step;
    const uint32_t high = 2 * step + 1 < inputs ? to_bf16(pair[1]) : 0;
    return uint32_t(to_bf16(pair[0])) | high << 16;
}

KVIK_INLINE uint32_t word_i8(const char* row, int64_t step, int64_t inputs) {
    return (row ? load_bytes(row + 4 * step, inputs - 4 * step) : 0) ^ 0x80808080u;
}

KVIK_INLINE uint32_t word_i4(const char* row, int64_t step, int64_t inputs) {
    const int64_t left = inputs - 8 * step;
    uint32_t halves = row ? load_bytes(row + 4 * step, (left + 1) / 2) : 0;  // input i in bits 4 i .. 4 i + 3
    if (left < 8) halves &= (1u << (4 * left)) - 1;
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) {
        word |= (halves >> (4 * i) & 15) << (8 * i);
        word |= (halves >> (4 * i + 16) & 15) << (8 * i + 4);
    }
    return word;
}

KVIK_INLINE uint32_t word_fp8(const char* row, int64_t step, int64_t inputs) {
    const uint32_t word = row ? load_bytes(row + 4 * step, inputs - 4 * step) : 0;
    return (word & 0xff0000ffu) | (word & 0xff00u) << 8 | (word >> 8 & 0xff00u);
}

// rows: the 32 rows of a tile; the ones with `skip` are left as they are.
template <uint32_t (*kWord)(const char*, int64_t, int64_t)>
void pack_tile(const char* const* rows, const bool* skip, int64_t inputs, int64_t steps, char* tile) {
    // This many steps keep the output in the L1 cache while all rows are packed.
    constexpr int64_t kBlock = 64;
    for (int64_t first = 0; first < steps; first += kBlock) {
        const int64_t last = first + kBlock < steps ? first + kBlock : steps;
        for (int lane = 0; lane < kTile; lane++) {
            if (skip[lane]) continue;
            for (int64_t step = first; step < last; step++) {
                const uint32_t word = kWord(rows[lane], step, inputs);
                std::memcpy(tile + step * kStepBytes + lane * 4, &word, 4);
            }
        }
    }
}

// The tiles of the outputs [first, first + count), for threads to share.
Range tiles_of(int64_t first, int64_t count, int64_t outputs, bool paired) {
    if (!paired) return {first / kTile, divide_up(first + count, kTile)};
    const int64_t inner = outputs / 2;
    if (first < inner && first + count > inner) return {0, count_tiles(outputs, paired)};
    const int64_t column = first < inner ? first : first - inner;
    return {column / kHalfTile, divide_up(column + count, kHalfTile)};
}

void pack_matrix(const pack_matrix_args& a, Team& team) {
    const Range tiles = tiles_of(a.first, a.count, a.outputs, a.paired);
    const int64_t width = tiles.end - tiles.begin;
    const int64_t steps = divide_up(a.inputs, inputs_per_step(a.kind));
    const bool from_bf16 = a.value_dtype == kBF16;
    const bool floats = a.kind == kMatrixF32 || a.kind == kMatrixBF16;
    const int64_t row_bytes = a.values_stride * (!floats ? 1 : from_bf16 ? 2 : 4);
    const auto pack_one = [&](int64_t t) {
        const char* rows[kTile];
        int64_t index[kTile];  // row of `values`, or -1
        bool skip[kTile], any = false;
        for (int lane = 0; lane < kTile; lane++) {
            const int64_t output = output_at(t, lane, a.outputs, a.paired);
            const bool given = output >= a.first && output < a.first + a.count;
            index[lane] = given ? output - a.first : -1;
            rows[lane] = given ? (const char*)a.values + index[lane] * row_bytes : nullptr;
            skip[lane] = output >= 0 && !given;
            any |= given;
        }
        if (!any) return;
        char* tile = (char*)a.weight + t * steps * kStepBytes;
        const auto pack = [&](auto* tile_of) { tile_of(rows, skip, a.inputs, steps, tile); };
        switch (a.kind) {
            case kMatrixF32: pack(from_bf16 ? pack_tile<word_f32_of_bf16> : pack_tile<word_f32>); break;
            case kMatrixBF16: pack(from_bf16 ? pack_tile<word_bf16> : pack_tile<word_bf16_of_f32>); break;
            case kMatrixFp8: pack(pack_tile<word_fp8>); break;
            default: pack(is_int4(a.kind) ? pack_tile<word_i4> : pack_tile<word_i8>); break;
        }
        if (floats) return;
        for (int lane = 0; lane < kTile; lane++)
            if (!skip[lane]) OutputScales{a, index[lane], rows[lane]}.pack(t, lane);
    };
    each_task(team, width, [&](int64_t task) { pack_one(tiles.begin + task); });
}

// An output from the four bytes of one step: value(i) is its input k + i, before scale and minimum.
struct F32Step {
    static constexpr int kInputs = 1;
    KVIK_INLINE float value(uint32_t word, int, int) { return float_of(word); }
};
struct BF16Step {
    static constexpr int kInputs = 2;
    KVIK_INLINE float value(uint32_t word, int i, int) { return to_float(bf16(word >> (16 * i))); }
};
struct I8Step {
    static constexpr int kInputs = 4;
    KVIK_INLINE float value(uint32_t word, int i, int) { return float(int(word >> (8 * i) & 255) - 128); }
};
struct I4Step {
    static constexpr int kInputs = 8;
    KVIK_INLINE float value(uint32_t word, int i, int zero) {
        return float(int(word >> (i % 4 * 8 + i / 4 * 4) & 15) - zero);
    }
};
template <const uint8_t* kTable, int kZero>
struct TableStep {
    static constexpr int kInputs = 8;
    KVIK_INLINE float value(uint32_t word, int i, int) {
        return float(kTable[word >> (i % 4 * 8 + i / 4 * 4) & 15] - kZero);
    }
};
struct Fp8Step {
    static constexpr int kInputs = 4;
    KVIK_INLINE float value(uint32_t word, int i, int) {
        return to_float(fp8_to_bf16(uint8_t(word >> (i % 2 * 16 + i / 2 * 8))));
    }
};

KVIK_INLINE void put(float* out, float value) { *out = value; }
KVIK_INLINE void put(bf16* out, float value) { *out = to_bf16(value); }

// The scale and zero of the values of one group of one output.
struct GroupMeaning {
    float scale, minimum;
    int zero;
};

GroupMeaning meaning_of(const matrix_rows_args& a, int64_t tile, int64_t lane, int64_t g) {
    GroupMeaning m = {1.0f, 0.0f, kSymmetricZero};
    if (!has_scales(a.kind)) return m;
    const int64_t groups = count_groups(a.inputs, a.group), at = g * kTile + lane;
    const char* scales = (const char*)a.scales + tile * tile_scale_bytes(a.kind, groups);
    const float factor = m.scale = ((const float*)scales)[lane];
    scales += kFactorBytes;
    if (groups && a.kind == kMatrixMxfp4)
        m.scale *= to_float(((const e8m0*)scales)[at]);
    else if (groups)
        m.scale *= a.kind == kMatrixFp8 ? ((const float*)scales)[at] : to_float(((const f16*)scales)[at]);
    if (!a.zeros) return m;
    const char* zeros = (const char*)a.zeros + tile * groups * group_zero_bytes(a.kind);
    m.zero = a.kind == kMatrixI4Min ? 0 : ((const uint8_t*)zeros)[at];
    if (a.kind == kMatrixI4Min) m.minimum = to_float(((const f16*)zeros)[at]) * factor;
    return m;
}

template <class Step, class Out>
void unpack_row(const matrix_rows_args& a, int64_t id, Out* out) {
    constexpr int kInputs = Step::kInputs;
    const int64_t tile = id / kTile, lane = id % kTile, steps = divide_up(a.inputs, kInputs);
    const char* words = (const char*)a.weight + tile * steps * kStepBytes + lane * 4;
    const int64_t group = a.group ? a.group : a.inputs;  // a step is in one group
    const int32_t* order = (const int32_t*)a.order;
    for (int64_t k = 0, g = 0; k < a.inputs; g++) {
        const GroupMeaning m = meaning_of(a, tile, lane, g);
        const int64_t end = k + group < a.inputs ? k + group : a.inputs;
        for (; k < end; k += kInputs, words += kStepBytes) {
            const uint32_t word = uint32_t(load_word(words));
            const int valid = int(end - k < kInputs ? end - k : kInputs);
            for (int i = 0; i < valid; i++) {
                float value = Step::value(word, i, m.zero);
                if (has_scales(a.kind)) value *= m.scale;
                if (a.kind == kMatrixI4Min) value -= m.minimum;
                put(out + (order ? order[k + i] : k + i), value);
            }
        }
    }
}

template <class Out>
void matrix_rows_of(const matrix_rows_args& a, Team& team) {
    each_task(team, a.rows, [&](int64_t row) {
        const int64_t id = ((const int64_t*)a.ids)[row] - a.first;
        if (id < 0 || id >= a.outputs) return;
        Out* out = (Out*)a.out + row * a.out_stride;
        switch (a.kind) {
            case kMatrixF32: unpack_row<F32Step>(a, id, out); break;
            case kMatrixBF16: unpack_row<BF16Step>(a, id, out); break;
            case kMatrixI4:
            case kMatrixI4Min: unpack_row<I4Step>(a, id, out); break;
            case kMatrixMxfp4:
            case kMatrixFp4: unpack_row<TableStep<kE2M1, kE2M1Zero>>(a, id, out); break;
            case kMatrixIq4: unpack_row<TableStep<kIq4, kIq4Zero>>(a, id, out); break;
            case kMatrixNf4: unpack_row<TableStep<kNf4, kNf4Zero>>(a, id, out); break;
            case kMatrixBnbFp4: unpack_row<TableStep<kBnbFp4, kBnbFp4Zero>>(a, id, out); break;
            case kMatrixFp8: unpack_row<Fp8Step>(a, id, out); break;
            default: unpack_row<I8Step>(a, id, out); break;
        }
    });
}

void matrix_rows(const matrix_rows_args& a, Team& team) {
    a.dtype == kBF16 ? matrix_rows_of<bf16>(a, team) : matrix_rows_of<float>(a, team);
}

}  // namespace
}  // namespace kvik

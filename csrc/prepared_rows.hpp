// Rows of x as the tiles read them: the element type of the kind, zeros up to a whole step.
#pragma once

#include "arguments.hpp"
#include "packed.hpp"
#include "simd.hpp"

namespace kvik {
namespace {

struct PreparedRows {
    const char* data;  // [rows], `stride` bytes apart
    int64_t stride;
    // Of quantised rows, x = data * scale: scales [rows][groups] of int4, [rows] of int8, and for each
    // group of inputs minus the weights' offset times the sum of data ([rows][groups]).
    float* scales;
    int32_t* sums;
    int64_t scales_stride, sums_stride;
};

// Inputs whose integer products are summed before they become floats; far from overflow.
constexpr int64_t kGroupI8 = 2048;

constexpr float kQuantised = 127.0f;  // largest

KVIK_INLINE int64_t summed_inputs(const linear_args& a) { return a.kind == kMatrixI4 ? a.group : kGroupI8; }

KVIK_INLINE bool quantises(int64_t kind) { return kind == kMatrixI8 || kind == kMatrixI4; }

// Bytes of a prepared row: whole cache lines, an odd number of them. Rows a power of two apart would
// fall into the same few places of the first cache.
KVIK_INLINE int64_t row_bytes(const linear_args& a) {
    const int64_t steps = divide_up(a.inputs, inputs_per_step(a.kind));
    const int64_t step_bytes = a.kind == kMatrixI4 || a.kind == kMatrixI8WeightOnly ? 8 : 4;
    return (divide_up(steps * step_bytes, 64) | 1) * 64;
}

KVIK_INLINE int64_t prepared_bytes(const linear_args& a, int64_t rows) {
    const int64_t groups = quantises(a.kind) ? divide_up(a.inputs, summed_inputs(a)) : 0;
    return rows * row_bytes(a) + divide_up(rows * (groups + 1) * 8, 64) * 64;
}

KVIK_INLINE PreparedRows prepared_at(const linear_args& a, int64_t rows, char* memory) {
    PreparedRows p = {};
    p.data = memory;
    p.stride = row_bytes(a);
    p.sums_stride = divide_up(a.inputs, summed_inputs(a));
    p.scales_stride = a.kind == kMatrixI4 ? p.sums_stride : 1;
    p.scales = (float*)(memory + rows * p.stride);
    p.sums = (int32_t*)(p.scales + rows * p.scales_stride);
    return p;
}

// Rows that need no preparation can be read where they are.
KVIK_INLINE bool readable_in_place(const linear_args& a) {
    if (a.kind == kMatrixF32) return a.dtype == kF32;
    if (a.kind == kMatrixBF16) return a.dtype == kBF16 && a.inputs % 2 == 0;
    if (a.kind == kMatrixI8WeightOnly) return a.dtype == kBF16 && a.inputs % 4 == 0;
    return false;
}

// Scale of some elements of x: absmax / 127, 1 if they are all zero, NaN if any is not finite.
template <class X>
KVIK_INLINE float scale_of(const X* x, int64_t count) {
    F32 absmax = zero(), poison = zero();
    for (int64_t k = 0; k < count; k += kLanes) {
        const F32 v = count - k < kLanes ? load(x + k, int(count - k)) : load(x + k);
        absmax = max(absmax, abs(v));
        poison = fma(v, zero(), poison);
    }
    const float scale = largest(absmax) / kQuantised + sum(poison);
    return scale == 0.0f ? 1.0f : scale;
}

// x / scale, rounded half to even; returns the sum.
template <class X>
KVIK_INLINE int32_t quantise(const X* x, int64_t count, float scale, int8_t* out) {
    I32 total = izero();
    const F32 divisor = all(scale);
    for (int64_t k = 0; k < count; k += kLanes) {
        const F32 v = count - k < kLanes ? load(x + k, int(count - k)) : load(x + k);
        // of NaN and a number the second is kept, so that what is rounded is always in range
        const F32 q = max(min(div(v, divisor), all(kQuantised)), all(-kQuantised));
        const I32 rounded = to_int(q);
        if (count - k < kLanes) {  // a whole vector could end behind the row
            int8_t lanes[kLanes];
            store_i8(lanes, rounded);
            std::memcpy(out + k, lanes, size_t(count - k));
        } else {
            store_i8(out + k, rounded);
        }
        total = iadd(total, rounded);
    }
    return sum(total);
}

// What fills up the last step lies in the last two lines of a row.
KVIK_INLINE void clear_end(char* row, int64_t stride) {
    const int64_t bytes = stride < 128 ? stride : 128;
    std::memset(row + stride - bytes, 0, size_t(bytes));
}

template <class X>
void quantise_row(const linear_args& a, const X* x, int64_t row, const PreparedRows& to) {
    int8_t* out = (int8_t*)to.data + row * to.stride;
    float* scales = to.scales + row * to.scales_stride;
    int32_t* sums = to.sums + row * to.sums_stride;
    const bool each = a.kind == kMatrixI4;
    const int32_t offset = !each ? 128 : a.zeros ? 1 : kSymmetricZero;
    const int64_t group = summed_inputs(a);
    clear_end((char*)out, to.stride);
    if (!each) scales[0] = scale_of(x, a.inputs);
    for (int64_t k = 0, g = 0; k < a.inputs; k += group, g++) {
        const int64_t count = a.inputs - k < group ? a.inputs - k : group;
        if (each) scales[g] = scale_of(x + k, count);
        sums[g] = -offset * quantise(x + k, count, scales[each ? g : 0], out + k);
    }
}

template <class X, class Out>
void convert_row(const linear_args& a, const X* x, int64_t row, const PreparedRows& to) {
    Out* out = (Out*)(to.data + row * to.stride);
    clear_end((char*)out, to.stride);
    int64_t k = 0;
    for (; k + kLanes <= a.inputs; k += kLanes) store(out + k, load(x + k));
    const int rest = int(a.inputs - k);
    if (rest) store(out + k, load(x + k, rest), rest);
}

template <class X>
void prepare_row(const linear_args& a, int64_t row, const PreparedRows& to) {
    const X* x = (const X*)a.x + row * a.x_stride;
    if (quantises(a.kind))
        quantise_row(a, x, row, to);
    else if (a.kind == kMatrixF32)
        convert_row<X, float>(a, x, row, to);
    else
        convert_row<X, bf16>(a, x, row, to);
}

// Rows first, first + step, ... of x to their places.
void prepare(const linear_args& a, int64_t first, int64_t step, const PreparedRows& to) {
    for (int64_t row = first; row < a.rows; row += step) {
        if (a.dtype == kBF16)
            prepare_row<bf16>(a, row, to);
        else
            prepare_row<float>(a, row, to);
    }
}

}  // namespace
}  // namespace kvik

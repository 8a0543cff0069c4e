// Rows of x as the tiles read them: the element type of the kind, zero-padded to a whole step.
#pragma once

#include "arguments.hpp"
#include "fp8.hpp"
#include "nibble_tables.hpp"
#include "packed.hpp"
#include "simd.hpp"

namespace kvik {
namespace {

struct PreparedRows {
    const char* data;  // [rows], `stride` bytes apart
    int64_t stride;
    // For quantised rows, x = data * scale: scales [rows][groups], or [rows] where a row has one scale. For
    // integers also sums [rows][groups]: minus the weights' offset times the sum of a group's data.
    float* scales;
    int32_t* sums;
    int64_t scales_stride, sums_stride;
};

constexpr float kQuantised = 127.0f;  // largest

// Inputs whose integer products are summed before they become floats.
KVIK_INLINE int64_t summed_inputs(const linear_args& a) { return a.group ? a.group : a.inputs > 0 ? a.inputs : 1; }

KVIK_INLINE int64_t count_sums(const linear_args& a) { return a.group ? count_groups(a.inputs, a.group) : 1; }

KVIK_INLINE bool quantises(int64_t kind) { return kind == kMatrixI8 || is_int4(kind); }

// What was added to four-bit values or numbers without zero points, so that none is negative.
KVIK_INLINE int32_t zero_of(int64_t kind) {
    switch (kind) {
        case kMatrixMxfp4:
        case kMatrixFp4: return kE2M1Zero;
        case kMatrixIq4: return kIq4Zero;
        case kMatrixNf4: return kNf4Zero;
        case kMatrixBnbFp4: return kBnbFp4Zero;
        default: return kSymmetricZero;
    }
}

// A row of x has a scale for each group.
KVIK_INLINE bool scales_groups(const linear_args& a) {
    return quantises(a.kind) ? a.group != 0 : a.fp8_x == kGroupX;
}

// A row of x has one scale.
KVIK_INLINE bool scales_rows(const linear_args& a) {
    return a.kind == kMatrixI8 ? a.group == 0 : a.fp8_x == kRowX || a.fp8_x == kStaticX;
}

// Bytes of a row of x for one step of the weights.
KVIK_INLINE int64_t x_step_bytes(int64_t kind) {
    return is_int4(kind) || kind == kMatrixI8WeightOnly || kind == kMatrixFp8 ? 8 : 4;
}

// Scratch bytes for one row while its columns are put into the order of the weights.
KVIK_INLINE int64_t ordered_bytes(const linear_args& a) {
    return a.order ? divide_up(a.inputs * (a.dtype == kBF16 ? 2 : 4), 64) * 64 : 0;
}

// Bytes of a prepared row: an odd number of whole cache lines. Rows a power of two apart would
// fall into the same few sets of the L1 cache.
KVIK_INLINE int64_t row_bytes(const linear_args& a) {
    const int64_t steps = divide_up(a.inputs, inputs_per_step(a.kind));
    return (divide_up(steps * x_step_bytes(a.kind), 64) | 1) * 64;
}

KVIK_INLINE int64_t prepared_bytes(const linear_args& a, int64_t rows) {
    const bool many = quantises(a.kind) || scales_groups(a);
    const int64_t groups = many ? count_sums(a) : 0;
    return rows * row_bytes(a) + divide_up(rows * (groups + 1) * 8, 64) * 64;
}

KVIK_INLINE PreparedRows prepared_at(const linear_args& a, int64_t rows, char* memory) {
    PreparedRows p = {};
    p.data = memory;
    p.stride = row_bytes(a);
    p.sums_stride = count_sums(a);
    p.scales_stride = scales_groups(a) ? p.sums_stride : 1;
    p.scales = (float*)(memory + rows * p.stride);
    p.sums = (int32_t*)(p.scales + rows * p.scales_stride);
    return p;
}

// Whether rows need no preparation and can be read in place.
KVIK_INLINE bool readable_in_place(const linear_args& a) {
    if (a.order || a.fp8_x != kFloatX) return false;
    if (a.kind == kMatrixF32) return a.dtype == kF32;
    if (a.kind == kMatrixBF16) return a.dtype == kBF16 && a.inputs % 2 == 0;
    if (a.kind == kMatrixI8WeightOnly || a.kind == kMatrixFp8) return a.dtype == kBF16 && a.inputs % 4 == 0;
    return false;
}

// Scale of some elements of x: absmax / most, 1 if they are all zero, NaN if any is not finite.
template <class X>
KVIK_INLINE float scale_of(const X* x, int64_t count, float most) {
    F32 absmax = zero(), poison = zero();
    each_vector(0, count, [&](int64_t k, auto n) KVIK_INLINED {
        const F32 v = load(x + k, n);
        absmax = max(absmax, abs(v));
        poison = fma(v, zero(), poison);
    });
    const float scale = largest(absmax) / most + sum(poison);
    return scale == 0.0f ? 1.0f : scale;
}

// Division of many numbers by one, rounded as `div` does it: a product with the reciprocal is off by at most one
// ulp, and its remainder is exact (Markstein, IBM J. Res. Dev. 34, 1990). Three fast instructions replace a slow
// one. Quotients must be finite.
struct Divisor {
    F32 value, reciprocal;
    bool exact;  // remainders

    explicit Divisor(float x) : value(broadcast(x)), reciprocal(broadcast(1.0f / x)), exact(kFused && x > 1e-20f) {}

    inline __attribute__((always_inline)) F32 under(F32 x) const {
        if (!exact) return div(x, value);
        const F32 near = mul(x, reciprocal);
        return fma(fma(sub(zero(), near), value, x), reciprocal, near);
    }
};

// x / scale, rounded half to even; returns the sum.
template <class X>
KVIK_INLINE int32_t quantise(const X* x, int64_t count, float scale, int8_t* out) {
    I32 total = izero();
    const Divisor divisor(scale);
    for (int64_t k = 0; k < count; k += kLanes) {
        const F32 v = count - k < kLanes ? load(x + k, int(count - k)) : load(x + k);
        // with a NaN, max and min return the second operand, so that the result is always in range
        const F32 q = max(min(divisor.under(v), broadcast(kQuantised)), broadcast(-kQuantised));
        const I32 rounded = to_int(q);
        if (count - k < kLanes) {  // a whole vector could extend past the row
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

// Clears the last two cache lines of a row, which contain the zeros that pad the last step.
KVIK_INLINE void clear_end(char* row, int64_t stride) {
    const int64_t bytes = stride < 128 ? stride : 128;
    std::memset(row + stride - bytes, 0, size_t(bytes));
}

template <class X>
void quantise_row(const linear_args& a, const X* x, int64_t row, const PreparedRows& to) {
    int8_t* out = (int8_t*)to.data + row * to.stride;
    float* scales = to.scales + row * to.scales_stride;
    int32_t* sums = to.sums + row * to.sums_stride;
    const int32_t offset = a.kind == kMatrixI8 ? 128 : a.zeros ? 1 : zero_of(a.kind);
    const int64_t group = summed_inputs(a), groups = count_sums(a);
    clear_end((char*)out, to.stride);
    for (int64_t k = 0, g = 0; g < groups; k += group, g++) {
        const int64_t count = a.inputs - k < group ? a.inputs - k : group;
        scales[g] = scale_of(x + k, count, kQuantised);
        sums[g] = -offset * quantise(x + k, count, scales[g], out + k);
    }
}

template <class X, class Out>
void convert_row(const linear_args& a, const X* x, int64_t row, const PreparedRows& to) {
    Out* out = (Out*)(to.data + row * to.stride);
    clear_end((char*)out, to.stride);
    each_vector(0, a.inputs, [&](int64_t k, auto n) KVIK_INLINED { store(out + k, load(x + k, n), n); });
}

// x / scale rounded to E4M3, as bf16, which holds it exactly. NaN stays NaN.
template <class X>
KVIK_INLINE void round_fp8(const X* x, int64_t count, float scale, bf16* out) {
    const F32 divisor = broadcast(scale);
    each_vector(0, count, [&](int64_t k, auto n) KVIK_INLINED {
        store(out + k, nearest_fp8(div(load(x + k, n), divisor)), n);
    });
}

template <class X>
void round_row(const linear_args& a, const X* x, int64_t row, const PreparedRows& to) {
    bf16* out = (bf16*)(to.data + row * to.stride);
    float* scales = to.scales + row * to.scales_stride;
    const bool each = a.fp8_x == kGroupX;
    const int64_t group = each ? a.group : a.inputs;
    clear_end((char*)out, to.stride);
    // not in the loop: it is read without inputs too
    if (!each) scales[0] = a.fp8_x == kStaticX ? *(const float*)a.x_scale : scale_of(x, a.inputs, kFp8Most);
    for (int64_t k = 0, g = 0; k < a.inputs; k += group, g++) {
        const int64_t count = a.inputs - k < group ? a.inputs - k : group;
        if (each) scales[g] = scale_of(x + k, count, kFp8Most);
        round_fp8(x + k, count, scales[g], out + k);
    }
}

template <class X>
const X* in_order(const linear_args& a, const X* x, X* ordered) {
    const int32_t* order = (const int32_t*)a.order;
    for (int64_t k = 0; k < a.inputs; k++) ordered[k] = x[order[k]];
    return ordered;
}

template <class X>
void prepare_row(const linear_args& a, const X* x, int64_t row, const PreparedRows& to, char* ordered) {
    if (a.order) x = in_order(a, x, (X*)ordered);
    if (quantises(a.kind))
        quantise_row(a, x, row, to);
    else if (a.fp8_x != kFloatX)
        round_row(a, x, row, to);
    else if (a.kind == kMatrixF32)
        convert_row<X, float>(a, x, row, to);
    else
        convert_row<X, bf16>(a, x, row, to);
}

// Prepares row `from` of x as row `row` of `to`. ordered: scratch for a row, if there is an order.
KVIK_INLINE void prepare_one(const linear_args& a, int64_t from, int64_t row, const PreparedRows& to, char* ordered) {
    if (a.dtype == kBF16)
        prepare_row(a, (const bf16*)a.x + from * a.x_stride, row, to, ordered);
    else
        prepare_row(a, (const float*)a.x + from * a.x_stride, row, to, ordered);
}

// Prepares rows [first, last) of x.
void prepare(const linear_args& a, int64_t first, int64_t last, const PreparedRows& to, char* ordered) {
    for (int64_t row = first; row < last; row++) prepare_one(a, row, row, to, ordered);
}

}  // namespace
}  // namespace kvik

// Sums and copies of whole rows.
#pragma once

#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

constexpr int64_t kAddedPerThread = 4096;
constexpr int64_t kCopiedPerThread = 16384;  // bytes

template <class T>
void add_of(const add_args& a, Team& team) {
    each_columns(team, a.rows, a.dim, kAddedPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        const T* y = static_cast<const T*>(a.y) + row * a.y_stride;
        T* out = static_cast<T*>(a.out) + row * a.out_stride;
        each_vector(begin, end, [&](int64_t i, auto n) KVIK_INLINED {
            store(out + i, add(load(x + i, n), load(y + i, n)), n);
        });
    });
}

void add(const add_args& a, Team& team) {
    a.dtype == kBF16 ? add_of<bf16>(a, team) : add_of<float>(a, team);
}

// Writes a function of each number.
template <class T, class Args, class Function>
void each_number_of(const Args& a, Team& team, const Function& function) {
    each_columns(team, a.rows, a.dim, kAddedPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        T* y = static_cast<T*>(a.y) + row * a.y_stride;
        each_vector(begin, end, [&](int64_t i, auto n) KVIK_INLINED { store(y + i, function(load(x + i, n)), n); });
    });
}

template <class Args, class Function>
void each_number(const Args& a, Team& team, const Function& function) {
    a.dtype == kBF16 ? each_number_of<bf16>(a, team, function) : each_number_of<float>(a, team, function);
}

void scaled(const scaled_args& a, Team& team) {
    const F32 factor = broadcast(float(a.factor));
    each_number(a, team, [&](F32 x) KVIK_INLINED { return mul(x, factor); });
}

void clipped(const clipped_args& a, Team& team) {
    const F32 limit = broadcast(float(a.limit)), least = broadcast(float(-a.limit));
    each_number(a, team, [&](F32 x) KVIK_INLINED { return max(least, min(limit, x)); });  // keeps a NaN
}

template <class T>
void weighted_sums_of(const weighted_sums_args& a, Team& team) {
    each_columns(team, a.rows, a.dim, kAddedPerThread / 4, [&](int64_t row, int64_t begin, int64_t end) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        const T* residual = a.residual ? static_cast<const T*>(a.residual) + row * a.residual_stride : nullptr;
        const float* weights = static_cast<const float*>(a.weights) + row * a.weights_stride;
        T* out = static_cast<T*>(a.out) + row * a.out_stride;
        for (int64_t s = 0; s < a.sums; s++, weights += a.parts, out += a.dim)
            each_vector(begin, end, [&](int64_t i, auto n) KVIK_INLINED {
                F32 total = residual ? load(residual + s * a.dim + i, n) : zero();
                for (int64_t p = 0; p < a.parts; p++)
                    total = fma(broadcast(weights[p]), load(x + p * a.dim + i, n), total);
                store(out + i, total, n);
            });
    });
}

void weighted_sums(const weighted_sums_args& a, Team& team) {
    a.dtype == kBF16 ? weighted_sums_of<bf16>(a, team) : weighted_sums_of<float>(a, team);
}

void gather_rows(const gather_rows_args& a, Team& team) {
    const int64_t* ids = static_cast<const int64_t*>(a.ids);
    each_columns(team, a.rows, a.row_bytes, kCopiedPerThread, [&](int64_t row, int64_t begin, int64_t end) {
        const char* source = static_cast<const char*>(a.table) + ids[row] * a.table_stride;
        std::memcpy(static_cast<char*>(a.out) + row * a.out_stride + begin, source + begin, size_t(end - begin));
    });
}

}  // namespace
}  // namespace kvik

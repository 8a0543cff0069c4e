// Pack scales, zero points and minima into the layout of packed.hpp.
#pragma once

#include "arguments.hpp"
#include "fp8.hpp"
#include "half.hpp"
#include "packed.hpp"
#include "simd.hpp"

namespace kvik {
namespace {

// The range of some numbers to be stored as fp16.
struct HalfRange {
    bool fits = true;
    uint32_t largest = 0;  // bits of its magnitude

    void add(const float* values, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            fits &= to_float(to_f16(values[i])) == values[i];
            const uint32_t size = bits_of(values[i]) & 0x7fffffff;
            if (size < 0x7f800000 && size > largest) largest = size;
        }
    }

    // The divisor for them: 1 where fp16 holds them all. Otherwise a power of two that makes the largest one
    // large for fp16, so that numbers 2^28 times smaller keep eleven significant bits.
    float factor() const {
        constexpr uint32_t kExponent = 14;  // of the largest after division
        const uint32_t exponent = largest >> 23;
        return fits ? 1.0f : float_of((exponent > kExponent ? exponent - kExponent : 1) << 23);
    }
};

// 1 / power for a power of two; 2^127 where power is 0.
KVIK_INLINE float inverse_power(float power) {
    return float_of((254u << 23) - bits_of(power));
}

bool has_fp8_nan(const char* row, int64_t inputs) {
    bool found = false;
    for (int64_t k = 0; k < inputs; k++) found |= (row[k] & 0x7f) == kFp8Nan;
    return found;
}

// One lane of a tile: the given output `index`, whose values are `row`; -1: padding.
struct OutputScales {
    const pack_matrix_args& a;
    int64_t index;
    const char* row;

    int64_t groups() const { return count_groups(a.inputs, a.group); }
    bool halves() const { return scale_bytes(a.kind) == 2; }
    bool minima() const { return a.kind == kMatrixI4Min; }
    template <class T>
    T at(const void* of, int64_t group) const {
        return index < 0 ? T(0) : ((const T*)of)[index * groups() + group];
    }

    float factor() const {
        if (index < 0) return 0.0f;
        // the kernels multiply only finite numbers
        if (a.kind == kMatrixFp8 && has_fp8_nan(row, a.inputs)) return NAN;
        if (a.group == 0) return ((const float*)a.scales)[index];
        if (a.kind == kMatrixMxfp4) return 0.5f;
        if (!halves()) return 1.0f;
        HalfRange range;
        range.add((const float*)a.scales + index * groups(), groups());
        if (minima()) range.add((const float*)a.zeros + index * groups(), groups());
        return range.factor();
    }

    void pack_scales(float factor, char* to, int lane) const {
        ((float*)to)[lane] = factor;
        to += kFactorBytes;
        for (int64_t g = 0; g < groups(); g++) {
            if (a.kind == kMatrixMxfp4) {
                to[g * kTile + lane] = at<char>(a.scales, g);
                continue;
            }
            const float scale = at<float>(a.scales, g);
            if (halves())
                ((f16*)to)[g * kTile + lane] = to_f16(scale * inverse_power(factor));
            else
                ((float*)to)[g * kTile + lane] = scale;
        }
    }

    void pack_zeros(float factor, char* to, int lane) const {
        for (int64_t g = 0; g < groups(); g++) {
            if (minima())
                ((f16*)to)[g * kTile + lane] = to_f16(at<float>(a.zeros, g) * inverse_power(factor));
            else
                ((uint8_t*)to)[g * kTile + lane] = at<uint8_t>(a.zeros, g);
        }
    }

    void pack(int64_t tile, int lane) const {
        const float f = factor();
        pack_scales(f, (char*)a.packed_scales + tile * tile_scale_bytes(a.kind, groups()), lane);
        if (a.zeros) pack_zeros(f, (char*)a.packed_zeros + tile * groups() * group_zero_bytes(a.kind), lane);
    }
};

}  // namespace
}  // namespace kvik

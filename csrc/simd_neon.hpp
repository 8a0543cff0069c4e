// Vectors of 64-bit Arm: two registers each, so that tiles have the shape that they have with AVX2. Included by
// simd.hpp. With KVIK_NEON alone it runs on every such CPU; the flags of the compiler add dot products of bytes
// (FEAT_DotProd), and of mixed signs and of bf16 (FEAT_I8MM, FEAT_BF16).

constexpr int kLanes = 8;
struct F32 { float32x4_t low, high; };
struct I32 { int32x4_t low, high; };
struct Mask { uint32x4_t low, high; };  // all bits of a lane, or none

KVIK_INLINE F32 broadcast(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
KVIK_INLINE F32 zero() { return broadcast(0.0f); }
KVIK_INLINE F32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
KVIK_INLINE void store(float* p, F32 v) {
    vst1q_f32(p, v.low);
    vst1q_f32(p + 4, v.high);
}
KVIK_INLINE Mask first_lanes(int n) {
    const int32x4_t lane = {0, 1, 2, 3}, count = vdupq_n_s32(n);
    return {vcgtq_s32(count, lane), vcgtq_s32(count, vaddq_s32(lane, vdupq_n_s32(4)))};
}
KVIK_INLINE F32 load(const float* p, int n) {
    float lanes[kLanes] = {};
    std::memcpy(lanes, p, size_t(n < kLanes ? n : kLanes) * sizeof(float));
    return load(lanes);
}
KVIK_INLINE void store(float* p, F32 v, int n) {
    float lanes[kLanes];
    store(lanes, v);
    std::memcpy(p, lanes, size_t(n < kLanes ? n : kLanes) * sizeof(float));
}
KVIK_INLINE float32x4_t widen(uint16x4_t v) { return vreinterpretq_f32_u32(vshll_n_u16(v, 16)); }
KVIK_INLINE F32 load(const bf16* p) { return {widen(vld1_u16(p)), widen(vld1_u16(p + 4))}; }
KVIK_INLINE F32 add(F32 a, F32 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
KVIK_INLINE F32 sub(F32 a, F32 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
KVIK_INLINE F32 mul(F32 a, F32 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
KVIK_INLINE F32 div(F32 a, F32 b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
KVIK_INLINE F32 select(Mask m, F32 yes, F32 no) {
    return {vbslq_f32(m.low, yes.low, no.low), vbslq_f32(m.high, yes.high, no.high)};
}
KVIK_INLINE Mask less(F32 a, F32 b) { return {vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}; }
KVIK_INLINE Mask not_le(F32 a, F32 b) {
    return {vmvnq_u32(vcleq_f32(a.low, b.low)), vmvnq_u32(vcleq_f32(a.high, b.high))};
}
// With a NaN these return b; the instructions for maximum and minimum return NaN.
KVIK_INLINE F32 max(F32 a, F32 b) { return select(less(b, a), a, b); }
KVIK_INLINE F32 min(F32 a, F32 b) { return select(less(a, b), a, b); }
KVIK_INLINE F32 abs(F32 a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
KVIK_INLINE F32 fma(F32 a, F32 b, F32 c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
constexpr bool kFused = true;
KVIK_INLINE F32 round(F32 a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
KVIK_INLINE uint32_t bits(Mask m) {
    const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
    return vaddvq_u32(vorrq_u32(vandq_u32(m.low, low), vandq_u32(m.high, high)));
}
KVIK_INLINE Mask lanes_of(uint32_t bits) {
    const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128}, all = vdupq_n_u32(bits);
    return {vtstq_u32(all, low), vtstq_u32(all, high)};
}
KVIK_INLINE float sum(F32 a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
KVIK_INLINE float largest(F32 a) { return vmaxnmvq_f32(vmaxnmq_f32(a.low, a.high)); }
KVIK_INLINE float32x4_t times_power_of_two(float32x4_t a, float32x4_t n) {
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(a, vreinterpretq_f32_s32(power));
}
KVIK_INLINE F32 times_power_of_two(F32 a, F32 n) {  // |n| below 127, or NaN where a is
    return {times_power_of_two(a.low, n.low), times_power_of_two(a.high, n.high)};
}

KVIK_INLINE I32 ibroadcast(int32_t v) { return {vdupq_n_s32(v), vdupq_n_s32(v)}; }
KVIK_INLINE I32 izero() { return ibroadcast(0); }
KVIK_INLINE I32 iload(const void* p) {
    const auto* bytes = static_cast<const int8_t*>(p);
    return {vreinterpretq_s32_s8(vld1q_s8(bytes)), vreinterpretq_s32_s8(vld1q_s8(bytes + 16))};
}
KVIK_INLINE void istore(void* p, I32 v) {
    auto* bytes = static_cast<int8_t*>(p);
    vst1q_s8(bytes, vreinterpretq_s8_s32(v.low));
    vst1q_s8(bytes + 16, vreinterpretq_s8_s32(v.high));
}
KVIK_INLINE F32 as_floats(I32 a) { return {vreinterpretq_f32_s32(a.low), vreinterpretq_f32_s32(a.high)}; }
KVIK_INLINE I32 iadd(I32 a, I32 b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
KVIK_INLINE I32 iand(I32 a, I32 b) { return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)}; }
KVIK_INLINE I32 ixor(I32 a, I32 b) { return {veorq_s32(a.low, b.low), veorq_s32(a.high, b.high)}; }
KVIK_INLINE I32 low_nibbles(I32 a) { return iand(a, ibroadcast(0x0f0f0f0f)); }
KVIK_INLINE int32x4_t high_nibbles(int32x4_t a) {
    return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4));
}
KVIK_INLINE I32 high_nibbles(I32 a) { return {high_nibbles(a.low), high_nibbles(a.high)}; }
KVIK_INLINE F32 to_float(I32 a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
KVIK_INLINE I32 to_int(F32 a) { return {vcvtnq_s32_f32(a.low), vcvtnq_s32_f32(a.high)}; }
KVIK_INLINE int32_t sum(I32 a) { return vaddvq_s32(vaddq_s32(a.low, a.high)); }
KVIK_INLINE I32 short_mul(I32 a, I32 b) { return {vmulq_s32(a.low, b.low), vmulq_s32(a.high, b.high)}; }
KVIK_INLINE void store_i8(int8_t* p, I32 v) {
    vst1_s8(p, vqmovn_s16(vcombine_s16(vqmovn_s32(v.low), vqmovn_s32(v.high))));
}
KVIK_INLINE I32 load_i8(const int8_t* p) {
    const int16x8_t words = vmovl_s8(vld1_s8(p));
    return {vmovl_s16(vget_low_s16(words)), vmovl_high_s16(words)};
}

// Pairs of bf16 in a lane.
KVIK_INLINE F32 even_bf16(I32 a) { return as_floats({vshlq_n_s32(a.low, 16), vshlq_n_s32(a.high, 16)}); }
KVIK_INLINE F32 odd_bf16(I32 a) { return as_floats(iand(a, ibroadcast(int32_t(0xffff0000)))); }
// The upper halves of floats: bf16 of numbers that have no more bits.
KVIK_INLINE uint16x4_t upper_halves(float32x4_t v) { return vshrn_n_u32(vreinterpretq_u32_f32(v), 16); }
// Of integers of at most 8 bits.
KVIK_INLINE int32x4_t exact_bf16(int16x8_t v) {
    const uint16x4_t low = upper_halves(vcvtq_f32_s32(vmovl_s16(vget_low_s16(v))));
    return vreinterpretq_s32_u16(vcombine_u16(low, upper_halves(vcvtq_f32_s32(vmovl_high_s16(v)))));
}
KVIK_INLINE I32 load_i8_pairs(const int8_t* p) {
    return {exact_bf16(vmovl_s8(vld1_s8(p))), exact_bf16(vmovl_s8(vld1_s8(p + 8)))};
}
KVIK_INLINE int32x4_t low_i8_pairs(int32x4_t v) {  // of the two lower bytes of each lane
    return exact_bf16(vmovl_s8(vreinterpret_s8_s16(vmovn_s32(v))));
}
KVIK_INLINE int32x4_t high_i8_pairs(int32x4_t v) {
    return exact_bf16(vmovl_s8(vreinterpret_s8_s16(vshrn_n_s32(v, 16))));
}
KVIK_INLINE void widen_i8(I32 v, I32& first, I32& second) {
    first = {low_i8_pairs(v.low), low_i8_pairs(v.high)};
    second = {high_i8_pairs(v.low), high_i8_pairs(v.high)};
}
// bf16 of E4M3 numbers, each in a word below 256.
KVIK_INLINE int32x4_t fp8_words(uint16x8_t v) {
    const uint16x8_t size = vandq_u16(v, vdupq_n_u16(0x7f)), sign = vshlq_n_u16(vandq_u16(v, vdupq_n_u16(0x80)), 8);
    const uint16x8_t normal = vaddq_u16(vshlq_n_u16(size, 4), vdupq_n_u16(120 << 7));
    // bytes 2 i and 2 i + 1 of the small numbers, where i = size is below 8
    const uint16x8_t index = vaddq_u16(vmulq_n_u16(size, 0x0202), vdupq_n_u16(0x0100));
    const uint8x16_t table = vld1q_u8(reinterpret_cast<const uint8_t*>(kSmallFp8));
    const uint16x8_t small = vreinterpretq_u16_u8(vqtbl1q_u8(table, vreinterpretq_u8_u16(index)));
    const uint16x8_t is_small = vcltq_u16(size, vdupq_n_u16(8));
    return vreinterpretq_s32_u16(vorrq_u16(sign, vbslq_u16(is_small, small, normal)));
}
KVIK_INLINE I32 load_fp8_pairs(const void* p) {
    const uint8x16_t v = vld1q_u8(static_cast<const uint8_t*>(p));
    return {fp8_words(vmovl_u8(vget_low_u8(v))), fp8_words(vmovl_high_u8(v))};
}
// Bytes 0 and 2 of each lane, bytes 1 and 3.
KVIK_INLINE int32x4_t even_fp8(int32x4_t v) {
    return fp8_words(vandq_u16(vreinterpretq_u16_s32(v), vdupq_n_u16(0xff)));
}
KVIK_INLINE int32x4_t odd_fp8(int32x4_t v) { return fp8_words(vshrq_n_u16(vreinterpretq_u16_s32(v), 8)); }
KVIK_INLINE I32 load_nibbles(const void* p) {
    const uint16x8_t v = vmovl_u8(vld1_u8(static_cast<const uint8_t*>(p)));
    const uint16x8_t even = vandq_u16(v, vdupq_n_u16(15)), odd = vshrq_n_u16(v, 4);
    return {vreinterpretq_s32_u16(vzip1q_u16(even, odd)), vreinterpretq_s32_u16(vzip2q_u16(even, odd))};
}
KVIK_INLINE I32 load_paired_nibbles(const void* p, int first) {
    const uint8x16_t bytes = vld1q_u8(static_cast<const uint8_t*>(p));
    const uint8x16_t v = first ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    return {vreinterpretq_s32_u16(vmovl_u8(vget_low_u8(v))), vreinterpretq_s32_u16(vmovl_high_u8(v))};
}
KVIK_INLINE I32 shifted_to_bf16(I32 shifted) {
    const int16x8_t by = vdupq_n_s16(16);
    return {exact_bf16(vsubq_s16(vreinterpretq_s16_s32(shifted.low), by)),
            exact_bf16(vsubq_s16(vreinterpretq_s16_s32(shifted.high), by))};
}

KVIK_INLINE uint16x4_t narrow(float32x4_t v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v), even = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, even), vdupq_n_u32(0x7fff));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, vdupq_n_u32(0x7fc00000)), 16);
}
KVIK_INLINE void store(bf16* p, F32 v) { vst1q_u16(p, vcombine_u16(narrow(v.low), narrow(v.high))); }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
KVIK_INLINE float32x4_t dot_bf16(float32x4_t acc, int32x4_t a, int32x4_t b) {
    return vbfdotq_f32(acc, vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(b));
}
KVIK_INLINE F32 dot_bf16(F32 acc, I32 a, I32 b) {
    return {dot_bf16(acc.low, a.low, b.low), dot_bf16(acc.high, a.high, b.high)};
}
#else
KVIK_INLINE F32 dot_bf16(F32 acc, I32 a, I32 b) {
    return fma(odd_bf16(a), odd_bf16(b), fma(even_bf16(a), even_bf16(b), acc));
}
#endif

// Sums of products of unsigned and signed bytes; `dot_i4`: the unsigned ones are below 128.
#if defined(__ARM_FEATURE_MATMUL_INT8)
KVIK_INLINE int32x4_t dot_i8(int32x4_t acc, int32x4_t u, int32x4_t s) {
    return vusdotq_s32(acc, vreinterpretq_u8_s32(u), vreinterpretq_s8_s32(s));
}
KVIK_INLINE int32x4_t dot_i4(int32x4_t acc, int32x4_t u, int32x4_t s) { return dot_i8(acc, u, s); }
#define KVIK_WIDE_PRODUCTS
KVIK_INLINE I32 nibbles_times_16(I32 a) { return iand(a, ibroadcast(int32_t(0xf0f0f0f0))); }
KVIK_INLINE I32 by_16(I32 a) { return {vshrq_n_s32(a.low, 4), vshrq_n_s32(a.high, 4)}; }
#elif defined(__ARM_FEATURE_DOTPROD)
KVIK_INLINE int32x4_t dot_i4(int32x4_t acc, int32x4_t u, int32x4_t s) {
    return vdotq_s32(acc, vreinterpretq_s8_s32(u), vreinterpretq_s8_s32(s));
}
// u s = (u - 128) s + 2 (64 s); the compiler computes the second part once for all u.
KVIK_INLINE int32x4_t dot_i8(int32x4_t acc, int32x4_t u, int32x4_t s) {
    const int32x4_t half = dot_i4(vdupq_n_s32(0), vdupq_n_s32(0x40404040), s);
    return vaddq_s32(dot_i4(acc, veorq_s32(u, vdupq_n_s32(int32_t(0x80808080))), s), vaddq_s32(half, half));
}
#else
KVIK_INLINE int32x4_t dot_i8(int32x4_t acc, int32x4_t u, int32x4_t s) {
    const int16x8_t u_words = vreinterpretq_s16_s32(u), s_words = vreinterpretq_s16_s32(s);
    const int16x8_t u_even = vandq_s16(u_words, vdupq_n_s16(0xff)), s_even = vshrq_n_s16(vshlq_n_s16(s_words, 8), 8);
    const int16x8_t u_odd = vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s16(u_words), 8));
    const int16x8_t s_odd = vshrq_n_s16(s_words, 8);
    const int32x4_t low = vmlal_s16(vmull_s16(vget_low_s16(u_even), vget_low_s16(s_even)), vget_low_s16(u_odd),
                                    vget_low_s16(s_odd));
    const int32x4_t high = vmlal_high_s16(vmull_high_s16(u_even, s_even), u_odd, s_odd);
    return vaddq_s32(acc, vpaddq_s32(low, high));
}
KVIK_INLINE int32x4_t dot_i4(int32x4_t acc, int32x4_t u, int32x4_t s) { return dot_i8(acc, u, s); }
#endif
KVIK_INLINE I32 dot_i8(I32 acc, I32 u, I32 s) {
    return {dot_i8(acc.low, u.low, s.low), dot_i8(acc.high, u.high, s.high)};
}
KVIK_INLINE I32 dot_i4(I32 acc, I32 u, I32 s) {
    return {dot_i4(acc.low, u.low, s.low), dot_i4(acc.high, u.high, s.high)};
}

struct F64 { float64x2_t low, high; };
KVIK_INLINE F64 dzero() { return {vdupq_n_f64(0.0), vdupq_n_f64(0.0)}; }
KVIK_INLINE F64 add(F64 a, F64 b) { return {vaddq_f64(a.low, b.low), vaddq_f64(a.high, b.high)}; }
KVIK_INLINE F64 widen(float32x4_t a) { return {vcvt_f64_f32(vget_low_f32(a)), vcvt_high_f64_f32(a)}; }
KVIK_INLINE F64 widen_low(F32 a) { return widen(a.low); }
KVIK_INLINE F64 widen_high(F32 a) { return widen(a.high); }
KVIK_INLINE double sum(F64 a) { return vaddvq_f64(vaddq_f64(a.low, a.high)); }

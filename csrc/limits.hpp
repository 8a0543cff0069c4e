// Loops that measure the limits of the machine.
#pragma once

#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

// Makes the compiler treat this variable as used and as changed elsewhere. With 32 registers it stays in
// one; with fewer it is read from memory where it is used.
#if defined(__AVX512F__)
#define KVIK_OPAQUE(variable) asm volatile("" : "+v"(variable))
#else
#define KVIK_OPAQUE(variable) asm volatile("" : "+m"(variable))
#endif

// Reads all bytes once, in chunks of 1 MiB, so that a delayed thread does not delay the others.
void read_memory(const read_memory_args& a, Team& team) {
    constexpr int64_t kChunk = 1 << 20, kAhead = 4096;
    constexpr int64_t kStep = 8 * int64_t(sizeof(I32));
    const char* data = static_cast<const char*>(a.data);
    together(team, (a.bytes + kChunk - 1) / kChunk, [&](Member& member) {
        I32 s[8];
        for (I32& v : s) v = izero();
        for (int64_t task; (task = member.next()) >= 0;) {
            const int64_t end = (task + 1) * kChunk < a.bytes ? (task + 1) * kChunk : a.bytes;
            int64_t i = task * kChunk;
            for (; i + kStep <= end; i += kStep) {
                for (int64_t line = 0; line < kStep; line += 64) prefetch(data + i + kAhead + line);
                for (int j = 0; j < 8; j++) s[j] = iadd(s[j], iload(data + i + j * int64_t(sizeof(I32))));
            }
            for (; i < end; i++) s[0] = iadd(s[0], ibroadcast(data[i]));
        }
        for (I32& v : s) KVIK_OPAQUE(v);
    });
    *static_cast<double*>(a.result) = double(a.bytes);
}

// `steps` times a small matrix product: sums enough to hide the latency of an operation on every machine.
// step(sum, a, b) adds a product. kRows: as many rows as the registers hold, by measurement.
constexpr int kColumns = 3;

template <int kRows, class Sum, class Operand, class Step>
void repeat_alone(int64_t steps, Sum start, Operand operand, Step step) {
    Sum sums[kRows][kColumns];
    Operand a[kRows], b[kColumns];
#pragma GCC unroll 7
    for (int i = 0; i < kRows; i++) {
        a[i] = operand;
#pragma GCC unroll 3
        for (int j = 0; j < kColumns; j++) {
            b[j] = operand;
            sums[i][j] = start;
        }
    }
    for (int64_t at = 0; at < steps; at++) {
#pragma GCC unroll 7
        for (int i = 0; i < kRows; i++) KVIK_OPAQUE(a[i]);
#pragma GCC unroll 3
        for (int j = 0; j < kColumns; j++) KVIK_OPAQUE(b[j]);
#pragma GCC unroll 7
        for (int i = 0; i < kRows; i++)
#pragma GCC unroll 3
            for (int j = 0; j < kColumns; j++) sums[i][j] = step(sums[i][j], a[i], b[j]);
    }
#pragma GCC unroll 7
    for (int i = 0; i < kRows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < kColumns; j++) {
            Sum end = sums[i][j];  // a copy, because the sums themselves would be forced into memory
            KVIK_OPAQUE(end);
        }
}

// `steps` for each thread of the team, in tasks that any thread may take. result: all operations.
template <int kRows, class Sum, class Operand, class Step>
void repeat(Team& team, int64_t steps, double operations, void* result, Sum start, Operand operand, Step step) {
    constexpr int64_t kTasks = 16;  // for each thread
    const int64_t all = steps * team.size, tasks = kTasks * team.size;
    each_task(team, tasks, [&](int64_t task) {
        const Range range = part_of(all, task, tasks);
        repeat_alone<kRows>(range.end - range.begin, start, operand, step);
    });
    *static_cast<double*>(result) = operations * kRows * kColumns * double(all);
}

constexpr int kPeakRows = kLanes == 16 ? 7 : 4;

// Multiplications and additions are counted one by one.
void peak_f32(const peak_f32_args& a, Team& team) {
    const auto step = [](F32 s, F32 x, F32 y) { return fma(x, y, s); };
    repeat<kPeakRows>(team, a.steps, 2.0 * kLanes, a.result, zero(), broadcast(0.5f), step);
}

void peak_bf16(const peak_bf16_args& a, Team& team) {
    const auto step = [](F32 s, I32 x, I32 y) { return dot_bf16(s, x, y); };
    repeat<7>(team, a.steps, 4.0 * kLanes, a.result, zero(), ibroadcast(0x3f003f00), step);
}

void peak_i8(const peak_i8_args& a, Team& team) {
    const auto step = [](I32 s, I32 x, I32 y) { return dot_i8(s, x, y); };
    repeat<kPeakRows>(team, a.steps, 8.0 * kLanes, a.result, izero(), ibroadcast(0x01010101), step);
}

#undef KVIK_OPAQUE

}  // namespace
}  // namespace kvik

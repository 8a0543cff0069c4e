// The kernels of one instruction set: an array of function pointers.
#pragma once

#include "arguments.hpp"
#include "team.hpp"

namespace kvik {

using Kernel = void (*)(const Word* words, Team& team);

struct Table {
    const char* name;
#define KVIK_ENTRY(kernel) Kernel kernel;
    KVIK_KERNELS(KVIK_ENTRY)
#undef KVIK_ENTRY
};

enum KernelId : int {
#define KVIK_ID(kernel) kernel##_id,
    KVIK_KERNELS(KVIK_ID)
#undef KVIK_ID
        kNumKernels
};

// The kernels that an instruction set with tile registers has of its own.
#define KVIK_TILED_KERNELS(K) K(linear) K(experts) K(attention) K(choose_keys) K(peak_bf16) K(peak_i8)
struct TiledKernels {
#define KVIK_ENTRY(kernel) Kernel kernel;
    KVIK_TILED_KERNELS(KVIK_ENTRY)
#undef KVIK_ENTRY
};

// Defines call_KERNEL, which takes its arguments as words.
#define KVIK_CALL(kernel)                                                  \
    void call_##kernel(const Word* words, Team& team) {                    \
        kernel(*reinterpret_cast<const kernel##_args*>(words), team);      \
    }

// Names the code that is compiled once for each instruction set (KVIK_ISA).
#define KVIK_CONCAT_(a, b) a##b
#define KVIK_CONCAT(a, b) KVIK_CONCAT_(a, b)

// The kernels by id.
static inline Kernel kernel_of(const Table& table, int id) {
    static_assert(sizeof(Kernel) == sizeof(void*));
    return (&table.rms_norm)[id];
}

}  // namespace kvik

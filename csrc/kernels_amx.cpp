// Products and attention with the AMX tile registers, and their limits, for machines that have them (KVIK_ISA is
// amx) and in emulation (amx_emulated). Both use the kernels of avx512_bf16 for everything else.
#include "table.hpp"

#include "attention.hpp"
#include "experts.hpp"
#include "indexer.hpp"
#include "limits_amx.hpp"
#include "linear.hpp"

namespace kvik {
namespace {

KVIK_TILED_KERNELS(KVIK_CALL)

}  // namespace

extern const TiledKernels KVIK_CONCAT(kernels_, KVIK_ISA);
const TiledKernels KVIK_CONCAT(kernels_, KVIK_ISA) = {
#define KVIK_ENTRY(kernel) call_##kernel,
    KVIK_TILED_KERNELS(KVIK_ENTRY)
#undef KVIK_ENTRY
};

}  // namespace kvik

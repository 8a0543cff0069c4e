// Products by the tile registers of AMX, for machines that have them (KVIK_ISA is amx) and in emulation
// (amx_emulated). All else of these two is what avx512_bf16 runs.
#include "table.hpp"

#include "experts.hpp"
#include "linear.hpp"

namespace kvik {
namespace {

void call_linear(const Word* words, Team& team) { linear(*reinterpret_cast<const linear_args*>(words), team); }
void call_experts(const Word* words, Team& team) { experts(*reinterpret_cast<const experts_args*>(words), team); }

}  // namespace

extern const Kernel KVIK_CONCAT(linear_, KVIK_ISA), KVIK_CONCAT(experts_, KVIK_ISA);
const Kernel KVIK_CONCAT(linear_, KVIK_ISA) = call_linear;
const Kernel KVIK_CONCAT(experts_, KVIK_ISA) = call_experts;

}  // namespace kvik

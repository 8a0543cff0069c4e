// Products and attention with the AMX tile registers, and their limits, for machines that have them (KVIK_ISA is
// amx) and in emulation (amx_emulated). Both use the kernels of avx512_bf16 for everything else.
#include "table.hpp"

#include "attention.hpp"
#include "experts.hpp"
#include "limits_amx.hpp"
#include "linear.hpp"

namespace kvik {
namespace {

void call_linear(const Word* words, Team& team) { linear(*reinterpret_cast<const linear_args*>(words), team); }
void call_attention(const Word* words, Team& team) {
    attention(*reinterpret_cast<const attention_args*>(words), team);
}
void call_experts(const Word* words, Team& team) { experts(*reinterpret_cast<const experts_args*>(words), team); }

void call_peak_bf16(const Word* words, Team& team) {
    peak_bf16(*reinterpret_cast<const peak_bf16_args*>(words), team);
}
void call_peak_i8(const Word* words, Team& team) { peak_i8(*reinterpret_cast<const peak_i8_args*>(words), team); }

}  // namespace

extern const Kernel KVIK_CONCAT(linear_, KVIK_ISA), KVIK_CONCAT(experts_, KVIK_ISA), KVIK_CONCAT(attention_, KVIK_ISA);
extern const Kernel KVIK_CONCAT(peak_bf16_, KVIK_ISA), KVIK_CONCAT(peak_i8_, KVIK_ISA);
const Kernel KVIK_CONCAT(linear_, KVIK_ISA) = call_linear;
const Kernel KVIK_CONCAT(experts_, KVIK_ISA) = call_experts;
const Kernel KVIK_CONCAT(attention_, KVIK_ISA) = call_attention;
const Kernel KVIK_CONCAT(peak_bf16_, KVIK_ISA) = call_peak_bf16;
const Kernel KVIK_CONCAT(peak_i8_, KVIK_ISA) = call_peak_i8;

}  // namespace kvik

// Every kernel, compiled for one instruction set (KVIK_ISA).
#include "table.hpp"

#include "activation.hpp"
#include "attention.hpp"
#include "attention_entries.hpp"
#include "experts.hpp"
#include "group.hpp"
#include "indexer.hpp"
#include "kv_cache.hpp"
#include "kv_move.hpp"
#include "limits.hpp"
#include "linear.hpp"
#include "linear_each.hpp"
#include "logits.hpp"
#include "norm.hpp"
#include "pack.hpp"
#include "penalties.hpp"
#include "rotary.hpp"
#include "rows.hpp"
#include "sampling.hpp"
#include "simd.hpp"
#include "states.hpp"

#define KVIK_STRING_(a) #a
#define KVIK_STRING(a) KVIK_STRING_(a)

namespace kvik {
namespace {

void exchange(const exchange_args& a, Team&) { arrive_and_wait(*static_cast<Barrier*>(a.barrier), int(a.rank)); }

KVIK_KERNELS(KVIK_CALL)

}  // namespace

extern const Table KVIK_CONCAT(table_, KVIK_ISA);
const Table KVIK_CONCAT(table_, KVIK_ISA) = {
    KVIK_STRING(KVIK_ISA),
#define KVIK_ENTRY(kernel) call_##kernel,
    KVIK_KERNELS(KVIK_ENTRY)
#undef KVIK_ENTRY
};

}  // namespace kvik

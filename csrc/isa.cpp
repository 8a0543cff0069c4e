// Which instruction sets this build has and this machine runs.
#include "runtime.hpp"
#include "self_check.hpp"

#if defined(KVIK_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(KVIK_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(KVIK_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace kvik {

#define KVIK_DECLARE(name) extern const Table table_##name;
KVIK_DECLARE(portable)
KVIK_DECLARE(avx2)
KVIK_DECLARE(avx2_vnni)
KVIK_DECLARE(avx512)
KVIK_DECLARE(avx512_bf16)
KVIK_DECLARE(neon)
KVIK_DECLARE(neon_dot)
KVIK_DECLARE(neon_i8mm)
#undef KVIK_DECLARE
extern const TiledKernels kernels_amx, kernels_amx_emulated;
extern const Kernel linear_wrong_bf16, linear_wrong_i8;

namespace {

#if defined(KVIK_X86)
struct Cpuid {
    unsigned a, b, c, d;
};

Cpuid cpuid_7(unsigned subleaf) {
    Cpuid r = {};
    asm volatile("cpuid" : "=a"(r.a), "=b"(r.b), "=c"(r.c), "=d"(r.d) : "a"(7), "c"(subleaf));
    return r;
}

[[maybe_unused]] bool has_avx_vnni() { return cpuid_7(1).a >> 4 & 1; }

#if defined(KVIK_HAS_AMX)
// From version 5.16 on, Linux gives tile registers to processes that request them.
bool may_use_amx() {
    constexpr unsigned kBF16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // for arch_prctl(2)
    const bool has = (~cpuid_7(0).d & (kBF16 | kTile | kInt8)) == 0;
    return has && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
#endif

#if defined(KVIK_ARM)
struct ArmFeatures {
    bool dot, i8mm, bf16;  // FEAT_DotProd, FEAT_I8MM, FEAT_BF16
};

#if defined(__APPLE__)
bool has(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
ArmFeatures arm_features() {
    return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM"), has("hw.optional.arm.FEAT_BF16")};
}
#elif defined(__linux__)
ArmFeatures arm_features() {
    constexpr unsigned long kDot = 1ul << 20, kI8mm = 1ul << 13, kBF16 = 1ul << 14;
    const unsigned long second = getauxval(AT_HWCAP2);
    return {(getauxval(AT_HWCAP) & kDot) != 0, (second & kI8mm) != 0, (second & kBF16) != 0};
}
#else
ArmFeatures arm_features() { return {}; }
#endif
#endif

#if defined(KVIK_HAS_AVX512_BF16)
[[maybe_unused]] Table with_tiles(const char* name, const TiledKernels& own) {
    Table table = table_avx512_bf16;
    table.name = name;
#define KVIK_REPLACE(kernel) table.kernel = own.kernel;
    KVIK_TILED_KERNELS(KVIK_REPLACE)
#undef KVIK_REPLACE
    return table;
}
#endif

[[maybe_unused]] void add_if_right(const Table& table, Tables& found) {
    (products_agree(table, table_portable) ? found.available : found.rejected).push_back(&table);
}

Tables find_tables() {
    Tables found;
#if defined(KVIK_X86)
    __builtin_cpu_init();
    // The tests for AVX and AVX-512 include whether the system saves the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    [[maybe_unused]] const bool avx512_bf16 =
        avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
        __builtin_cpu_supports("avx512vbmi");
#if defined(KVIK_HAS_AMX)
    static const Table amx = with_tiles("amx", kernels_amx);
    if (avx512_bf16 && may_use_amx()) add_if_right(amx, found);
#endif
#if defined(KVIK_HAS_AVX512_BF16)
    if (avx512_bf16) found.available.push_back(&table_avx512_bf16);
#endif
#if defined(KVIK_HAS_AVX512)
    if (avx512) found.available.push_back(&table_avx512);
#endif
#if defined(KVIK_HAS_AVX2_VNNI)
    if (avx2 && has_avx_vnni()) found.available.push_back(&table_avx2_vnni);
#endif
#if defined(KVIK_HAS_AVX2)
    if (avx2) found.available.push_back(&table_avx2);
#endif
#endif
#if defined(KVIK_ARM)
    [[maybe_unused]] const ArmFeatures arm = arm_features();
#if defined(KVIK_HAS_NEON_I8MM)
    if (arm.dot && arm.i8mm && arm.bf16) add_if_right(table_neon_i8mm, found);
#endif
#if defined(KVIK_HAS_NEON_DOT)
    if (arm.dot) add_if_right(table_neon_dot, found);
#endif
#if defined(KVIK_HAS_NEON)
    add_if_right(table_neon, found);
#endif
#endif
    found.available.push_back(&table_portable);
#if defined(KVIK_HAS_AMX_EMULATED)
    static Table emulations[] = {with_tiles("amx_emulated", kernels_amx_emulated),
                                 with_tiles("wrong_bf16", kernels_amx_emulated),
                                 with_tiles("wrong_i8", kernels_amx_emulated)};
    emulations[1].linear = linear_wrong_bf16;
    emulations[2].linear = linear_wrong_i8;
    if (avx512_bf16)
        for (const Table& table : emulations) add_if_right(table, found);
#endif
    return found;
}

}  // namespace

const Tables& tables() {
    static const Tables found = find_tables();
    return found;
}

}  // namespace kvik

#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cllm {

#if defined(__x86_64__)

namespace {

struct Leaf {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf leaf_of(unsigned leaf, unsigned part) {
    Leaf found;
    if (!__get_cpuid_count(leaf, part, &found.eax, &found.ebx, &found.ecx, &found.edx)) return {};
    return found;
}

bool has_bit(uint64_t bits, int bit) { return bits >> bit & 1; }

// Which registers the system saves when it switches threads. Requires AVX, which needs this, too.
uint64_t saved_registers() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

// Linux grants tiles on request only, because they make a thread's saved registers 8 KB larger.
bool ask_for_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kAskForState = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;
    return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
    return false;
#endif
}

bool has_tiles() {
    constexpr int kTile = 24, kInt8 = 25, kSavedConfig = 17, kSavedData = 18;
    const unsigned features = leaf_of(7, 0).edx;
    if (!has_bit(features, kTile) || !has_bit(features, kInt8)) return false;
    const uint64_t saved = saved_registers();
    return has_bit(saved, kSavedConfig) && has_bit(saved, kSavedData);
}

}  // namespace

bool runs_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool runs_avxvnni() {
    constexpr int kVnni = 4;
    return runs_avx2() && leaf_of(7, 0).eax >= 1 && has_bit(leaf_of(7, 1).eax, kVnni);
}

bool runs_avx512() {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_amx() { return runs_avx512() && has_tiles(); }

bool take_amx() {
    static const bool granted = ask_for_tiles();
    return granted;
}

#else

bool runs_avx2() { return false; }
bool runs_avxvnni() { return false; }
bool runs_avx512() { return false; }
bool has_amx() { return false; }
bool take_amx() { return false; }

#endif

}  // namespace cllm

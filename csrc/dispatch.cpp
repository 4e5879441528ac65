// Which instruction sets this CPU runs, and the table of the chosen one.
#include "dispatch.h"

#include <stdexcept>

namespace cllm {

#if !defined(__x86_64__)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
#endif

namespace {

bool runs_avx2() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

bool runs_avx512() {
#if defined(__x86_64__)
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
    if (runs_avx512()) found.push_back(avx512_kernels());
    if (runs_avx2()) found.push_back(avx2_kernels());
    found.push_back(&generic_kernels());
    return found;
}

const Kernels& select_kernels(const std::string& name) {
    const auto available = available_kernels();
    if (name == "auto") return *available.front();
    std::string names;
    for (const Kernels* kernels : available) {
        if (name == kernels->name) return *kernels;
        names += (names.empty() ? "" : ", ") + std::string(kernels->name);
    }
    throw std::invalid_argument("instruction_set is " + name + ", but this CPU runs " + names + " (or auto)");
}

}  // namespace cllm

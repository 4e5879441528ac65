// The tables of the instruction sets that this CPU runs, and the chosen one.
#include "dispatch.h"

#include <stdexcept>

#include "cpu.h"

namespace cllm {

#if !defined(CLLM_BUILDS_X86)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
#endif
#if !defined(CLLM_BUILDS_AVXVNNI)
const Kernels* avxvnni_kernels() { return nullptr; }
#endif
#if !defined(CLLM_BUILDS_AMX)
const Kernels* amx_kernels() { return nullptr; }
#endif

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
    const auto add_if = [&](const Kernels* kernels, bool (*runs)()) {
        if (kernels && runs()) found.push_back(kernels);
    };
    add_if(amx_kernels(), has_amx);
    add_if(avx512_kernels(), runs_avx512);
    add_if(avxvnni_kernels(), runs_avxvnni);
    add_if(avx2_kernels(), runs_avx2);
    found.push_back(&generic_kernels());
    return found;
}

const Kernels& select_kernels(const std::string& name) {
    const bool any = name == "auto";
    std::string names;
    for (const Kernels* kernels : available_kernels()) {
        names += (names.empty() ? "" : ", ") + std::string(kernels->name);
        if (!any && name != kernels->name) continue;
        if (kernels != amx_kernels() || take_amx()) return *kernels;
        if (!any) throw std::invalid_argument("instruction_set is amx, but the system does not let this process use it; use auto");
    }
    throw std::invalid_argument("instruction_set is " + name + ", but this CPU runs " + names + " (or auto)");
}

}  // namespace cllm

// The choice among the instruction sets that this CPU runs.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace cllm {

// What the CPU has, the best one first; the generic ones always last.
std::vector<const Kernels*> available_kernels();

// "auto" takes the best that the system allows; throws std::invalid_argument if the one named cannot run here.
const Kernels& select_kernels(const std::string& name);

}  // namespace cllm

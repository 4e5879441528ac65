#define CLLM_AVX512
#define CLLM_AMX
#include "attention.inl"
#include "elementwise.inl"
#include "matmul_amx.inl"
#include "sampling.inl"
#include "kernel_table.inl"

namespace cllm {

const Kernels* amx_kernels() { return &amx::kTable; }

}  // namespace cllm

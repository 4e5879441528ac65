#define CLLM_AVX2
#define CLLM_AVXVNNI
#include "attention.inl"
#include "elementwise.inl"
#include "matmul_avx2.inl"
#include "sampling.inl"
#include "kernel_table.inl"

namespace cllm {

const Kernels* avxvnni_kernels() { return &avxvnni::kTable; }

}  // namespace cllm

#define CLLM_AVX2
#include "attention.inl"
#include "elementwise.inl"
#include "matmul_avx2.inl"
#include "recurrence.inl"
#include "sampling.inl"
#include "kernel_table.inl"

namespace cllm {

const Kernels* avx2_kernels() { return &avx2::kTable; }

}  // namespace cllm

#define CLLM_AVX512
#include "attention.inl"
#include "elementwise.inl"
#include "matmul_avx512.inl"
#include "recurrence.inl"
#include "sampling.inl"
#include "kernel_table.inl"

namespace cllm {

const Kernels* avx512_kernels() { return &avx512::kTable; }

}  // namespace cllm

#include "attention.inl"
#include "elementwise.inl"
#include "matmul_generic.inl"
#include "recurrence.inl"
#include "sampling.inl"
#include "kernel_table.inl"

namespace cllm {

const Kernels& generic_kernels() { return generic::kTable; }

}  // namespace cllm

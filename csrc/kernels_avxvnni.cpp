#define CLLM_AVX2
#define CLLM_AVXVNNI
#include "matmul_avx2.inl"
#include "kernel_table.inl"

namespace cllm {

const Kernels* avxvnni_kernels() {
    static const Kernels table = avxvnni::extended(*avx2_kernels());
    return &table;
}

}  // namespace cllm

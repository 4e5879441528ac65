#define CLLM_AVX512
#define CLLM_AMX
#include "matmul_amx.inl"
#include "kernel_table.inl"

namespace cllm {

const Kernels* amx_kernels() {
    static const Kernels table = amx::extended(*avx512_kernels());
    return &table;
}

}  // namespace cllm

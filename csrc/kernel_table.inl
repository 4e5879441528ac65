// The table of one instruction set's kernels; included after all of them.
#pragma once

#include "kernels.h"

namespace cllm {
namespace CLLM_NS {

#if defined(CLLM_AMX)
#define CLLM_NAME "amx"
#define CLLM_MATMUL matmul_by_tiles
#elif defined(CLLM_AVX512)
#define CLLM_NAME "avx512"
#elif defined(CLLM_AVXVNNI)
#define CLLM_NAME "avxvnni"
#elif defined(CLLM_AVX2)
#define CLLM_NAME "avx2"
#else
#define CLLM_NAME "generic"
#endif

#if !defined(CLLM_MATMUL)
#define CLLM_MATMUL matmul
#endif

static constexpr Kernels kTable = {
    CLLM_NAME, kPanelRows, kOwnRows,
    CLLM_MATMUL,
    quantise_row, quantise_columns, rms_norm, rope, spread, silu_mul, add,
    write_kv, attend, merge_states, finish_state,
    argmax, group_maxima, ids_between, weigh, sum_kept, sums_from,
};

}  // namespace CLLM_NS
}  // namespace cllm

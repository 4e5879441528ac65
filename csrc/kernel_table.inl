// The table of one instruction set's kernels; included after all of them.
#pragma once

#include "kernels.h"

namespace cllm {
namespace CLLM_NS {

#if defined(CLLM_AVX512)
#define CLLM_NAME "avx512"
constexpr bool kBiased = true;
#elif defined(CLLM_AVX2)
#define CLLM_NAME "avx2"
constexpr bool kBiased = false;
#else
#define CLLM_NAME "generic"
constexpr bool kBiased = false;
#endif

static constexpr Kernels kTable = {
    CLLM_NAME, kBiased, kPanelRows,
    matmul,
    quantise_row, quantise_columns, rms_norm, rope, spread, silu_mul, add,
    write_kv, attend, merge_states, finish_state,
    argmax, group_maxima, ids_between, weigh, sum_kept, sums_from,
};

}  // namespace CLLM_NS
}  // namespace cllm

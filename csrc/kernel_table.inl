// The table of one instruction set's kernels; included after all of them.
#pragma once

#include "kernels.h"

namespace cllm {
namespace CLLM_NS {

#if defined(CLLM_AMX) || defined(CLLM_AVXVNNI)

#if defined(CLLM_AMX)
constexpr const char* kName = "amx";
constexpr auto kMatmul = matmul_by_tiles;
#else
constexpr const char* kName = "avxvnni";
constexpr auto kMatmul = matmul;
#endif

// These sets have their own matrix products. Everything else is that of the set they extend, not compiled again.
static Kernels extended(Kernels table) {
    table.name = kName;
    table.panel_rows = kPanelRows;
    table.own_rows = kOwnRows;
    table.matmul = kMatmul;
    table.quantise_row = quantise_row;
    table.quantise_columns = quantise_columns;
    return table;
}

#else

#if defined(CLLM_AVX512)
constexpr const char* kName = "avx512";
#elif defined(CLLM_AVX2)
constexpr const char* kName = "avx2";
#else
constexpr const char* kName = "generic";
#endif

static constexpr Kernels kTable = {
    kName, kPanelRows, kOwnRows,
    matmul,
    quantise_row, quantise_columns, rms_norm, rope, cap, spread, silu_mul, gelu_mul, relu2, mul, sigmoid_mul, add,
    add_scaled,
    write_kv, attend, merge_states, finish_state,
    convolve, delta_rule, state_scan,
    argmax, group_maxima, ids_between, weigh, sum_kept, sums_from,
};

#endif

}  // namespace CLLM_NS
}  // namespace cllm

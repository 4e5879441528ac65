// One tile of weights and where its products go: shared by the vectorised files.
#pragma once

#include <algorithm>

#include "quantise.inl"
#include "kernels.h"

namespace cllm {
namespace CLLM_NS {

// Opened, these are like the others, so one kernel serves both.
CLLM_INLINE constexpr Packing opened_like(Packing packing) {
    return packing == Packing::q4_k ? Packing::q4_1 : packing == Packing::q5_k ? Packing::q5_1 : packing;
}

struct TileJob {
    const PackedMatrix& w;
    const QuantRows& inputs;
    int64_t tile;
    const uint8_t* opened;  // this tile, and those computed with it, in the opened form of packed.h; or null
    float* out;
    int64_t out_stride;
    bool add;
};

}  // namespace CLLM_NS
}  // namespace cllm

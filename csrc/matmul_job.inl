// One tile of weights and where its products go: what the vectorised files share.
#pragma once

#include "elementwise.inl"
#include "kernels.h"

namespace cllm {
namespace CLLM_NS {

struct TileJob {
    const PackedMatrix& w;
    const QuantRows& inputs;
    int64_t tile;
    const uint8_t* unpacked;  // nibbles of this tile, and of those computed with it, as bytes; or null
    float* out;
    int64_t out_stride;
    bool add;
};

}  // namespace CLLM_NS
}  // namespace cllm

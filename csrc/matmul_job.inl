// One tile of weights and where its products go: shared by the vectorised files.
#pragma once

#include <algorithm>

#include "quantise.inl"
#include "kernels.h"
#include "spelled_codes.inl"

namespace cllm {
namespace CLLM_NS {

// Opened, these are like the others, so one kernel serves both. Of q3_k the centre moves.
CLLM_INLINE constexpr Packing opened_like(Packing packing) {
    switch (packing) {
        case Packing::q4_k: return Packing::q4_1;
        case Packing::q5_k: return Packing::q5_1;
        case Packing::q3_k: return Packing::q6_k;
        case Packing::mxfp4:
        case Packing::iq3_s: return Packing::q5_0;
        case Packing::iq4_nl:
        case Packing::iq4_xs:
        case Packing::iq3_xxs:
        case Packing::iq2_xxs: return Packing::q8_0;
        case Packing::iq2_xs: return Packing::iq2_s;
        default: return packing;
    }
}

constexpr float kSumOfOffset = -1.0f / 128.0f;  // offsets are -128 times the sum of a group's inputs

// Bits by which the offsets of a centre of 128 are shifted to the right for this one.
CLLM_INLINE constexpr int shift_to(int centre) {
    int bits = 0;
    for (; centre << bits < 128; ++bits) {}
    return bits;
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

// How likely a token is by a row of logits, and which tokens are likelier.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace cllm {

struct Score {
    double logprob;  // NaN if the row has no finite best
    int32_t rank;    // 1: no token is likelier
};

// Writes the `top` likeliest tokens to top_ids, best first, ties by lowest id; -1 where there are no more.
Score score_row(const Kernels& kernels, const float* logits, int64_t n, int32_t target, int top, int32_t* top_ids,
                double* top_logprobs);

}  // namespace cllm

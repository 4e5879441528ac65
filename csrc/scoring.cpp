#include "scoring.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sampling.h"

namespace cllm {
namespace {

int32_t count_greater(const float* values, int64_t n, float than) {
    int32_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += values[i] > than;
    return count;
}

}  // namespace

Score score_row(const Kernels& kernels, const float* logits, int64_t n, int32_t target, int top, int32_t* top_ids,
                double* top_logprobs) {
    const RowSampler sampler(kernels);
    const double peak = double(logits[sampler.argmax(logits, n)]);
    std::fill(top_ids, top_ids + top, -1);
    std::fill(top_logprobs, top_logprobs + top, 0.0);
    if (!std::isfinite(peak)) return {std::numeric_limits<double>::quiet_NaN(), 0};
    const double total = sampler.log_total(logits, n, peak);
    if (top > 0) {
        std::vector<int64_t> best = sampler.largest(logits, n, std::min<int64_t>(top, n));
        std::stable_sort(best.begin(), best.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
        for (size_t i = 0; i < best.size(); ++i) {
            top_ids[i] = int32_t(best[i]);
            top_logprobs[i] = double(logits[best[i]]) - total;
        }
    }
    return {double(logits[target]) - total, 1 + count_greater(logits, n, logits[target])};
}

}  // namespace cllm

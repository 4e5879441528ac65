// Drawing one token from one row of logits, as src/cllm/_native.pyi defines it, without sorting the vocabulary.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace cllm {

struct Truncation {
    double temperature;
    int64_t top_k;  // no limit unless 0 < top_k < n
    double top_p;   // no limit from 1 on
    double min_p;
};

// Each row is processed alone and always in the same way. Any number of threads may call at the same time.
class RowSampler {
public:
    explicit RowSampler(const Kernels& kernels) : kernels_(kernels) {}

    // The first of the largest values, or the first NaN if there is one.
    int64_t argmax(const float* values, int64_t n) const { return kernels_.argmax(values, n); }

    // A copy of the values, with -infinity where the bit of `mask` is 0. The lowest bit of a word is its first value.
    void apply_mask(const float* values, int64_t n, const int32_t* mask, float* out) const;

    // The token that u in [0, 1) selects. `peak` is the largest of the values and finite; none of them is NaN.
    int64_t draw(const float* values, int64_t n, double peak, double u, const Truncation& truncation) const;

    // The logarithm of the sum of exp(values).
    double log_total(const float* values, int64_t n, double peak) const;

    // Ids of the `count` largest values, in the order of ids; ties go to the lowest ids; -infinity is never among them.
    std::vector<int64_t> largest(const float* values, int64_t n, int64_t count) const;

private:
    const Kernels& kernels_;
};

}  // namespace cllm

// Passes over a row of logits, for drawing a token. Included once per instruction set.
#pragma once

#include <cfloat>

#include "kernels.h"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

// The block of a row that begins at `start`; the last one is filled up with -infinity, which nothing below counts.
CLLM_INLINE const float* whole_block(const float* values, int64_t n, int64_t start, float* buffer) {
    if (start + kWeightBlock <= n) return values + start;
    for (int64_t i = 0; i < kWeightBlock; ++i) buffer[i] = start + i < n ? values[start + i] : -INFINITY;
    return buffer;
}

static int64_t argmax(const float* values, int64_t n) {
    float buffer[kWeightBlock], best = -INFINITY;
    int64_t best_start = 0;
    for (int64_t start = 0; start < n; start += kWeightBlock) {
        const float* block = whole_block(values, n, start, buffer);
        Vec peak = Vec::load(block);
        uint32_t numbers = at_least(peak, peak);
        const uint32_t all = uint32_t((uint64_t(1) << Vec::lanes) - 1);
        for (int i = Vec::lanes; i < kWeightBlock; i += Vec::lanes) {
            const Vec x = Vec::load(block + i);
            peak = vmax(x, peak);
            numbers &= at_least(x, x);
        }
        if (numbers != all)
            for (int64_t i = start;; ++i)
                if (values[i] != values[i]) return i;
        const float block_peak = peak.max();
        if (block_peak > best) best = block_peak, best_start = start;
    }
    int64_t i = best_start;
    while (values[i] != best) ++i;
    return i;
}

static int64_t group_maxima(const float* values, int64_t n, float* maxima) {
    constexpr int64_t span = int64_t(kMaximaGroup) * Vec::lanes;
    int64_t groups = 0;
    for (int64_t start = 0; start + span <= n; start += span, groups += Vec::lanes) {
        Vec peak = Vec::all(-INFINITY);
        // In this order vmax takes the old peak if the value is NaN.
        for (int64_t i = start; i < start + span; i += Vec::lanes) peak = vmax(Vec::load(values + i), peak);
        peak.store(maxima + groups);
    }
    return groups;
}

static int64_t ids_between(const float* values, int64_t n, float low, float high, int32_t* ids) {
    float buffer[kWeightBlock];
    const Vec lows = Vec::all(low), highs = Vec::all(high);
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += kWeightBlock) {
        const float* block = whole_block(values, n, start, buffer);
        for (int i = 0; i < kWeightBlock; i += Vec::lanes) {
            const Vec x = Vec::load(block + i);
            for (uint32_t found = at_least(x, lows) & ~at_least(x, highs); found; found &= found - 1)
                ids[count++] = int32_t(start + i + __builtin_ctz(found));
        }
    }
    return count;
}

// x / divisor as a product that is as good as the division, at a fraction of its time.
struct Quotient {
    Vec high, low;
    explicit Quotient(double divisor) {
        const double inverse = 1.0 / divisor;
        high = Vec::all(float(inverse));
        low = Vec::all(float(inverse - double(float(inverse))));
    }
    CLLM_INLINE Vec of(Vec x) const { return fma(x, high, x * low); }
};

static void weigh(const float* values, int64_t n, float peak, double temperature, float min_weight, float* weights,
                  double* block_sums) {
    // Below e^-87 numbers are subnormal, which are slow, and too light to be drawn beside the best token.
    const Vec peaks = Vec::all(peak), lightest = Vec::all(-87.0f), min_weights = Vec::all(min_weight);
    const Quotient by_temperature(temperature);
    float buffer[kWeightBlock];
    for (int64_t start = 0; start < n; start += kWeightBlock) {
        const float* block = whole_block(values, n, start, buffer);
        DoubleSum sum;
        for (int i = 0; i < kWeightBlock; i += Vec::lanes) {
            // -infinity may become NaN here, which fails the comparison, too.
            const Vec x = by_temperature.of(Vec::load(block + i) - peaks);
            const Vec heavy = where_at_least(x, lightest, vexp(vmax(x, lightest)));
            const Vec weight = where_at_least(heavy, min_weights, heavy);
            weight.store(weights + start + i);
            sum.add(weight);
        }
        block_sums[start / kWeightBlock] = sum.total();
    }
}

static void sum_kept(const float* values, const float* weights, int64_t n, float cut, float min_weight,
                     double* block_sums) {
    const Vec cuts = Vec::all(cut), min_weights = Vec::all(min_weight);
    float buffer[kWeightBlock];
    for (int64_t start = 0; start < n; start += kWeightBlock) {
        const float* block = whole_block(values, n, start, buffer);
        DoubleSum sum;
        for (int i = 0; i < kWeightBlock; i += Vec::lanes) {
            const Vec x = Vec::load(block + i), weight = Vec::load(weights + start + i);
            sum.add(where_at_least(weight, min_weights, where_at_least(x, cuts, weight)));
        }
        block_sums[start / kWeightBlock] = sum.total();
    }
}

static void sums_from(const float* values, const float* weights, int64_t n, const float* cuts, int64_t* counts,
                      double* sums) {
    const Vec one = Vec::all(1.0f);
    float buffer[kWeightBlock];
    Vec row_counts[kCuts];
    DoubleSum row_sums[kCuts];
    for (int c = 0; c < kCuts; ++c) row_counts[c] = Vec::zero();
    for (int64_t start = 0; start < n; start += kWeightBlock) {
        const float* block = whole_block(values, n, start, buffer);
        // In float32 within a block: the error is smaller than that of the weights.
        Vec block_sums[kCuts];
        for (int c = 0; c < kCuts; ++c) block_sums[c] = Vec::zero();
        for (int i = 0; i < kWeightBlock; i += Vec::lanes) {
            const Vec x = Vec::load(block + i), weight = Vec::load(weights + start + i);
            for (int c = 0; c < kCuts; ++c) {
                row_counts[c] = add_where_at_least(row_counts[c], x, Vec::all(cuts[c]), one);
                block_sums[c] = add_where_at_least(block_sums[c], x, Vec::all(cuts[c]), weight);
            }
        }
        for (int c = 0; c < kCuts; ++c) row_sums[c].add(block_sums[c]);
    }
    for (int c = 0; c < kCuts; ++c) {
        DoubleSum count;
        count.add(row_counts[c]);
        counts[c] = int64_t(count.total());
        sums[c] = row_sums[c].total();
    }
}

}  // namespace CLLM_NS
}  // namespace cllm

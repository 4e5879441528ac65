#include <immintrin.h>

#include "limits_loops.h"

namespace cllm {
namespace {

constexpr int kSums = 8;

double dots() {
    const __m256i weights = _mm256_set1_epi8(3), activations = _mm256_set1_epi8(2);
    __m256i sums[kSums];
    for (auto& sum : sums) {
        sum = _mm256_setzero_si256();
        CLLM_OPAQUE(sum);
    }
    for (int group = 0; group < kGroupsPerCall; group++)
        for (int dot = 0; dot < kGroupDots; dot++)
#pragma GCC unroll 8
            for (auto& sum : sums) sum = _mm256_dpbusd_avx_epi32(sum, weights, activations);
    __m256i total = _mm256_setzero_si256();
    for (auto& sum : sums) total = _mm256_add_epi32(total, sum);
    keep(total);
    return double(kGroupsPerCall) * kGroupDots * kSums * 32;
}

// Fewer sums at a time: they and the floats must fit into 16 registers.
double grouped_dots() {
    constexpr int kGroupSums = 6;
    const __m256i weights = _mm256_set1_epi8(3), activations = _mm256_set1_epi8(2);
    const __m256 scale = _mm256_set1_ps(1e-6f);
    __m256 floats[kGroupSums];
    for (auto& value : floats) value = _mm256_setzero_ps();
    for (int group = 0; group < kGroupsPerCall; group++) {
        __m256i sums[kGroupSums];
        for (auto& sum : sums) {
            sum = _mm256_setzero_si256();
            CLLM_OPAQUE(sum);
        }
        for (int dot = 0; dot < kGroupDots; dot++)
#pragma GCC unroll 6
            for (auto& sum : sums) sum = _mm256_dpbusd_avx_epi32(sum, weights, activations);
#pragma GCC unroll 6
        for (int i = 0; i < kGroupSums; i++) floats[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[i]), scale, floats[i]);
    }
    __m256 total = _mm256_setzero_ps();
    for (auto& value : floats) total = _mm256_add_ps(total, value);
    keep(total);
    return double(kGroupsPerCall) * kGroupDots * kGroupSums * 32;
}

}  // namespace

Dots avxvnni_dots() { return {dots, grouped_dots}; }

}  // namespace cllm

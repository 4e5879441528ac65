// Rows of activations, quantised for the matrix products. Included once per instruction set: how many rows make a panel depends
// on it.
#pragma once

#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

#if defined(CLLM_AMX)
constexpr int kPanelRows = 16, kPanelCols = 32, kOwnRows = 4;  // a group of a panel is a tile
#elif defined(CLLM_AVX512)
constexpr int kPanelRows = 6, kPanelCols = 4, kOwnRows = 6;
#else
constexpr int kPanelRows = 4, kPanelCols = 4, kOwnRows = 4;
#endif

CLLM_INLINE float largest_magnitude_of_32(const float* x) {
    Vec best = vabs(Vec::load(x));
    for (int i = Vec::lanes; i < 32; i += Vec::lanes) best = vmax(best, vabs(Vec::load(x + i)));
    return best.max();
}

// The 16 values x * factor, rounded, as bytes; returns their sum.
CLLM_INLINE int32_t round_16(const float* x, float factor, int8_t* out) {
#if defined(CLLM_AVX512)
    // NaN, also from an infinite factor, converts to -2^31; clamped, so that sums of it cannot overflow.
    const __m512i converted = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor)));
    const __m512i whole = _mm512_max_epi32(converted, _mm512_set1_epi32(-128));
    _mm_storeu_si128((__m128i*)out, _mm512_cvtsepi32_epi8(whole));
    return _mm512_reduce_add_epi32(whole);
#else
    float rounded[16];
    for (int i = 0; i < 16; i += Vec::lanes) vround(Vec::load(x + i) * Vec::all(factor)).store(rounded + i);
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) {
        out[i] = int8_t(rounded[i]);
        sum += out[i];
    }
    return sum;
#endif
}

// Group `g` of a row: 32 values.
static CLLM_INLINE void put_group(const float* x, int64_t row, int64_t g, const QuantRows& out) {
    const int64_t groups = out.cols / 32, panel = row / kPanelRows, lane = row % kPanelRows;
    int8_t* values = out.values + (panel * out.cols + g * 32) * kPanelRows + lane * kPanelCols;
    const float peak = largest_magnitude_of_32(x);
    const float factor = peak > 0.0f ? 127.0f / peak : 0.0f, scale = peak / 127.0f;
    alignas(64) int8_t bytes[32];
    const int32_t low = round_16(x, factor, bytes), high = round_16(x + 16, factor, bytes + 16);
    for (int col = 0; col < 32; col += kPanelCols) std::memcpy(values + col * kPanelRows, bytes + col, kPanelCols);
    const int64_t at = (panel * groups + g) * kPanelRows + lane;
    out.scales[at] = scale;
    out.sums[at] = scale * float(low + high);
    out.offsets32[at] = -128 * (low + high);
    const int64_t at16 = (panel * groups * 2 + g * 2) * kPanelRows + lane;
    out.offsets16[at16] = -128 * low;
    out.offsets16[at16 + kPanelRows] = -128 * high;
}

static void quantise_row(const float* x, int64_t row, const QuantRows& out) {
    for (int64_t g = 0; g < out.cols / 32; ++g) put_group(x + g * 32, row, g, out);
}

static void quantise_columns(const float* x, int64_t rows, int64_t first_group, int64_t groups, const QuantRows& out) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t g = 0; g < groups; ++g, x += 32) put_group(x, row, first_group + g, out);
}

}  // namespace CLLM_NS
}  // namespace cllm

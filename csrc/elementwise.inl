// Everything that is not a matrix product or attention: norm, rotation, activation, quantising rows of activations.
// Included once per instruction set. Lengths need not be whole vectors; the rest is done one by one, at the end.
#pragma once

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

static void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    Vec squares[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    int64_t i = 0;
    for (; i + 4 * Vec::lanes <= n; i += 4 * Vec::lanes)
        for (int k = 0; k < 4; ++k) {
            const Vec part = Vec::load(x + i + k * Vec::lanes);
            squares[k] = fma(part, part, squares[k]);
        }
    float total = ((squares[0] + squares[1]) + (squares[2] + squares[3])).sum();
    for (; i < n; ++i) total += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(total / float(n) + eps);
    const Vec factors = Vec::all(factor);
    for (i = 0; i + Vec::lanes <= n; i += Vec::lanes)
        (Vec::load(x + i) * factors * Vec::load(weight + i)).store(out + i);
    for (; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

static void add(const float* x, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + Vec::lanes <= n; i += Vec::lanes) (Vec::load(to + i) + Vec::load(x + i)).store(to + i);
    for (; i < n; ++i) to[i] += x[i];
}

CLLM_INLINE Vec silu(Vec x) { return x / (Vec::all(1.0f) + vexp(Vec::zero() - x)); }

static void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + Vec::lanes <= n; i += Vec::lanes) (silu(Vec::load(gate + i)) * Vec::load(up + i)).store(out + i);
    if (i == n) return;
    float last_gate[Vec::lanes] = {}, last_up[Vec::lanes] = {}, last[Vec::lanes];
    for (int64_t k = i; k < n; ++k) last_gate[k - i] = gate[k], last_up[k - i] = up[k];
    (silu(Vec::load(last_gate)) * Vec::load(last_up)).store(last);
    for (int64_t k = i; k < n; ++k) out[k] = last[k - i];
}

static void rope(float* heads, int n_heads, int head_dim, int n_rot, const float* cosines, const float* sines, bool neox,
                 float scale) {
    const int half = n_rot / 2;
    for (int head = 0; head < n_heads; ++head) {
        float* x = heads + int64_t(head) * head_dim;
        const int step = neox ? 1 : 2, partner = neox ? half : 1;
        for (int i = 0; i < half; ++i) {
            const float a = x[i * step], b = x[i * step + partner];
            x[i * step] = (a * cosines[i] - b * sines[i]) * scale;
            x[i * step + partner] = (a * sines[i] + b * cosines[i]) * scale;
        }
        for (int i = n_rot; i < head_dim; ++i) x[i] *= scale;
    }
}

// The Hadamard transform of each head, scaled to keep lengths, in parts of the largest power of two that divides it. Dot
// products of two heads stay what they were, but a value far larger than its neighbours, which would set the scale for all
// of them when they are quantised, is shared out among all.
static void spread(float* heads, int n_heads, int head_dim) {
    const int part = head_dim & -head_dim;
    const float scale = 1.0f / std::sqrt(float(part));
    for (float* x = heads; x < heads + int64_t(n_heads) * head_dim; x += part) {
        for (int half = 1; half < part; half *= 2)
            for (int i = 0; i < part; i += 2 * half)
                for (int j = i; j < i + half; ++j) {
                    const float a = x[j], b = x[j + half];
                    x[j] = a + b;
                    x[j + half] = a - b;
                }
        for (int i = 0; i < part; ++i) x[i] *= scale;
    }
}

CLLM_INLINE float largest_magnitude_of_32(const float* x) {
    Vec best = vabs(Vec::load(x));
    for (int i = Vec::lanes; i < 32; i += Vec::lanes) best = vmax(best, vabs(Vec::load(x + i)));
    return best.max();
}

// The 16 values x * factor, rounded, as bytes; returns their sum.
CLLM_INLINE int32_t round_16(const float* x, float factor, int8_t* out) {
#if defined(CLLM_AVX512)
    // What is no number, or times an infinite factor, converts to -2^31; bounded, so that sums of it cannot overflow.
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

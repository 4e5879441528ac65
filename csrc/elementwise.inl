// Element-wise and row-wise operations: norm, rotation, activation, sums.
// Included once per instruction set. Lengths need not be whole vectors; the rest is done one by one, at the end.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

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

static void add_scaled(const float* x, int64_t n, float scale, float total, float* to) {
    const Vec scales = Vec::all(scale), totals = Vec::all(total);
    int64_t i = 0;
    for (; i + Vec::lanes <= n; i += Vec::lanes)
        ((Vec::load(to + i) + Vec::load(x + i) * scales) * totals).store(to + i);
    for (; i < n; ++i) to[i] = (to[i] + x[i] * scale) * total;
}

CLLM_INLINE Vec silu(Vec x) { return x / (Vec::all(1.0f) + vexp(Vec::zero() - x)); }

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x times the sigmoid of 2 * u.
CLLM_INLINE Vec gelu(Vec x) {
    const Vec cubic = fma(x * x * x, Vec::all(0.044715f), x);
    return x / (Vec::all(1.0f) + vexp(cubic * Vec::all(-1.5957691216057308f)));
}

// out = of(a, b) for whole vectors; the last ones in a vector that is filled up, so that every value is computed alike.
template <class Of>
static CLLM_INLINE void each_vector(const float* a, const float* b, int64_t n, float* out, Of of) {
    int64_t i = 0;
    for (; i + Vec::lanes <= n; i += Vec::lanes) of(Vec::load(a + i), Vec::load(b + i)).store(out + i);
    if (i == n) return;
    float last_a[Vec::lanes] = {}, last_b[Vec::lanes] = {}, last[Vec::lanes];
    for (int64_t k = i; k < n; ++k) last_a[k - i] = a[k], last_b[k - i] = b[k];
    of(Vec::load(last_a), Vec::load(last_b)).store(last);
    for (int64_t k = i; k < n; ++k) out[k] = last[k - i];
}

static void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
    each_vector(gate, up, n, out, [](Vec g, Vec u) { return silu(g) * u; });
}

static void gelu_mul(const float* gate, const float* up, int64_t n, float* out) {
    each_vector(gate, up, n, out, [](Vec g, Vec u) { return gelu(g) * u; });
}

static void relu2(const float* x, int64_t n, float* out) {
    each_vector(x, x, n, out, [](Vec v, Vec) {
        const Vec above = vmax(v, Vec::zero());
        return above * above;
    });
}

static void mul(const float* a, const float* b, int64_t n, float* out) {
    each_vector(a, b, n, out, [](Vec x, Vec y) { return x * y; });
}

static void sigmoid_mul(const float* gate, const float* x, int64_t n, float* out) {
    each_vector(gate, x, n, out, [](Vec g, Vec v) { return v / (Vec::all(1.0f) + vexp(Vec::zero() - g)); });
}

static void cap(float* x, int64_t n, float scale, float softcap) {
    if (softcap == 0.0f) return each_vector(x, x, n, x, [&](Vec v, Vec) { return v * Vec::all(scale); });
    const Vec scales = Vec::all(scale / softcap), caps = Vec::all(softcap);
    each_vector(x, x, n, x, [&](Vec v, Vec) { return vtanh(v * scales) * caps; });
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
// products of two heads stay the same, but a value far larger than its neighbours, which would set the scale for all of them
// when they are quantised, is spread over all.
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

}  // namespace CLLM_NS
}  // namespace cllm

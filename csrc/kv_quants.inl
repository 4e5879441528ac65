// K and V as q8_0 and q4_0: 32 values of one token become a scale and 32 codes, of 8 or 4 bits.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

constexpr int kQuantGroup = 32;

// The scale as stored; finite whatever the input.
static CLLM_INLINE uint16_t stored_scale(float scale) {
    const float largest = 65504.0f;
    return f32_to_f16(vmax(vmin(Vec::all(scale), Vec::all(largest)), Vec::all(-largest)).max());
}

static CLLM_INLINE float inverse_or_zero(float x) { return x == 0.0f ? 0.0f : 1.0f / x; }

// Computed from the stored scale, so that its rounding costs nothing.
static CLLM_INLINE void quantise_to_bytes(const float* x, uint16_t scale, uint8_t* codes) {
    const Vec inverse = Vec::all(inverse_or_zero(f16_to_f32(scale))), limit = Vec::all(127.0f);
    float rounded[kQuantGroup];
    for (int i = 0; i < kQuantGroup; i += Vec::lanes) {
        vmax(vmin(vround(Vec::load(x + i) * inverse), limit), Vec::zero() - limit).store(rounded + i);
    }
    for (int i = 0; i < kQuantGroup; ++i) codes[i] = uint8_t(int8_t(rounded[i]));
}

// The 16 values a nibble stands for, in units of 1/16 of the scale. Spread heads are nearly normal, so levels lie densely
// around zero: Lloyd's centroids for 32 normal values divided by the furthest of them, with the scale chosen as below.
// Against even steps the squared error is a fifth smaller.
constexpr int8_t kLevels[16] = {-127, -101, -79, -62, -48, -34, -22, -10, 2, 13, 24, 36, 50, 65, 83, 107};
constexpr float kLevelUnit = 1.0f / 16.0f;

// For each value the nearest level: the sum of `step` over the levels up to it.
template <class Step>
static CLLM_INLINE Vec climb_levels(Vec x, float lowest, Step step) {
    Vec reached = Vec::all(lowest);
#pragma GCC unroll 16
    for (int i = 1; i < 16; ++i) {
        const float border = 0.5f * float(kLevels[i - 1] + kLevels[i]);
        reached = add_where_at_least(reached, x, Vec::all(border), Vec::all(step(i)));
    }
    return reached;
}
static CLLM_INLINE Vec nearest_level(Vec x) {
    return climb_levels(x, kLevels[0], [](int i) { return float(kLevels[i] - kLevels[i - 1]); });
}
static CLLM_INLINE Vec number_of_nearest_level(Vec x) {
    return climb_levels(x, 0.0f, [](int) { return 1.0f; });
}

// The factor of a level, given the scale as stored.
static CLLM_INLINE float level_size(uint16_t scale) { return f16_to_f32(scale) * kLevelUnit; }

// The furthest value is put near the lowest level or near the highest, a little inside or outside. Each choice rounds the
// values to levels, for which the best size is known: the one that leaves the least squared error.
static CLLM_INLINE uint16_t best_scale_of_levels(const float* x, float furthest) {
    float best = 0.0f, most = 0.0f;
    constexpr float candidates[] = {-120.0f, -132.0f, 108.0f, 120.0f};
    for (const float level : candidates) {
        const Vec inverse = Vec::all(inverse_or_zero(furthest / level));
        Vec products = Vec::zero(), squares = Vec::zero();
        for (int i = 0; i < kQuantGroup; i += Vec::lanes) {
            const Vec value = Vec::load(x + i), near = nearest_level(value * inverse);
            products = fma(value, near, products);
            squares = fma(near, near, squares);
        }
        const float size = products.sum() / squares.sum(), explained = products.sum() * size;
        if (explained > most) most = explained, best = size;
    }
    return stored_scale(best / kLevelUnit);
}

static CLLM_INLINE void quantise_to_levels(const float* x, uint16_t scale, uint8_t* codes) {
    const Vec inverse = Vec::all(inverse_or_zero(level_size(scale)));
    float numbers[kQuantGroup];
    for (int i = 0; i < kQuantGroup; i += Vec::lanes) number_of_nearest_level(Vec::load(x + i) * inverse).store(numbers + i);
    for (int i = 0; i < kQuantGroup; ++i) codes[i] = uint8_t(int(numbers[i]));
}

// Writes the codes of 32 values, bytes or numbers of levels, and returns the scale.
static uint16_t quantise_group(KVType type, const float* x, uint8_t* codes) {
    Vec largest = Vec::load(x), smallest = largest;
    for (int i = Vec::lanes; i < kQuantGroup; i += Vec::lanes) {
        largest = vmax(largest, Vec::load(x + i));
        smallest = vmin(smallest, Vec::load(x + i));
    }
    const float top = largest.max(), bottom = (Vec::zero() - smallest).max();
    if (type == KVType::q8_0) {
        const uint16_t scale = stored_scale((top > bottom ? top : bottom) / 127.0f);
        quantise_to_bytes(x, scale, codes);
        return scale;
    }
    const uint16_t scale = best_scale_of_levels(x, top > bottom ? top : -bottom);
    quantise_to_levels(x, scale, codes);
    return scale;
}

}  // namespace CLLM_NS
}  // namespace cllm

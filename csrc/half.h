// Conversions of 16-bit floats that every CPU can run. The SIMD files have faster ones for whole vectors.
#pragma once

#include <cstdint>
#include <cstring>

// Files that are compiled once per instruction set must not emit out-of-line copies of shared functions: the linker would
// keep one of them for all, perhaps with instructions that this CPU does not have.
#define CLLM_INLINE inline __attribute__((always_inline))

namespace cllm {

CLLM_INLINE float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

CLLM_INLINE uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

CLLM_INLINE float f16_to_f32(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16;
    const uint32_t rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
    if (rest >= 0x0400u) return bits_to_float(sign | ((rest << 13) + (112u << 23)));
    // Subnormal halves are whole multiples of 2^-24, which float represents exactly.
    const float magnitude = float(rest) * 5.9604644775390625e-08f;
    return bits_to_float(sign | float_to_bits(magnitude));
}

// Rounds to nearest, ties to even, as the CPU's own instruction does; NaN stays NaN.
CLLM_INLINE uint16_t f32_to_f16(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Adding 0.5 leaves the half's subnormal bits, rounded by the FPU, at the bottom of the mantissa.
        const float shifted = bits_to_float(magnitude) + 0.5f;
        return uint16_t(sign | (float_to_bits(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0x0fffu + ((magnitude >> 13) & 1u);
    return uint16_t(sign | ((rounded - (112u << 23)) >> 13));
}

CLLM_INLINE float bf16_to_f32(uint16_t value) { return bits_to_float(uint32_t(value) << 16); }

}  // namespace cllm

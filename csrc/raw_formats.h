// The types of weights as GGUF stores them: for each, how it is packed, and how one block of it is read.
//
// A format has `columns` and `bytes` of a block, and what packed.h calls packing, group and has_min. Those with scales
// have `read`, which gives a block's quants group after group (of q4, a byte holds columns k and k + 16 of its group)
// and the groups' scales and minima as halves; what fits no half becomes infinite, and the caller refuses it.
#pragma once

#include <stdexcept>
#include <string>

#include "packed.h"

namespace cllm {

template <class T>
CLLM_INLINE T read_as(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

struct Q4Packing {
    static constexpr Packing packing = Packing::q4;
    static constexpr int group = 32;
    static constexpr bool has_min = true;
};

template <int kGroup, bool kHasMin>
struct Q8Packing {
    static constexpr Packing packing = Packing::q8;
    static constexpr int group = kGroup;
    static constexpr bool has_min = kHasMin;
};

struct Q40 : Q4Packing {
    static constexpr int columns = 32, bytes = 18;
    static CLLM_INLINE void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minima) {
        scales[0] = read_as<uint16_t>(block);
        minima[0] = f32_to_f16(-8.0f * f16_to_f32(scales[0]));
        std::memcpy(values, block + 2, 16);
    }
};

struct Q41 : Q4Packing {
    static constexpr int columns = 32, bytes = 20;
    static CLLM_INLINE void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minima) {
        scales[0] = read_as<uint16_t>(block);
        minima[0] = read_as<uint16_t>(block + 2);
        std::memcpy(values, block + 4, 16);
    }
};

// The 32 quants of a Q5_0 or Q5_1 block, 0..31, less `offset`.
CLLM_INLINE void read_fives(uint32_t high_bits, const uint8_t* nibbles, int offset, uint8_t* values) {
    for (int k = 0; k < 16; ++k) {
        const int low = (nibbles[k] & 15) | int((high_bits >> k) & 1u) << 4;
        const int high = (nibbles[k] >> 4) | int((high_bits >> (k + 16)) & 1u) << 4;
        values[k] = uint8_t(low - offset);
        values[k + 16] = uint8_t(high - offset);
    }
}

struct Q50 : Q8Packing<32, false> {
    static constexpr int columns = 32, bytes = 22;
    static CLLM_INLINE void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t*) {
        scales[0] = read_as<uint16_t>(block);
        read_fives(read_as<uint32_t>(block + 2), block + 6, 16, values);
    }
};

struct Q51 : Q8Packing<32, true> {
    static constexpr int columns = 32, bytes = 24;
    static CLLM_INLINE void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minima) {
        scales[0] = read_as<uint16_t>(block);
        minima[0] = read_as<uint16_t>(block + 2);
        read_fives(read_as<uint32_t>(block + 4), block + 8, 0, values);
    }
};

struct Q80 : Q8Packing<32, false> {
    static constexpr int columns = 32, bytes = 34;
    static CLLM_INLINE void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t*) {
        scales[0] = read_as<uint16_t>(block);
        std::memcpy(values, block + 2, 32);
    }
};

// Q4_K and Q5_K begin with two halves, which scale 8 pairs of 6-bit scale and minimum; of the pairs 4 to 7, the upper
// two bits of each number lie in the upper bits of the pairs 0 to 3.
CLLM_INLINE void read_pairs(const uint8_t* block, uint16_t* scales, uint16_t* minima) {
    const float d = f16_to_f32(read_as<uint16_t>(block));
    const float dmin = f16_to_f32(read_as<uint16_t>(block + 2));
    const uint8_t* bits = block + 4;
    for (int s = 0; s < 8; ++s) {
        const int scale = s < 4 ? bits[s] & 63 : (bits[s + 4] & 15) | (bits[s - 4] >> 6 << 4);
        const int minimum = s < 4 ? bits[s + 4] & 63 : (bits[s + 4] >> 4) | (bits[s] >> 6 << 4);
        scales[s] = f32_to_f16(d * float(scale));
        minima[s] = f32_to_f16(-dmin * float(minimum));
    }
}

struct Q4K : Q4Packing {
    static constexpr int columns = 256, bytes = 144;
    static CLLM_INLINE void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minima) {
        read_pairs(block, scales, minima);
        for (int pair = 0; pair < 4; ++pair) {
            const uint8_t* nibbles = block + 16 + 32 * pair;  // low ones: one group, high ones: the next
            uint8_t* out = values + 32 * pair;
            for (int k = 0; k < 16; ++k) {
                out[k] = uint8_t((nibbles[k] & 15) | (nibbles[k + 16] << 4));
                out[k + 16] = uint8_t((nibbles[k] >> 4) | (nibbles[k + 16] & 0xf0));
            }
        }
    }
};

struct Q5K : Q8Packing<32, true> {
    static constexpr int columns = 256, bytes = 176;
    static CLLM_INLINE void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minima) {
        read_pairs(block, scales, minima);
        const uint8_t* high_bits = block + 16;  // bit s of byte k: column k of group s
        for (int pair = 0; pair < 4; ++pair) {
            const uint8_t* nibbles = block + 48 + 32 * pair;
            uint8_t* out = values + 64 * pair;
            for (int k = 0; k < 32; ++k) {
                out[k] = uint8_t((nibbles[k] & 15) | ((high_bits[k] >> (2 * pair)) & 1) << 4);
                out[k + 32] = uint8_t((nibbles[k] >> 4) | ((high_bits[k] >> (2 * pair + 1)) & 1) << 4);
            }
        }
    }
};

struct Q6K : Q8Packing<16, false> {
    static constexpr int columns = 256, bytes = 210;
    static CLLM_INLINE void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t*) {
        const float d = f16_to_f32(read_as<uint16_t>(block + 208));
        for (int s = 0; s < 16; ++s) scales[s] = f32_to_f16(d * float(read_as<int8_t>(block + 192 + s)));
        for (int half = 0; half < 2; ++half) {
            const uint8_t* nibbles = block + 64 * half;
            const uint8_t* high_bits = block + 128 + 32 * half;  // two of each of four columns that are 32 apart
            uint8_t* out = values + 128 * half;
            for (int k = 0; k < 32; ++k) {
                out[k] = uint8_t(((nibbles[k] & 15) | (high_bits[k] & 3) << 4) - 32);
                out[k + 32] = uint8_t(((nibbles[k + 32] & 15) | ((high_bits[k] >> 2) & 3) << 4) - 32);
                out[k + 64] = uint8_t(((nibbles[k] >> 4) | ((high_bits[k] >> 4) & 3) << 4) - 32);
                out[k + 96] = uint8_t(((nibbles[k + 32] >> 4) | (high_bits[k] >> 6) << 4) - 32);
            }
        }
    }
};

template <class Word, Packing kPacking, uint32_t kExponent>
struct Floats {
    using word = Word;
    static constexpr Packing packing = kPacking;
    static constexpr uint32_t exponent = kExponent;  // its bits are all set in infinities and NaNs
    static constexpr int columns = 1, bytes = sizeof(Word), group = 1;
    static constexpr bool has_min = false;
};
using F32 = Floats<uint32_t, Packing::f32, 0x7f800000u>;
using F16 = Floats<uint16_t, Packing::f16, 0x7c00u>;
using BF16 = Floats<uint16_t, Packing::bf16, 0x7f80u>;

// What GGUF's number of a type stands for: answers `blocks` or `floats`, called with the format.
template <class Blocks, class Plain>
auto with_format(GgmlType type, Blocks blocks, Plain floats) {
    switch (type) {
        case GgmlType::f32: return floats(F32());
        case GgmlType::f16: return floats(F16());
        case GgmlType::bf16: return floats(BF16());
        case GgmlType::q4_0: return blocks(Q40());
        case GgmlType::q4_1: return blocks(Q41());
        case GgmlType::q5_0: return blocks(Q50());
        case GgmlType::q5_1: return blocks(Q51());
        case GgmlType::q8_0: return blocks(Q80());
        case GgmlType::q4_k: return blocks(Q4K());
        case GgmlType::q5_k: return blocks(Q5K());
        case GgmlType::q6_k: return blocks(Q6K());
    }
    throw std::invalid_argument("weights of GGML type " + std::to_string(int(type)) + " cannot be read");
}

template <class Any>
auto with_format(GgmlType type, Any any) {
    return with_format(type, any, any);
}

}  // namespace cllm

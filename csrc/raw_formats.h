// The types of weights as GGUF stores them: for each, how it is packed, and how one block of it is read.
//
// A format has `columns` and `bytes` of a block and its packing. Those with scales have `read`, which fills a RawBlock.
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

// A block of one row: one byte a quant, as it is stored (of q8_0 signed), the halves, and the numbers of the groups: of q4_k
// and q5_k 8 of scales and 8 of minima, of q6_k 16 signed ones of scales, of mxfp4 the exponent, otherwise as packed.h has
// them. Types in codes have no quants but codes and, for each run, signs.
struct RawBlock {
    alignas(16) uint8_t quants[256] = {};
    uint16_t scale = 0, minimum = 0;
    uint8_t numbers[16] = {};
    uint16_t codes[64] = {};
    uint32_t signs[8] = {};

    CLLM_INLINE bool finite() const { return (scale & 0x7c00u) != 0x7c00u && (minimum & 0x7c00u) != 0x7c00u; }
};

CLLM_INLINE void read_nibbles(const uint8_t* nibbles, uint8_t* quants) {
    for (int k = 0; k < 16; ++k) {
        quants[k] = nibbles[k] & 15;
        quants[k + 16] = nibbles[k] >> 4;
    }
}

// Adds bit k of `bits` to quant k, as its fifth.
CLLM_INLINE void read_fifths(uint32_t bits, uint8_t* quants) {
    for (int k = 0; k < 32; ++k) quants[k] = uint8_t(quants[k] | ((bits >> k) & 1u) << 4);
}

struct Q40 {
    static constexpr Packing packing = Packing::q4_0;
    static constexpr int columns = 32, bytes = 18;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        read_nibbles(raw + 2, block.quants);
    }
};

struct Q41 {
    static constexpr Packing packing = Packing::q4_1;
    static constexpr int columns = 32, bytes = 20;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        block.minimum = read_as<uint16_t>(raw + 2);
        read_nibbles(raw + 4, block.quants);
    }
};

struct Q50 {
    static constexpr Packing packing = Packing::q5_0;
    static constexpr int columns = 32, bytes = 22;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        read_nibbles(raw + 6, block.quants);
        read_fifths(read_as<uint32_t>(raw + 2), block.quants);
    }
};

struct Q51 {
    static constexpr Packing packing = Packing::q5_1;
    static constexpr int columns = 32, bytes = 24;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        block.minimum = read_as<uint16_t>(raw + 2);
        read_nibbles(raw + 8, block.quants);
        read_fifths(read_as<uint32_t>(raw + 4), block.quants);
    }
};

struct Q80 {
    static constexpr Packing packing = Packing::q8_0;
    static constexpr int columns = 32, bytes = 34;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        std::memcpy(block.quants, raw + 2, 32);
    }
};

// Q4_K and Q5_K begin with two halves, which scale 8 pairs of 6-bit scale and minimum; of the pairs 4 to 7, the upper
// two bits of each number lie in the upper bits of the pairs 0 to 3.
CLLM_INLINE void read_pairs(const uint8_t* raw, RawBlock& block) {
    block.scale = read_as<uint16_t>(raw);
    block.minimum = read_as<uint16_t>(raw + 2);
    const uint8_t* bits = raw + 4;
    for (int s = 0; s < 4; ++s) {
        block.numbers[s] = bits[s] & 63;
        block.numbers[s + 4] = uint8_t((bits[s + 8] & 15) | (bits[s] >> 6 << 4));
        block.numbers[s + 8] = bits[s + 4] & 63;
        block.numbers[s + 12] = uint8_t((bits[s + 8] >> 4) | (bits[s + 4] >> 6 << 4));
    }
}

struct Q4K {
    static constexpr Packing packing = Packing::q4_k;
    static constexpr int columns = 256, bytes = 144;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        read_pairs(raw, block);
        for (int pair = 0; pair < 4; ++pair) {
            const uint8_t* nibbles = raw + 16 + 32 * pair;  // low ones: one group, high ones: the next
            uint8_t* out = block.quants + 64 * pair;
            for (int k = 0; k < 32; ++k) {
                out[k] = nibbles[k] & 15;
                out[k + 32] = nibbles[k] >> 4;
            }
        }
    }
};

struct Q5K {
    static constexpr Packing packing = Packing::q5_k;
    static constexpr int columns = 256, bytes = 176;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        read_pairs(raw, block);
        const uint8_t* high_bits = raw + 16;  // bit s of byte k: column k of group s
        for (int pair = 0; pair < 4; ++pair) {
            const uint8_t* nibbles = raw + 48 + 32 * pair;
            uint8_t* out = block.quants + 64 * pair;
            for (int k = 0; k < 32; ++k) {
                out[k] = uint8_t((nibbles[k] & 15) | ((high_bits[k] >> (2 * pair)) & 1) << 4);
                out[k + 32] = uint8_t((nibbles[k] >> 4) | ((high_bits[k] >> (2 * pair + 1)) & 1) << 4);
            }
        }
    }
};

struct Q6K {
    static constexpr Packing packing = Packing::q6_k;
    static constexpr int columns = 256, bytes = 210;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw + 208);
        std::memcpy(block.numbers, raw + 192, 16);
        for (int half = 0; half < 2; ++half) {
            const uint8_t* nibbles = raw + 64 * half;
            const uint8_t* high_bits = raw + 128 + 32 * half;  // two of each of four columns that are 32 apart
            uint8_t* out = block.quants + 128 * half;
            for (int k = 0; k < 32; ++k) {
                out[k] = uint8_t((nibbles[k] & 15) | (high_bits[k] & 3) << 4);
                out[k + 32] = uint8_t((nibbles[k + 32] & 15) | ((high_bits[k] >> 2) & 3) << 4);
                out[k + 64] = uint8_t((nibbles[k] >> 4) | ((high_bits[k] >> 4) & 3) << 4);
                out[k + 96] = uint8_t((nibbles[k + 32] >> 4) | (high_bits[k] >> 6) << 4);
            }
        }
    }
};

struct MXFP4 {
    static constexpr Packing packing = Packing::mxfp4;
    static constexpr int columns = 32, bytes = 17;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        constexpr uint8_t largest = 252;  // of exponents whose largest weight is finite
        block.numbers[0] = raw[0];
        block.scale = raw[0] > largest ? 0x7c00 : 0;
        read_nibbles(raw + 1, block.quants);
    }
};

struct IQ4NL {
    static constexpr Packing packing = Packing::iq4_nl;
    static constexpr int columns = 32, bytes = 18;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        read_nibbles(raw + 2, block.quants);
    }
};

CLLM_INLINE uint8_t read_nibble(const uint8_t* nibbles, int k) { return nibbles[k / 2] >> 4 * (k % 2) & 15; }

struct IQ4XS {
    static constexpr Packing packing = Packing::iq4_xs;
    static constexpr int columns = 256, bytes = 136;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        const uint16_t upper = read_as<uint16_t>(raw + 2);
        for (int g = 0; g < 8; ++g) {
            block.numbers[g] = uint8_t(read_nibble(raw + 4, g) | (upper >> 2 * g & 3) << 4);
            read_nibbles(raw + 8 + 16 * g, block.quants + 32 * g);
        }
    }
};

// Of each half of a block: 32 bytes, which have two bits of each of four columns that are 32 apart.
CLLM_INLINE void read_twos(const uint8_t* twos, uint8_t* quants) {
    for (int run = 0; run < 8; ++run)
        for (int k = 0; k < 32; ++k) quants[32 * run + k] = twos[run / 4 * 32 + k] >> 2 * (run % 4) & 3;
}

struct Q3K {
    static constexpr Packing packing = Packing::q3_k;
    static constexpr int columns = 256, bytes = 110;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        read_twos(raw + 32, block.quants);
        for (int c = 0; c < 256; ++c) block.quants[c] = uint8_t(block.quants[c] | (raw[c % 32] >> c / 32 & 1) << 2);
        const uint8_t* bits = raw + 96;  // low nibbles of the numbers k and k + 8, then the upper bits of every fourth number
        for (int k = 0; k < 16; ++k)
            block.numbers[k] = uint8_t((bits[k % 8] >> k / 8 * 4 & 15) | (bits[8 + k % 4] >> k / 4 * 2 & 3) << 4);
        block.scale = read_as<uint16_t>(raw + 108);
    }
};

struct Q2K {
    static constexpr Packing packing = Packing::q2_k;
    static constexpr int columns = 256, bytes = 84;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        std::memcpy(block.numbers, raw, 16);
        read_twos(raw + 16, block.quants);
        block.scale = read_as<uint16_t>(raw + 80);
        block.minimum = read_as<uint16_t>(raw + 82);
    }
};

// Codes of a low byte each and, in other bytes, `upper` more bits.
CLLM_INLINE void read_codes(const uint8_t* low, const uint8_t* high, int upper, RawBlock& block) {
    const int codes = upper == 1 ? 64 : 32, together = 8 / upper;
    for (int c = 0; c < codes; ++c)
        block.codes[c] = uint16_t(low[c] | (high[c / together] >> c % together * upper & ((1 << upper) - 1)) << 8);
}

struct IQ3S {
    static constexpr Packing packing = Packing::iq3_s;
    static constexpr int columns = 256, bytes = 110;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        read_codes(raw + 2, raw + 66, 1, block);
        std::memcpy(block.signs, raw + 74, sizeof block.signs);
        for (int g = 0; g < 8; ++g) block.numbers[g] = read_nibble(raw + 106, g);
    }
};

struct IQ3XXS {
    static constexpr Packing packing = Packing::iq3_xxs;
    static constexpr int columns = 256, bytes = 98;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        for (int c = 0; c < 64; ++c) block.codes[c] = raw[2 + c];
        std::memcpy(block.signs, raw + 66, sizeof block.signs);
    }
};

struct IQ2S {
    static constexpr Packing packing = Packing::iq2_s;
    static constexpr int columns = 256, bytes = 82;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        read_codes(raw + 2, raw + 66, 2, block);
        std::memcpy(block.signs, raw + 34, sizeof block.signs);
        for (int g = 0; g < 16; ++g) block.numbers[g] = read_nibble(raw + 74, g);
    }
};

struct IQ2XS {
    static constexpr Packing packing = Packing::iq2_xs;
    static constexpr int columns = 256, bytes = 74;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        for (int run = 0; run < 8; ++run) block.signs[run] = 0;
        for (int c = 0; c < 32; ++c) {
            const uint16_t word = read_as<uint16_t>(raw + 2 + 2 * c);  // nine bits of a code, seven of signs
            block.codes[c] = word & 511;
            block.signs[c / 4] |= uint32_t(word >> 9) << 7 * (c % 4) | uint32_t(word >> 8 & 1) << (28 + c % 4);
        }
        for (int g = 0; g < 16; ++g) block.numbers[g] = read_nibble(raw + 66, g);
    }
};

struct IQ2XXS {
    static constexpr Packing packing = Packing::iq2_xxs;
    static constexpr int columns = 256, bytes = 66;
    static CLLM_INLINE void read(const uint8_t* raw, RawBlock& block) {
        block.scale = read_as<uint16_t>(raw);
        for (int run = 0; run < 8; ++run) {
            const uint8_t* from = raw + 2 + 8 * run;
            for (int c = 0; c < 4; ++c) block.codes[4 * run + c] = from[c];
            block.signs[run] = read_as<uint32_t>(from + 4);
        }
    }
};

template <class Word, Packing kPacking, uint32_t kExponent>
struct Floats {
    using word = Word;
    static constexpr Packing packing = kPacking;
    static constexpr uint32_t exponent = kExponent;  // its bits are all set in infinities and NaNs
    static constexpr int columns = 1, bytes = sizeof(Word);
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
        case GgmlType::mxfp4: return blocks(MXFP4());
        case GgmlType::iq4_nl: return blocks(IQ4NL());
        case GgmlType::iq4_xs: return blocks(IQ4XS());
        case GgmlType::q3_k: return blocks(Q3K());
        case GgmlType::q2_k: return blocks(Q2K());
        case GgmlType::iq3_s: return blocks(IQ3S());
        case GgmlType::iq3_xxs: return blocks(IQ3XXS());
        case GgmlType::iq2_s: return blocks(IQ2S());
        case GgmlType::iq2_xs: return blocks(IQ2XS());
        case GgmlType::iq2_xxs: return blocks(IQ2XXS());
    }
    throw std::invalid_argument("weights of GGML type " + std::to_string(int(type)) + " cannot be read");
}

template <class Any>
auto with_format(GgmlType type, Any any) {
    return with_format(type, any, any);
}

}  // namespace cllm

// A row's part of a packed block, written and read in plain C++ (packed.h has the layouts).
#pragma once

#include "raw_formats.h"

namespace cllm {

template <class T>
CLLM_INLINE void write_as(uint8_t* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

constexpr int kNumberLines = 3, kNumbersOfLine = 5;  // of q4_k and q5_k

// Row r's 32 columns of run `run`.
template <Packing P>
CLLM_INLINE void put_quants(const uint8_t* quants, int run, int r, uint8_t* block) {
    constexpr Layout layout = layout_of(P);
    uint32_t quads[kRunLines];
    std::memcpy(quads, quants, sizeof quads);
    uint8_t* const low = block + layout.run_at(run) + 4 * r;
    if constexpr (layout.bits == 8) {
        for (int q = 0; q < kRunLines; ++q) write_as(low + q * kLineBytes, quads[q]);
    } else {
        for (int j = 0; j < 4; ++j)
            write_as(low + j * kLineBytes, (quads[j] & 0x0f0f0f0fu) | (quads[j + 4] & 0x0f0f0f0fu) << 4);
    }
    uint8_t* const upper = block + layout.upper_at(run) + 4 * r;
    if constexpr (layout.bits == 5) {
        uint32_t fifths = 0;
        for (int q = 0; q < kRunLines; ++q) fifths |= (quads[q] >> 4 & 0x01010101u) << q;
        write_as(upper, fifths);
    }
    if constexpr (layout.bits == 6) {
        for (int u = 0; u < 2; ++u) {
            uint32_t twos = 0;
            for (int k = 0; k < 4; ++k) twos |= (quads[4 * u + k] >> 4 & 0x03030303u) << 2 * k;
            write_as(upper + u * kLineBytes, twos);
        }
    }
}

template <Packing P>
CLLM_INLINE void put_factors(const RawBlock& from, int r, uint8_t* factors) {
    if constexpr (P == Packing::q6_k) {
        for (int g = 0; g < 16; ++g) factors[g * kTileRows + r] = from.numbers[g];
        return write_as(factors + 16 * kTileRows + 2 * r, from.scale);
    }
    write_as(factors + 2 * r, from.scale);
    if constexpr (layout_of(P).has_min) write_as(factors + 2 * kTileRows + 2 * r, from.minimum);
    if constexpr (P == Packing::q4_k || P == Packing::q5_k) {
        for (int w = 0; w < kNumberLines; ++w) {
            uint32_t word = uint32_t(from.numbers[15] >> 2 * w & 3) << 30;
            for (int k = 0; k < kNumbersOfLine; ++k) word |= uint32_t(from.numbers[w * kNumbersOfLine + k]) << 6 * k;
            write_as(factors + (w + 1) * kLineBytes + 4 * r, word);
        }
    }
}

template <Packing P>
CLLM_INLINE void put_row(const RawBlock& from, int r, uint8_t* block) {
    constexpr Layout layout = layout_of(P);
    for (int run = 0; run < layout.runs(); ++run) put_quants<P>(from.quants + run * kRun, run, r, block);
    put_factors<P>(from, r, block + layout.factors_at());
}

// Row r's columns 4*quad to 4*quad + 3 of a run, one byte each; of q8_0 signed.
template <Packing P>
CLLM_INLINE uint32_t quad_of(const uint8_t* block, int run, int quad, int r) {
    constexpr Layout layout = layout_of(P);
    if constexpr (layout.bits == 8) return read_as<uint32_t>(block + quad * kLineBytes + 4 * r);
    const uint32_t both = read_as<uint32_t>(block + layout.run_at(run) + quad % 4 * kLineBytes + 4 * r);
    uint32_t found = (quad < 4 ? both : both >> 4) & 0x0f0f0f0fu;
    const uint8_t* upper = block + layout.upper_at(run) + 4 * r;
    if constexpr (layout.bits == 5) found |= (read_as<uint32_t>(upper) >> quad & 0x01010101u) << 4;
    if constexpr (layout.bits == 6)
        found |= (read_as<uint32_t>(upper + quad / 4 * kLineBytes) >> 2 * (quad % 4) & 0x03030303u) << 4;
    return found;
}

// Number n of row r, from the lines of numbers.
CLLM_INLINE uint32_t number_of(const uint8_t* lines, int n, int r) {
    const auto word = [&](int w) { return read_as<uint32_t>(lines + w * kLineBytes + 4 * r); };
    if (n < 15) return word(n / kNumbersOfLine) >> 6 * (n % kNumbersOfLine) & 63u;
    return word(0) >> 30 | word(1) >> 30 << 2 | word(2) >> 30 << 4;
}

template <Packing P>
CLLM_INLINE float scale_of(const uint8_t* block, int group, int r) {
    const uint8_t* factors = block + layout_of(P).factors_at();
    if constexpr (P == Packing::q6_k)
        return f16_to_f32(read_as<uint16_t>(factors + 256 + 2 * r)) * float(int8_t(factors[group * kTileRows + r]));
    const float scale = f16_to_f32(read_as<uint16_t>(factors + 2 * r));
    return layout_of(P).super() ? scale * float(number_of(factors + kLineBytes, group, r)) : scale;
}

template <Packing P>
CLLM_INLINE float minimum_of(const uint8_t* block, int group, int r) {
    if constexpr (!layout_of(P).has_min) return 0.0f;
    const uint8_t* factors = block + layout_of(P).factors_at();
    const float minimum = f16_to_f32(read_as<uint16_t>(factors + 2 * kTileRows + 2 * r));
    return layout_of(P).super() ? -minimum * float(number_of(factors + kLineBytes, 8 + group, r)) : minimum;
}

}  // namespace cllm

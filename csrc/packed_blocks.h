// A row's part of a packed block, written and read in plain C++ (packed.h has the layouts).
#pragma once

#include "packed_codes.h"
#include "raw_formats.h"

namespace cllm {

template <class T>
CLLM_INLINE void write_as(uint8_t* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

constexpr int kNumberLines = 3, kNumbersOfLine = 5;  // of q3_k to q5_k

// Whether a block has 16 numbers in three lines.
CLLM_INLINE constexpr bool in_number_lines(Packing packing) {
    return packing == Packing::q3_k || packing == Packing::q4_k || packing == Packing::q5_k;
}

// Bits `shift` and the next of each quant, as two lines.
CLLM_INLINE void put_twos(const uint32_t (&quads)[kRunLines], int shift, uint8_t* to) {
    for (int u = 0; u < 2; ++u) {
        uint32_t twos = 0;
        for (int k = 0; k < 4; ++k) twos |= (quads[4 * u + k] >> shift & 0x03030303u) << 2 * k;
        write_as(to + u * kLineBytes, twos);
    }
}

// Row r's 32 columns of run `run`.
template <Packing P>
CLLM_INLINE void put_quants(const uint8_t* quants, int run, int r, uint8_t* block) {
    constexpr Layout layout = layout_of(P);
    uint32_t quads[kRunLines];
    std::memcpy(quads, quants, sizeof quads);
    uint8_t* const low = block + layout.run_at(run) + 4 * r;
    if constexpr (layout.quarters == 32) {
        for (int q = 0; q < kRunLines; ++q) write_as(low + q * kLineBytes, quads[q]);
        return;
    }
    if constexpr (layout.lower_bits() == 4) {
        for (int j = 0; j < 4; ++j)
            write_as(low + j * kLineBytes, (quads[j] & 0x0f0f0f0fu) | (quads[j + 4] & 0x0f0f0f0fu) << 4);
    } else {
        put_twos(quads, 0, low);
    }
    uint8_t* const upper = block + layout.upper_at(run) + 4 * r;
    if constexpr (layout.upper_bits() == 1) {
        uint32_t ones = 0;
        for (int q = 0; q < kRunLines; ++q) ones |= (quads[q] >> layout.lower_bits() & 0x01010101u) << q;
        write_as(upper, ones);
    }
    if constexpr (layout.upper_bits() == 2) put_twos(quads, 4, upper);
}

// Row r's codes and signs of run `run`.
template <Packing P>
CLLM_INLINE void put_codes(const RawBlock& from, int run, int r, uint8_t* block) {
    constexpr Codes codes = codes_of(P);
    uint8_t* const out = block + layout_of(P).run_at(run);
    uint8_t upper = 0;
    for (int c = 0; c < codes.of_run(); ++c) {
        const uint16_t code = from.codes[run * codes.of_run() + c];
        out[c * kTileRows + r] = uint8_t(code);
        upper = uint8_t(upper | code >> 8 << codes.upper_bits * c);
    }
    if (codes.upper_bits) out[codes.upper_at() + r] = upper;
    write_as(out + codes.signs_at() + 4 * r, from.signs[run]);
}

template <Packing P>
CLLM_INLINE void put_factors(const RawBlock& from, int r, uint8_t* factors) {
    constexpr Layout layout = layout_of(P);
    if constexpr (P == Packing::mxfp4) {
        factors[r] = from.numbers[0];
        return;
    }
    if constexpr (P == Packing::q6_k) {
        for (int g = 0; g < 16; ++g) factors[g * kTileRows + r] = from.numbers[g];
        return write_as(factors + 16 * kTileRows + 2 * r, from.scale);
    }
    write_as(factors + 2 * r, from.scale);
    factors += 2 * kTileRows;
    if constexpr (layout.has_min) {
        write_as(factors + 2 * r, from.minimum);
        factors += 2 * kTileRows;
    }
    if constexpr (P == Packing::q2_k)
        for (int g = 0; g < layout.groups(); ++g) factors[g * kTileRows + r] = from.numbers[g];
    if constexpr (in_number_lines(P)) {
        for (int w = 0; w < kNumberLines; ++w) {
            uint32_t word = uint32_t(from.numbers[15] >> 2 * w & 3) << 30;
            for (int k = 0; k < kNumbersOfLine; ++k) word |= uint32_t(from.numbers[w * kNumbersOfLine + k]) << 6 * k;
            write_as(factors + w * kLineBytes + 4 * r, word);
        }
    }
    if constexpr (in_nibble_lines(P)) {
        for (int line = 0; line < layout.groups() / 8; ++line) {
            uint32_t nibbles = 0;
            for (int k = 0; k < 8; ++k) nibbles |= uint32_t(from.numbers[8 * line + k] & 15) << 4 * k;
            write_as(factors + line * kLineBytes + 4 * r, nibbles);
        }
    }
    if constexpr (P == Packing::iq4_xs) {
        uint32_t upper = 0;
        for (int k = 0; k < 8; ++k) upper |= uint32_t(from.numbers[k] >> 4) << 2 * k;
        write_as(factors + kLineBytes + 2 * r, uint16_t(upper));
    }
}

template <Packing P>
CLLM_INLINE void put_row(const RawBlock& from, int r, uint8_t* block) {
    constexpr Layout layout = layout_of(P);
    for (int run = 0; run < layout.runs(); ++run) {
        if constexpr (in_codes(P)) put_codes<P>(from, run, r, block);
        else put_quants<P>(from.quants + run * kRun, run, r, block);
    }
    put_factors<P>(from, r, block + layout.factors_at());
}

// Row r's columns 4*quad to 4*quad + 3 of a run as they are stored, one byte each; of q8_0 signed.
template <Packing P>
CLLM_INLINE uint32_t stored_quad(const uint8_t* block, int run, int quad, int r) {
    constexpr Layout layout = layout_of(P);
    const uint8_t* low = block + layout.run_at(run) + 4 * r;
    if constexpr (layout.quarters == 32) return read_as<uint32_t>(low + quad * kLineBytes);
    const auto twos = [&](const uint8_t* at) {
        return read_as<uint32_t>(at + quad / 4 * kLineBytes) >> 2 * (quad % 4) & 0x03030303u;
    };
    uint32_t found = layout.lower_bits() == 4 ? read_as<uint32_t>(low + quad % 4 * kLineBytes) >> quad / 4 * 4 & 0x0f0f0f0fu
                                              : twos(low);
    const uint8_t* upper = block + layout.upper_at(run) + 4 * r;
    if constexpr (layout.upper_bits() == 1) found |= (read_as<uint32_t>(upper) >> quad & 0x01010101u) << layout.lower_bits();
    if constexpr (layout.upper_bits() == 2) found |= twos(upper) << 4;
    return found;
}

// The signs of 8 columns from 7 of them, whose number is even.
CLLM_INLINE constexpr uint32_t even_signs(uint32_t seven) {
    const uint32_t folded = seven ^ seven >> 4;
    return seven | (0x6996u >> (folded & 15u) & 1u) << 7;
}

// Code c of row r of a run, which has these bytes.
template <Packing P>
CLLM_INLINE uint32_t code_of(const uint8_t* run, int c, int r) {
    constexpr Codes codes = codes_of(P);
    uint32_t code = run[c * kTileRows + r];
    if constexpr (codes.upper_bits > 0)
        code |= (uint32_t(run[codes.upper_at() + r]) >> c * codes.upper_bits & ((1u << codes.upper_bits) - 1)) << 8;
    if constexpr (P == Packing::iq2_xs) code |= (read_as<uint32_t>(run + codes.signs_at() + 4 * r) >> ninth_bit(c) & 1u) << 8;
    return code;
}

// Row r's columns 4*quad to 4*quad + 3 of a run as they are multiplied, one byte each; signed if of 8 bits.
template <Packing P>
CLLM_INLINE uint32_t quad_of(const uint8_t* block, int run, int quad, int r) {
    constexpr Layout layout = layout_of(P);
    constexpr int centre = layout.bits == 8 ? 0 : layout.centre;
    uint32_t found = 0;
    if constexpr (in_codes(P)) {
        constexpr Codes codes = codes_of(P);
        const uint8_t* at = block + layout.run_at(run);
        const uint32_t words = read_as<uint32_t>(at + codes.signs_at() + 4 * r), code = code_of<P>(at, quad / codes.quads(), r);
        const uint8_t* values = grid_of<P>() + code * codes.columns + quad % codes.quads() * 4;
        const uint32_t of_8 = codes.even ? even_signs(words >> quad / 2 * 7 & 127u) : words >> quad / 2 * 8;
        for (int i = 0; i < 4; ++i) {
            const bool minus = of_8 >> (quad % 2 * 4 + i) & 1u;
            found |= uint32_t(uint8_t((minus ? -values[i] : values[i]) + centre)) << 8 * i;
        }
    } else if constexpr (in_nibble_codes(P)) {
        const uint32_t stored = stored_quad<P>(block, run, quad, r);
        for (int i = 0; i < 4; ++i)
            found |= uint32_t(uint8_t(nibble_values(P)[stored >> 8 * i & 15u] + centre)) << 8 * i;
    } else {
        found = stored_quad<P>(block, run, quad, r);
    }
    return found;
}

// Number n of row r, from the lines of numbers.
CLLM_INLINE uint32_t number_of(const uint8_t* lines, int n, int r) {
    const auto word = [&](int w) { return read_as<uint32_t>(lines + w * kLineBytes + 4 * r); };
    if (n < 15) return word(n / kNumbersOfLine) >> 6 * (n % kNumbersOfLine) & 63u;
    return word(0) >> 30 | word(1) >> 30 << 2 | word(2) >> 30 << 4;
}

// 2^(exponent - 128), as mxfp4 has it: half of what the exponent says, since values are doubled.
CLLM_INLINE float half_power(uint8_t exponent) {
    const uint32_t bits = exponent ? uint32_t(exponent) << 23 : 0x00400000u;
    return 0.5f * read_as<float>((const uint8_t*)&bits);
}

template <Packing P>
CLLM_INLINE float scale_of(const uint8_t* block, int group, int r) {
    constexpr Layout layout = layout_of(P);
    const uint8_t* factors = block + layout.factors_at();
    if constexpr (P == Packing::mxfp4) return half_power(factors[r]);
    if constexpr (P == Packing::q6_k)
        return f16_to_f32(read_as<uint16_t>(factors + 256 + 2 * r)) * float(int8_t(factors[group * kTileRows + r]));
    const float scale = f16_to_f32(read_as<uint16_t>(factors + 2 * r));
    const uint8_t* numbers = factors + (layout.has_min ? 4 : 2) * kTileRows;
    if constexpr (P == Packing::iq4_xs || in_codes(P)) {
        const uint32_t nibble = read_as<uint32_t>(block + nibble_at(P, group) + 4 * r) >> nibble_bit(P, group) & 15u;
        if constexpr (in_codes(P)) return scale * code_unit(P) * float(2 * nibble + 1);
        const int upper = read_as<uint16_t>(numbers + kLineBytes + 2 * r) >> 2 * group & 3;
        return scale * float(int(nibble) + 16 * upper - 32);
    }
    if constexpr (P == Packing::q3_k) return scale * float(int(number_of(numbers, group, r)) - 32);
    if constexpr (P == Packing::q2_k) return scale * float(numbers[group * kTileRows + r] & 15);
    return layout.super() ? scale * float(number_of(numbers, group, r)) : scale;
}

template <Packing P>
CLLM_INLINE float minimum_of(const uint8_t* block, int group, int r) {
    if constexpr (!layout_of(P).has_min) return 0.0f;
    const uint8_t* factors = block + layout_of(P).factors_at();
    const uint8_t* numbers = factors + 4 * kTileRows;
    const float minimum = f16_to_f32(read_as<uint16_t>(factors + 2 * kTileRows + 2 * r));
    if constexpr (P == Packing::q2_k) return -minimum * float(numbers[group * kTileRows + r] >> 4);
    return layout_of(P).super() ? -minimum * float(number_of(numbers, 8 + group, r)) : minimum;
}

}  // namespace cllm

// Types whose bits stand for values by a table: the nibbles of mxfp4 and iq4, and the codes of iq3 and iq2.
#pragma once

#include <array>

#include "packed.h"
#include "weight_grids.h"

namespace cllm {

// What the nibbles of mxfp4 (doubled) and of iq4 stand for.
alignas(16) constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

CLLM_INLINE constexpr bool in_nibble_codes(Packing packing) {
    return packing == Packing::mxfp4 || packing == Packing::iq4_nl || packing == Packing::iq4_xs;
}

CLLM_INLINE constexpr const int8_t* nibble_values(Packing packing) {
    return packing == Packing::mxfp4 ? kMxfp4Values : kIq4Values;
}

// How the codes of a run lie in its bytes: first those, then the upper bits, then the line of signs.
struct Codes {
    int columns;     // of a code
    int upper_bits;  // of a code, in bytes of their own
    bool even;       // whether signs have 7 bits for 8 columns

    CLLM_INLINE constexpr int quads() const { return columns / 4; }  // of a code
    CLLM_INLINE constexpr int of_run() const { return kRun / columns; }
    CLLM_INLINE constexpr int upper_at() const { return of_run() * kTileRows; }
    CLLM_INLINE constexpr int signs_at() const { return upper_at() + (upper_bits ? kTileRows : 0); }
};

CLLM_INLINE constexpr Codes codes_of(Packing packing) {
    switch (packing) {
        case Packing::iq3_s: return {4, 1, false};
        case Packing::iq3_xxs: return {4, 0, true};
        case Packing::iq2_s: return {8, 2, false};
        default: return {8, 0, true};
    }
}

// Where the ninth bit of code c is in the dword of signs of iq2_xs.
CLLM_INLINE constexpr int ninth_bit(int code) { return 28 + code; }

// The bytes that the levels of each word stand for.
template <class Entry, int Bits, size_t N, size_t Levels>
constexpr std::array<Entry, N> spelled_out(const uint16_t (&words)[N], const uint8_t (&levels)[Levels]) {
    std::array<Entry, N> found{};
    for (size_t n = 0; n < N; ++n)
        for (size_t i = 0; i < sizeof(Entry); ++i)
            found[n] |= Entry(levels[words[n] >> Bits * i & ((1 << Bits) - 1)]) << 8 * i;
    return found;
}

inline constexpr auto kIq3sGrid = spelled_out<uint32_t, 3>(kIq3sWords, kIq3sLevels);
inline constexpr auto kIq3xxsGrid = spelled_out<uint32_t, 3>(kIq3xxsWords, kIq3xxsLevels);
inline constexpr auto kIq2sGrid = spelled_out<uint64_t, 2>(kIq2sWords, kIq2sLevels);
inline constexpr auto kIq2xsGrid = spelled_out<uint64_t, 2>(kIq2xsWords, kIq2xsLevels);
inline constexpr auto kIq2xxsGrid = spelled_out<uint64_t, 2>(kIq2xxsWords, kIq2xxsLevels);

// The magnitudes of each code's columns, one byte each.
template <Packing P>
CLLM_INLINE const uint8_t* grid_of() {
    if constexpr (P == Packing::iq3_s) return (const uint8_t*)kIq3sGrid.data();
    if constexpr (P == Packing::iq3_xxs) return (const uint8_t*)kIq3xxsGrid.data();
    if constexpr (P == Packing::iq2_s) return (const uint8_t*)kIq2sGrid.data();
    if constexpr (P == Packing::iq2_xs) return (const uint8_t*)kIq2xsGrid.data();
    return (const uint8_t*)kIq2xxsGrid.data();
}

// Where the nibble of a group's scale is: in lines of nibbles, or in the top of the dwords of signs.
CLLM_INLINE constexpr bool in_nibble_lines(Packing packing) {
    return packing == Packing::iq4_xs || packing == Packing::iq3_s || packing == Packing::iq2_s || packing == Packing::iq2_xs;
}
CLLM_INLINE constexpr int nibble_at(Packing packing, int group) {
    return in_nibble_lines(packing) ? 2 * kTileRows + group / 8 * kLineBytes
                                    : layout_of(packing).run_at(group) + codes_of(packing).signs_at();
}
CLLM_INLINE constexpr int nibble_bit(Packing packing, int group) { return in_nibble_lines(packing) ? group % 8 * 4 : 28; }

// For each four bits, bit 7 if an odd number of them is set.
alignas(16) constexpr int8_t kOddOfFour[16] = {0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0};

// The scale of a code's unit is the block's times this.
CLLM_INLINE constexpr float code_unit(Packing packing) {
    return packing == Packing::iq3_s ? 1.0f : packing == Packing::iq3_xxs ? 0.25f : 0.125f;
}

}  // namespace cllm

// The magnitudes that codes stand for, looked up one by one: gathering them by an instruction is slower.
#pragma once

#include "packed_blocks.h"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

// The 16 rows' code c of a run.
template <Packing P>
CLLM_INLINE __m256i codes_of_rows(const uint8_t* run, int c) {
    constexpr Codes codes = codes_of(P);
    const auto words = [&](int at) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(run + at))); };
    const __m256i low = words(c * kTileRows);
    if constexpr (codes.upper_bits > 0) {
        const __m256i upper = _mm256_sll_epi16(words(codes.upper_at()), _mm_cvtsi32_si128(8 - c * codes.upper_bits));
        return _mm256_or_si256(low, _mm256_and_si256(upper, _mm256_set1_epi16(codes.upper_bits == 1 ? 0x100 : 0x300)));
    }
    if constexpr (P == Packing::iq2_xs) {
        const auto ninth = [&](int half) {
            const __m256i signs = _mm256_loadu_si256((const __m256i*)(run + codes.signs_at() + half * 32));
            const __m256i shifted = _mm256_srl_epi32(signs, _mm_cvtsi32_si128(ninth_bit(c) - 8));
            return _mm256_and_si256(shifted, _mm256_set1_epi32(0x100));
        };
        return _mm256_or_si256(low, _mm256_permute4x64_epi64(_mm256_packus_epi32(ninth(0), ninth(1)), 0xd8));
    }
    return low;
}

// Of a block: code after code, and of each row after row.
template <Packing P>
CLLM_INLINE void spell_out(const uint8_t* block, uint8_t* values) {
    constexpr Layout layout = layout_of(P);
    constexpr Codes codes = codes_of(P);
    const auto of_4 = [](uint64_t code) { return read_as<int32_t>(grid_of<P>() + code * 4); };
    const auto of_8 = [](uint64_t code) { return read_as<uint64_t>(grid_of<P>() + code * 8); };
    for (int run = 0; run < layout.runs(); ++run)
        for (int c = 0; c < codes.of_run(); ++c) {
            alignas(32) uint64_t fours[4];  // codes of four rows each
            _mm256_store_si256((__m256i*)fours, codes_of_rows<P>(block + layout.run_at(run), c));
            for (const uint64_t four : fours) {
                const uint64_t a = four & 0xffff, b = four >> 16 & 0xffff, c = four >> 32 & 0xffff, d = four >> 48;
                if constexpr (codes.columns == 4) {
                    _mm_store_si128((__m128i*)values, _mm_setr_epi32(of_4(a), of_4(b), of_4(c), of_4(d)));
                } else {
                    const uint64_t found[4] = {of_8(a), of_8(b), of_8(c), of_8(d)};
                    std::memcpy(values, found, sizeof found);
                }
                values += 4 * codes.columns;
            }
        }
}

}  // namespace CLLM_NS
}  // namespace cllm

// Blocks of a tile in registers: a line's half is 8 rows x 4 columns of unsigned bytes. Those of q8_0 are signed, or with
// VNNI unsigned, with 128 added.
#pragma once

#include "matmul_job.inl"

namespace cllm {
namespace CLLM_NS {

#if defined(CLLM_AVXVNNI)
constexpr bool kVnni = true;
#else
constexpr bool kVnni = false;
#endif

CLLM_INLINE __m256i load_half(const uint8_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
CLLM_INLINE __m256 load_f16_8(const uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }

// Shifts each byte's bits to the left (negative: to the right); the caller masks what comes over from the neighbour.
template <int By>
CLLM_INLINE __m256i shift_bits(__m256i bytes) {
    if (By > 0) return _mm256_slli_epi16(bytes, By > 0 ? By : 0);
    return By < 0 ? _mm256_srli_epi16(bytes, By < 0 ? -By : 0) : bytes;
}

// Columns 4*Quad to 4*Quad + 3 of a run.
template <Packing P, int Quad>
CLLM_INLINE __m256i packed_line(const uint8_t* block, int run, int half) {
    constexpr Layout layout = layout_of(P);
    if constexpr (layout.bits == 8) {
        const __m256i line = load_half(block + Quad * kLineBytes + half * 32);
        return kVnni ? _mm256_xor_si256(line, _mm256_set1_epi8(-128)) : line;
    }
    const __m256i both = load_half(block + layout.run_at(run) + Quad % 4 * kLineBytes + half * 32);
    const __m256i low = _mm256_and_si256(shift_bits<Quad < 4 ? 0 : -4>(both), _mm256_set1_epi8(15));
    if constexpr (layout.bits == 4) return low;
    const uint8_t* upper = block + layout.upper_at(run) + half * 32;
    if constexpr (layout.bits == 5)
        return _mm256_or_si256(low, _mm256_and_si256(shift_bits<4 - Quad>(load_half(upper)), _mm256_set1_epi8(16)));
    const __m256i twos = shift_bits<4 - 2 * (Quad % 4)>(load_half(upper + Quad / 4 * kLineBytes));
    return _mm256_or_si256(low, _mm256_and_si256(twos, _mm256_set1_epi8(48)));
}

// Number N of 8 rows of q4_k or q5_k, as floats.
template <int N>
CLLM_INLINE __m256 numbers(const uint8_t* lines) {
    __m256i found;
    if constexpr (N < 15) {
        found = _mm256_and_si256(_mm256_srli_epi32(load_half(lines + N / 5 * kLineBytes), 6 * (N % 5)), _mm256_set1_epi32(63));
    } else {
        const auto top = [&](int w) { return _mm256_srli_epi32(load_half(lines + w * kLineBytes), 30); };
        found = _mm256_or_si256(top(0), _mm256_or_si256(_mm256_slli_epi32(top(1), 2), _mm256_slli_epi32(top(2), 4)));
    }
    return _mm256_cvtepi32_ps(found);
}

template <int Group>
CLLM_INLINE void pairs_from(const uint8_t* lines, __m256 scale, __m256 minimum, float* to, int stride) {
    if constexpr (Group < 8) {
        _mm256_store_ps(to, _mm256_mul_ps(scale, numbers<Group>(lines)));
        _mm256_store_ps(to + kTileRows, _mm256_mul_ps(minimum, numbers<8 + Group>(lines)));
        pairs_from<Group + 1>(lines, scale, minimum, to + stride, stride);
    }
}

// The factors of a block's groups: 16 scales, then 16 minima if there are, `stride` floats from one group to the next.
template <Packing P>
CLLM_INLINE void read_factors(const uint8_t* block, float* to, int stride) {
    constexpr Layout layout = layout_of(P);
    const uint8_t* factors = block + layout.factors_at();
    for (int half = 0; half < 2; ++half, to += 8) {
        if constexpr (P == Packing::q6_k) {
            const __m256 scale = load_f16_8(factors + 256 + half * 16);
            for (int g = 0; g < 16; ++g) {
                const __m128i eight = _mm_loadl_epi64((const __m128i*)(factors + g * kTileRows + half * 8));
                _mm256_store_ps(to + g * stride, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight))));
            }
        } else if constexpr (layout.super()) {
            const __m256 minimum = _mm256_sub_ps(_mm256_set1_ps(-0.0f), load_f16_8(factors + 32 + half * 16));
            pairs_from<0>(factors + kLineBytes + half * 32, load_f16_8(factors + half * 16), minimum, to, stride);
        } else {
            _mm256_store_ps(to, load_f16_8(factors + half * 16));
            if constexpr (layout.has_min) _mm256_store_ps(to + kTileRows, load_f16_8(factors + 32 + half * 16));
        }
    }
}

// A block as it is packed; its factors are computed once.
template <Packing P>
struct PackedBlock {
    static constexpr bool opened = false;
    static constexpr Layout layout = layout_of(P);
    static constexpr int columns = layout.columns, bytes = layout.bytes(), stride = kTileRows * (layout.has_min ? 2 : 1);
    const uint8_t* at;
    alignas(32) float values[layout.groups() * stride];

    CLLM_INLINE void go_to(const uint8_t* block) {
        at = block;
        read_factors<P>(block, values, stride);
    }
    template <int Quad>
    CLLM_INLINE __m256i line(int run, int half) const { return packed_line<P, Quad>(at, run, half); }
    CLLM_INLINE const float* factors(int group) const { return values + group * stride; }
};

// A run of an opened tile.
template <Packing P>
struct OpenedBlock {
    static constexpr bool opened = true;
    static constexpr Layout layout = layout_of(P);
    static constexpr int columns = kRun, bytes = kRun / layout.group * layout.opened_bytes();
    const uint8_t* at;

    CLLM_INLINE void go_to(const uint8_t* run) { at = run; }
    template <int Quad>
    CLLM_INLINE __m256i line(int, int half) const {
        constexpr int lines = layout.group / 4;
        return load_half(at + Quad / lines * layout.opened_bytes() + Quad % lines * kLineBytes + half * 32);
    }
    CLLM_INLINE const float* factors(int group) const {
        return (const float*)(at + group * layout.opened_bytes() + layout.opened_factors_at());
    }
};

template <Packing P, int Quad>
CLLM_INLINE void open_lines(const uint8_t* block, int run, uint8_t* out) {
    if constexpr (Quad < kRunLines) {
        constexpr Layout layout = layout_of(P);
        constexpr int lines = layout.group / 4, at = Quad / lines * layout.opened_bytes() + Quad % lines * kLineBytes;
        for (int half = 0; half < 2; ++half)
            _mm256_store_si256((__m256i*)(out + at + half * 32), packed_line<P, Quad>(block, run, half));
        open_lines<P, Quad + 1>(block, run, out);
    }
}

template <Packing P>
static void open_blocks(const uint8_t* block, int64_t blocks, uint8_t* out) {
    constexpr Layout layout = layout_of(P);
    for (; blocks > 0; --blocks, block += layout.bytes()) {
        read_factors<P>(block, (float*)(out + layout.opened_factors_at()), layout.opened_bytes() / int(sizeof(float)));
        for (int run = 0; run < layout.runs(); ++run, out += OpenedBlock<P>::bytes) open_lines<P, 0>(block, run, out);
    }
}

static void open_tile(const PackedMatrix& w, int64_t tile, uint8_t* out) {
    with_packing(w.packing, [&](auto packing) {
        open_blocks<packing>(w.tile(tile), w.cols / layout_of(packing).columns, out);
    });
}

}  // namespace CLLM_NS
}  // namespace cllm

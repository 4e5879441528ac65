// Blocks of a tile in registers: a line is 16 rows x 4 columns of unsigned bytes, of q8_0 with 128 added.
#pragma once

#include "matmul_job.inl"

namespace cllm {
namespace CLLM_NS {

CLLM_INLINE __m512i load_line(const uint8_t* at) { return _mm512_loadu_si512(at); }
CLLM_INLINE __m512 load_f16_16(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }

// Shifts each byte's bits to the left (negative: to the right); the caller masks what comes over from the neighbour.
template <int By>
CLLM_INLINE __m512i shift_bits(__m512i bytes) {
    if (By > 0) return _mm512_slli_epi16(bytes, By > 0 ? By : 0);
    return By < 0 ? _mm512_srli_epi16(bytes, By < 0 ? -By : 0) : bytes;
}

// low | (upper & mask)
CLLM_INLINE __m512i with_upper(__m512i low, __m512i upper, char mask) {
    return _mm512_ternarylogic_epi32(low, upper, _mm512_set1_epi8(mask), 0xf8);
}

// Columns 4*Quad to 4*Quad + 3 of a run.
template <Packing P, int Quad>
CLLM_INLINE __m512i packed_line(const uint8_t* block, int run) {
    constexpr Layout layout = layout_of(P);
    if constexpr (layout.bits == 8) return _mm512_xor_si512(load_line(block + Quad * kLineBytes), _mm512_set1_epi8(-128));
    const __m512i both = load_line(block + layout.run_at(run) + Quad % 4 * kLineBytes);
    const __m512i low = _mm512_and_si512(shift_bits<Quad < 4 ? 0 : -4>(both), _mm512_set1_epi8(15));
    if constexpr (layout.bits == 4) return low;
    const uint8_t* upper = block + layout.upper_at(run);
    if constexpr (layout.bits == 5) return with_upper(low, shift_bits<4 - Quad>(load_line(upper)), 16);
    return with_upper(low, shift_bits<4 - 2 * (Quad % 4)>(load_line(upper + Quad / 4 * kLineBytes)), 48);
}

// Number N of 16 rows of q4_k or q5_k, as floats.
template <int N>
CLLM_INLINE __m512 numbers(const uint8_t* lines) {
    __m512i found;
    if constexpr (N < 15) {
        found = _mm512_and_si512(_mm512_srli_epi32(load_line(lines + N / 5 * kLineBytes), 6 * (N % 5)), _mm512_set1_epi32(63));
    } else {
        const auto top = [&](int w) { return _mm512_srli_epi32(load_line(lines + w * kLineBytes), 30); };
        found = _mm512_or_si512(top(0), _mm512_or_si512(_mm512_slli_epi32(top(1), 2), _mm512_slli_epi32(top(2), 4)));
    }
    return _mm512_cvtepi32_ps(found);
}

template <int Group>
CLLM_INLINE void pairs_from(const uint8_t* lines, __m512 scale, __m512 minimum, float* to, int stride) {
    if constexpr (Group < 8) {
        _mm512_store_ps(to, _mm512_mul_ps(scale, numbers<Group>(lines)));
        _mm512_store_ps(to + kTileRows, _mm512_mul_ps(minimum, numbers<8 + Group>(lines)));
        pairs_from<Group + 1>(lines, scale, minimum, to + stride, stride);
    }
}

// The factors of a block's groups: 16 scales, then 16 minima if there are, `stride` floats from one group to the next.
template <Packing P>
CLLM_INLINE void read_factors(const uint8_t* block, float* to, int stride) {
    constexpr Layout layout = layout_of(P);
    const uint8_t* factors = block + layout.factors_at();
    if constexpr (P == Packing::q6_k) {
        const __m512 scale = load_f16_16(factors + 256);
        for (int g = 0; g < 16; ++g) {
            const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(factors + g * kTileRows)));
            _mm512_store_ps(to + g * stride, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(wide)));
        }
    } else if constexpr (layout.super()) {
        const __m512 minimum = _mm512_sub_ps(_mm512_set1_ps(-0.0f), load_f16_16(factors + 32));
        pairs_from<0>(factors + kLineBytes, load_f16_16(factors), minimum, to, stride);
    } else {
        _mm512_store_ps(to, load_f16_16(factors));
        if constexpr (layout.has_min) _mm512_store_ps(to + kTileRows, load_f16_16(factors + 32));
    }
}

// A block as it is packed; its factors are computed once.
template <Packing P>
struct PackedBlock {
    static constexpr bool opened = false;
    static constexpr Layout layout = layout_of(P);
    static constexpr int columns = layout.columns, bytes = layout.bytes(), stride = kTileRows * (layout.has_min ? 2 : 1);
    const uint8_t* at;
    alignas(64) float values[layout.groups() * stride];

    CLLM_INLINE void go_to(const uint8_t* block) {
        at = block;
        read_factors<P>(block, values, stride);
    }
    template <int Quad>
    CLLM_INLINE __m512i line(int run) const { return packed_line<P, Quad>(at, run); }
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
    CLLM_INLINE __m512i line(int) const {
        constexpr int lines = layout.group / 4;
        return _mm512_load_si512(at + Quad / lines * layout.opened_bytes() + Quad % lines * kLineBytes);
    }
    CLLM_INLINE const float* factors(int group) const {
        return (const float*)(at + group * layout.opened_bytes() + layout.opened_factors_at());
    }
};

// A line as it is opened: of AMX, which multiplies signed bytes, with the centre taken away already.
template <Packing P, int Quad>
CLLM_INLINE __m512i opened_line(const uint8_t* block, int run) {
    const __m512i line = packed_line<P, Quad>(block, run);
#if defined(CLLM_AMX)
    return _mm512_sub_epi8(line, _mm512_set1_epi8(char(layout_of(P).centre)));
#else
    return line;
#endif
}

template <Packing P, int Quad>
CLLM_INLINE void open_lines(const uint8_t* block, int run, uint8_t* out) {
    if constexpr (Quad < kRunLines) {
        constexpr Layout layout = layout_of(P);
        constexpr int lines = layout.group / 4, at = Quad / lines * layout.opened_bytes() + Quad % lines * kLineBytes;
        _mm512_store_si512(out + at, opened_line<P, Quad>(block, run));
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

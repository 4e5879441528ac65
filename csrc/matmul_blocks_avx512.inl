// Blocks of a tile in registers: a line is 16 rows x 4 columns of unsigned bytes, of 8 bits with 128 added.
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

CLLM_INLINE __m512i wide_bytes(const uint8_t* at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
CLLM_INLINE __m512i table_of(const int8_t* sixteen) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)sixteen));
}

// A run in codes: byte p of a row's dword has the signs of its quads 2*p and 2*p + 1; and the magnitudes, spelled out.
struct CodedRun {
    __m512i signs;
    const uint8_t* values;
};

template <Packing P>
CLLM_INLINE __m512i signs_of_run(const uint8_t* run) {
    constexpr Codes codes = codes_of(P);
    const __m512i dwords = load_line(run + codes.signs_at());
    if constexpr (!codes.even) return dwords;
    const auto sevens = [&](int of) {
        return _mm512_and_si512(_mm512_slli_epi32(dwords, of), _mm512_set1_epi32(127 << 8 * of));
    };
    const __m512i bytes = _mm512_or_si512(_mm512_or_si512(sevens(0), sevens(1)), _mm512_or_si512(sevens(2), sevens(3)));
    const __m512i folded = _mm512_and_si512(_mm512_xor_si512(bytes, _mm512_srli_epi32(bytes, 4)), _mm512_set1_epi8(15));
    return _mm512_or_si512(bytes, _mm512_shuffle_epi8(table_of(kOddOfFour), folded));
}

// A bit for each byte of quad Quad's line: whether it is negative.
template <int Quad>
CLLM_INLINE __mmask64 signs_of_quad(__m512i signs) {
    constexpr int byte = Quad / 2 * 0x01010101;
    const __m512i bytes = _mm512_set4_epi32(byte + 0x0c0c0c0c, byte + 0x08080808, byte + 0x04040404, byte);
    return _mm512_test_epi8_mask(_mm512_shuffle_epi8(signs, bytes), _mm512_set1_epi32(Quad % 2 ? 0x80402010 : 0x08040201));
}

template <Packing P, int Quad>
CLLM_INLINE __m512i coded_line(const CodedRun& run) {
    constexpr int quads = codes_of(P).quads();
    const uint8_t* at = run.values + Quad / quads * quads * kLineBytes;
    __m512i line = load_line(at);
    if constexpr (quads == 2) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i dwords = _mm512_add_epi32(even, _mm512_set1_epi32(Quad % 2));
        line = _mm512_permutex2var_epi32(line, dwords, load_line(at + kLineBytes));
    }
    const __m512i centre = _mm512_set1_epi8(char(layout_of(P).centre));
    return _mm512_mask_sub_epi8(_mm512_add_epi8(centre, line), signs_of_quad<Quad>(run.signs), centre, line);
}

// Columns 4*Quad to 4*Quad + 3 of a run.
template <Packing P, int Quad>
CLLM_INLINE __m512i packed_line(const uint8_t* block, int run) {
    constexpr Layout layout = layout_of(P);
    const uint8_t* lower = block + layout.run_at(run);
    const uint8_t* upper = block + layout.upper_at(run);
    if constexpr (layout.quarters == 32) return _mm512_xor_si512(load_line(lower + Quad * kLineBytes), _mm512_set1_epi8(-128));
    if constexpr (layout.lower_bits() == 2) {
        const __m512i twos = shift_bits<-2 * (Quad % 4)>(load_line(lower + Quad / 4 * kLineBytes));
        const __m512i low = _mm512_and_si512(twos, _mm512_set1_epi8(3));
        if constexpr (layout.upper_bits() == 0) return low;
        return with_upper(low, shift_bits<2 - Quad>(load_line(upper)), 4);
    }
    const __m512i both = load_line(lower + Quad % 4 * kLineBytes);
    const __m512i low = _mm512_and_si512(shift_bits<Quad < 4 ? 0 : -4>(both), _mm512_set1_epi8(15));
    if constexpr (in_nibble_codes(P)) {
        const __m512i centred = _mm512_add_epi8(table_of(nibble_values(P)), _mm512_set1_epi8(char(layout.centre)));
        return _mm512_shuffle_epi8(centred, low);
    }
    if constexpr (layout.upper_bits() == 0) return low;
    if constexpr (layout.upper_bits() == 1) return with_upper(low, shift_bits<4 - Quad>(load_line(upper)), 16);
    return with_upper(low, shift_bits<4 - 2 * (Quad % 4)>(load_line(upper + Quad / 4 * kLineBytes)), 48);
}

// Number N of 16 rows of q3_k to q5_k.
template <int N>
CLLM_INLINE __m512i number(const uint8_t* lines) {
    if constexpr (N < 15)
        return _mm512_and_si512(_mm512_srli_epi32(load_line(lines + N / 5 * kLineBytes), 6 * (N % 5)), _mm512_set1_epi32(63));
    const auto top = [&](int w) { return _mm512_srli_epi32(load_line(lines + w * kLineBytes), 30); };
    return _mm512_or_si512(top(0), _mm512_or_si512(_mm512_slli_epi32(top(1), 2), _mm512_slli_epi32(top(2), 4)));
}

// The number that group Group's scale is multiplied with; `numbers` is what follows the halves.
template <Packing P, int Group>
CLLM_INLINE __m512i number_of_scale(const uint8_t* block, const uint8_t* numbers) {
    if constexpr (P == Packing::q6_k)
        return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(block + Group * kTileRows)));
    if constexpr (P == Packing::q2_k) return _mm512_and_si512(wide_bytes(numbers + Group * kTileRows), _mm512_set1_epi32(15));
    if constexpr (P == Packing::iq4_xs || in_codes(P)) {
        const __m512i dwords = _mm512_srli_epi32(load_line(block + nibble_at(P, Group)), nibble_bit(P, Group));
        const __m512i nibble = _mm512_and_si512(dwords, _mm512_set1_epi32(15));
        if constexpr (in_codes(P)) return _mm512_add_epi32(_mm512_slli_epi32(nibble, 1), _mm512_set1_epi32(1));
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(numbers + kLineBytes)));
        const __m512i upper = _mm512_slli_epi32(_mm512_and_si512(_mm512_srli_epi32(words, Group * 2), _mm512_set1_epi32(3)), 4);
        return _mm512_sub_epi32(_mm512_or_si512(nibble, upper), _mm512_set1_epi32(32));
    }
    return _mm512_sub_epi32(number<Group>(numbers), _mm512_set1_epi32(P == Packing::q3_k ? 32 : 0));
}

template <Packing P, int Group>
CLLM_INLINE __m512i number_of_minimum(const uint8_t* numbers) {
    if constexpr (P == Packing::q2_k) return _mm512_srli_epi32(wide_bytes(numbers + Group * kTileRows), 4);
    return number<8 + Group>(numbers);
}

template <Packing P, int Group>
CLLM_INLINE void scales_from(const uint8_t* block, const uint8_t* numbers, __m512 scale, __m512 minimum, float* to, int stride) {
    constexpr Layout layout = layout_of(P);
    if constexpr (Group < layout.groups()) {
        _mm512_store_ps(to, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(number_of_scale<P, Group>(block, numbers))));
        if constexpr (layout.has_min)
            _mm512_store_ps(to + kTileRows, _mm512_mul_ps(minimum, _mm512_cvtepi32_ps(number_of_minimum<P, Group>(numbers))));
        scales_from<P, Group + 1>(block, numbers, scale, minimum, to + stride, stride);
    }
}

// The factors of a block's groups: 16 scales, then 16 minima if there are, `stride` floats from one group to the next.
template <Packing P>
CLLM_INLINE void read_factors(const uint8_t* block, float* to, int stride) {
    constexpr Layout layout = layout_of(P);
    const uint8_t* halves = block + layout.factors_at() + (P == Packing::q6_k ? 256 : 0);
    if constexpr (P == Packing::mxfp4) {
        const __m512i bits = _mm512_max_epi32(_mm512_slli_epi32(wide_bytes(halves), 23), _mm512_set1_epi32(0x00400000));
        _mm512_store_ps(to, _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0.5f)));
        return;
    }
    __m512 scale = load_f16_16(halves), minimum = layout.has_min ? load_f16_16(halves + 32) : _mm512_setzero_ps();
    if constexpr (layout.super()) {
        if (in_codes(P)) scale = _mm512_mul_ps(scale, _mm512_set1_ps(code_unit(P)));
        minimum = _mm512_sub_ps(_mm512_set1_ps(-0.0f), minimum);
        scales_from<P, 0>(block, halves + (layout.has_min ? 64 : 32), scale, minimum, to, stride);
    } else {
        _mm512_store_ps(to, scale);
        if constexpr (layout.has_min) _mm512_store_ps(to + kTileRows, minimum);
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

// A line as it is opened: for AMX, which multiplies signed bytes, with the centre taken away.
template <Packing P, int Quad, bool Signed>
CLLM_INLINE __m512i opened_line(const uint8_t* block, int run, const CodedRun& coded) {
    constexpr int more = (Signed ? 0 : layout_of(opened_like(P)).centre) - layout_of(P).centre;
    __m512i line;
    if constexpr (in_codes(P)) line = coded_line<P, Quad>(coded);
    else line = packed_line<P, Quad>(block, run);
    return more ? _mm512_add_epi8(line, _mm512_set1_epi8(char(more))) : line;
}

template <Packing P, int Quad, bool Signed>
CLLM_INLINE void open_lines(const uint8_t* block, int run, const CodedRun& coded, uint8_t* out) {
    if constexpr (Quad < kRunLines) {
        constexpr Layout layout = layout_of(P);
        constexpr int lines = layout.group / 4, at = Quad / lines * layout.opened_bytes() + Quad % lines * kLineBytes;
        _mm512_store_si512(out + at, opened_line<P, Quad, Signed>(block, run, coded));
        open_lines<P, Quad + 1, Signed>(block, run, coded, out);
    }
}

template <Packing P, bool Signed>
static void open_blocks(const uint8_t* block, int64_t blocks, uint8_t* out) {
    constexpr Layout layout = layout_of(P);
    alignas(64) uint8_t values[in_codes(P) ? layout.columns * kTileRows : 1];
    for (; blocks > 0; --blocks, block += layout.bytes()) {
        if constexpr (in_codes(P)) spell_out<P>(block, values);
        read_factors<P>(block, (float*)(out + layout.opened_factors_at()), layout.opened_bytes() / int(sizeof(float)));
        for (int run = 0; run < layout.runs(); ++run, out += OpenedBlock<P>::bytes) {
            CodedRun coded{};
            if constexpr (in_codes(P)) coded = {signs_of_run<P>(block + layout.run_at(run)), values + run * kRun * kTileRows};
            open_lines<P, 0, Signed>(block, run, coded, out);
        }
    }
}

static void open_tile(const PackedMatrix& w, int64_t tile, uint8_t* out) {
    with_packing(w.packing, [&](auto packing) {
        open_blocks<packing, false>(w.tile(tile), w.cols / layout_of(packing).columns, out);
    });
}

}  // namespace CLLM_NS
}  // namespace cllm

// Blocks of a tile in registers: a line's half is 8 rows x 4 columns of unsigned bytes. Those of 8 bits are signed, or with
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

CLLM_INLINE __m256i wide_bytes(const uint8_t* at) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)); }
CLLM_INLINE __m256i table_of(const int8_t* sixteen) {
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)sixteen));
}

// What is added to a signed byte.
CLLM_INLINE constexpr int added_centre(Packing packing) {
    return layout_of(packing).bits == 8 && !kVnni ? 0 : layout_of(packing).centre;
}

// Half a run in codes: byte p of a row's dword has the signs of its quads 2*p and 2*p + 1; and the magnitudes of the run,
// spelled out.
struct CodedRun {
    __m256i signs;
    const uint8_t* values;
};

template <Packing P>
CLLM_INLINE __m256i signs_of_run(const uint8_t* run, int half) {
    constexpr Codes codes = codes_of(P);
    const __m256i dwords = load_half(run + codes.signs_at() + half * 32);
    if constexpr (!codes.even) return dwords;
    const auto sevens = [&](int of) {
        return _mm256_and_si256(_mm256_slli_epi32(dwords, of), _mm256_set1_epi32(127 << 8 * of));
    };
    const __m256i bytes = _mm256_or_si256(_mm256_or_si256(sevens(0), sevens(1)), _mm256_or_si256(sevens(2), sevens(3)));
    const __m256i folded = _mm256_and_si256(_mm256_xor_si256(bytes, _mm256_srli_epi32(bytes, 4)), _mm256_set1_epi8(15));
    return _mm256_or_si256(bytes, _mm256_shuffle_epi8(table_of(kOddOfFour), folded));
}

// All bits of each negative byte of quad Quad's line.
template <int Quad>
CLLM_INLINE __m256i signs_of_quad(__m256i signs) {
    constexpr int byte = Quad / 2 * 0x01010101;
    const __m128i bytes = _mm_set_epi32(byte + 0x0c0c0c0c, byte + 0x08080808, byte + 0x04040404, byte);
    const __m256i bit = _mm256_set1_epi32(Quad % 2 ? 0x80402010 : 0x08040201);
    const __m256i copies = _mm256_shuffle_epi8(signs, _mm256_broadcastsi128_si256(bytes));
    return _mm256_cmpeq_epi8(_mm256_and_si256(copies, bit), bit);
}

template <Packing P, int Quad>
CLLM_INLINE __m256i coded_line(const CodedRun& run, int half) {
    constexpr int quads = codes_of(P).quads();
    const uint8_t* at = run.values + (Quad / quads * kLineBytes + half * 32) * quads;
    __m256i line = load_half(at);
    if constexpr (quads == 2) {
        constexpr int dwords = Quad % 2 ? 0xdd : 0x88;
        const __m256 pairs = _mm256_shuffle_ps(_mm256_castsi256_ps(line), _mm256_castsi256_ps(load_half(at + 32)), dwords);
        line = _mm256_permute4x64_epi64(_mm256_castps_si256(pairs), 0xd8);
    }
    const __m256i minus = signs_of_quad<Quad>(run.signs);
    return _mm256_add_epi8(_mm256_sub_epi8(_mm256_xor_si256(line, minus), minus), _mm256_set1_epi8(char(added_centre(P))));
}

// Columns 4*Quad to 4*Quad + 3 of a run.
template <Packing P, int Quad>
CLLM_INLINE __m256i packed_line(const uint8_t* block, int run, int half) {
    constexpr Layout layout = layout_of(P);
    const uint8_t* lower = block + layout.run_at(run) + half * 32;
    const uint8_t* upper = block + layout.upper_at(run) + half * 32;
    if constexpr (layout.quarters == 32) {
        const __m256i line = load_half(lower + Quad * kLineBytes);
        return kVnni ? _mm256_xor_si256(line, _mm256_set1_epi8(-128)) : line;
    }
    if constexpr (layout.lower_bits() == 2) {
        const __m256i twos = shift_bits<-2 * (Quad % 4)>(load_half(lower + Quad / 4 * kLineBytes));
        const __m256i low = _mm256_and_si256(twos, _mm256_set1_epi8(3));
        if constexpr (layout.upper_bits() == 0) return low;
        return _mm256_or_si256(low, _mm256_and_si256(shift_bits<2 - Quad>(load_half(upper)), _mm256_set1_epi8(4)));
    }
    const __m256i both = load_half(lower + Quad % 4 * kLineBytes);
    const __m256i low = _mm256_and_si256(shift_bits<Quad < 4 ? 0 : -4>(both), _mm256_set1_epi8(15));
    if constexpr (in_nibble_codes(P)) {
        const __m256i centred = _mm256_add_epi8(table_of(nibble_values(P)), _mm256_set1_epi8(char(added_centre(P))));
        return _mm256_shuffle_epi8(centred, low);
    }
    if constexpr (layout.upper_bits() == 0) return low;
    if constexpr (layout.upper_bits() == 1)
        return _mm256_or_si256(low, _mm256_and_si256(shift_bits<4 - Quad>(load_half(upper)), _mm256_set1_epi8(16)));
    const __m256i twos = shift_bits<4 - 2 * (Quad % 4)>(load_half(upper + Quad / 4 * kLineBytes));
    return _mm256_or_si256(low, _mm256_and_si256(twos, _mm256_set1_epi8(48)));
}

// Number N of 8 rows of q3_k to q5_k.
template <int N>
CLLM_INLINE __m256i number(const uint8_t* lines) {
    if constexpr (N < 15)
        return _mm256_and_si256(_mm256_srli_epi32(load_half(lines + N / 5 * kLineBytes), 6 * (N % 5)), _mm256_set1_epi32(63));
    const auto top = [&](int w) { return _mm256_srli_epi32(load_half(lines + w * kLineBytes), 30); };
    return _mm256_or_si256(top(0), _mm256_or_si256(_mm256_slli_epi32(top(1), 2), _mm256_slli_epi32(top(2), 4)));
}

// The number that group Group's scale is multiplied with; `numbers` is what follows the halves.
template <Packing P, int Group>
CLLM_INLINE __m256i number_of_scale(const uint8_t* block, const uint8_t* numbers, int half) {
    if constexpr (P == Packing::q6_k)
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(block + Group * kTileRows + half * 8)));
    if constexpr (P == Packing::q2_k)
        return _mm256_and_si256(wide_bytes(numbers + Group * kTileRows + half * 8), _mm256_set1_epi32(15));
    if constexpr (P == Packing::iq4_xs || in_codes(P)) {
        const __m256i dwords = _mm256_srli_epi32(load_half(block + nibble_at(P, Group) + half * 32), nibble_bit(P, Group));
        const __m256i nibble = _mm256_and_si256(dwords, _mm256_set1_epi32(15));
        if constexpr (in_codes(P)) return _mm256_add_epi32(_mm256_slli_epi32(nibble, 1), _mm256_set1_epi32(1));
        const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(numbers + kLineBytes + half * 16)));
        const __m256i upper = _mm256_slli_epi32(_mm256_and_si256(_mm256_srli_epi32(words, Group * 2), _mm256_set1_epi32(3)), 4);
        return _mm256_sub_epi32(_mm256_or_si256(nibble, upper), _mm256_set1_epi32(32));
    }
    return _mm256_sub_epi32(number<Group>(numbers + half * 32), _mm256_set1_epi32(P == Packing::q3_k ? 32 : 0));
}

template <Packing P, int Group>
CLLM_INLINE __m256i number_of_minimum(const uint8_t* numbers, int half) {
    if constexpr (P == Packing::q2_k) return _mm256_srli_epi32(wide_bytes(numbers + Group * kTileRows + half * 8), 4);
    return number<8 + Group>(numbers + half * 32);
}

// Where a block's halves and numbers are, and the halves of eight rows as floats.
struct Factors {
    const uint8_t *block, *numbers;
    int half;
    __m256 scale, minimum;
};

template <Packing P, int Group>
CLLM_INLINE void scales_from(const Factors& from, float* to, int stride) {
    constexpr Layout layout = layout_of(P);
    if constexpr (Group < layout.groups()) {
        const __m256i of_scale = number_of_scale<P, Group>(from.block, from.numbers, from.half);
        _mm256_store_ps(to, _mm256_mul_ps(from.scale, _mm256_cvtepi32_ps(of_scale)));
        if constexpr (layout.has_min) {
            const __m256i of_minimum = number_of_minimum<P, Group>(from.numbers, from.half);
            _mm256_store_ps(to + kTileRows, _mm256_mul_ps(from.minimum, _mm256_cvtepi32_ps(of_minimum)));
        }
        scales_from<P, Group + 1>(from, to + stride, stride);
    }
}

// The factors of a block's groups: 16 scales, then 16 minima if there are, `stride` floats from one group to the next.
template <Packing P>
CLLM_INLINE void read_factors(const uint8_t* block, float* to, int stride) {
    constexpr Layout layout = layout_of(P);
    const uint8_t* halves = block + layout.factors_at() + (P == Packing::q6_k ? 256 : 0);
    for (int half = 0; half < 2; ++half, to += 8) {
        if constexpr (P == Packing::mxfp4) {
            const __m256i exponents = _mm256_slli_epi32(wide_bytes(halves + half * 8), 23);
            const __m256i bits = _mm256_max_epi32(exponents, _mm256_set1_epi32(0x00400000));
            _mm256_store_ps(to, _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0.5f)));
            continue;
        }
        __m256 scale = load_f16_8(halves + half * 16);
        __m256 minimum = layout.has_min ? load_f16_8(halves + 32 + half * 16) : _mm256_setzero_ps();
        if constexpr (layout.super()) {
            if (in_codes(P)) scale = _mm256_mul_ps(scale, _mm256_set1_ps(code_unit(P)));
            minimum = _mm256_sub_ps(_mm256_set1_ps(-0.0f), minimum);
            scales_from<P, 0>({block, halves + (layout.has_min ? 64 : 32), half, scale, minimum}, to, stride);
        } else {
            _mm256_store_ps(to, scale);
            if constexpr (layout.has_min) _mm256_store_ps(to + kTileRows, minimum);
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
CLLM_INLINE __m256i opened_line(const uint8_t* block, int run, const CodedRun& coded, int half) {
    constexpr int more = layout_of(opened_like(P)).centre - layout_of(P).centre;
    __m256i line;
    if constexpr (in_codes(P)) line = coded_line<P, Quad>(coded, half);
    else line = packed_line<P, Quad>(block, run, half);
    return more ? _mm256_add_epi8(line, _mm256_set1_epi8(char(more))) : line;
}

template <Packing P, int Quad>
CLLM_INLINE void open_lines(const uint8_t* block, int run, const CodedRun (&coded)[2], uint8_t* out) {
    if constexpr (Quad < kRunLines) {
        constexpr Layout layout = layout_of(P);
        constexpr int lines = layout.group / 4, at = Quad / lines * layout.opened_bytes() + Quad % lines * kLineBytes;
        for (int half = 0; half < 2; ++half)
            _mm256_store_si256((__m256i*)(out + at + half * 32), opened_line<P, Quad>(block, run, coded[half], half));
        open_lines<P, Quad + 1>(block, run, coded, out);
    }
}

template <Packing P>
static void open_blocks(const uint8_t* block, int64_t blocks, uint8_t* out) {
    constexpr Layout layout = layout_of(P);
    alignas(64) uint8_t values[in_codes(P) ? layout.columns * kTileRows : 1];
    for (; blocks > 0; --blocks, block += layout.bytes()) {
        if constexpr (in_codes(P)) spell_out<P>(block, values);
        read_factors<P>(block, (float*)(out + layout.opened_factors_at()), layout.opened_bytes() / int(sizeof(float)));
        for (int run = 0; run < layout.runs(); ++run, out += OpenedBlock<P>::bytes) {
            CodedRun coded[2] = {};
            for (int half = 0; in_codes(P) && half < 2; ++half)
                coded[half] = {signs_of_run<P>(block + layout.run_at(run), half), values + run * kRun * kTileRows};
            open_lines<P, 0>(block, run, coded, out);
        }
    }
}

static void open_tile(const PackedMatrix& w, int64_t tile, uint8_t* out) {
    with_packing(w.packing, [&](auto packing) {
        open_blocks<packing>(w.tile(tile), w.cols / layout_of(packing).columns, out);
    });
}

}  // namespace CLLM_NS
}  // namespace cllm

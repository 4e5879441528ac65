// Products with quantised weights by VPMADDUBSW: eight output rows are the lanes of a register, four columns at a time.
//
// Nibbles times bytes are added up in int16 over a group of 32 columns, which cannot overflow: 8 * 2 * 15 * 127 < 2^15.
// Whole bytes would, so their products are widened at once. The integer sums are exact; the float sequence after each group
// is the same for every number of inputs T.
#pragma once

#include "matmul_float.inl"
#include "matmul_job.inl"

namespace cllm {
namespace CLLM_NS {

constexpr int64_t kInputBytes = 400000;  // of inputs that are gone through for one tile: they stay in the L2 cache
constexpr int64_t kUnpackFrom = 8;       // inputs from which on it pays to unpack a tile of nibbles once into the L1 cache

// The inputs of T rows of one panel.
template <int T>
struct Inputs {
    const int8_t* values;
    const float* scales;
    const float* sums;

    CLLM_INLINE Inputs(const QuantRows& a, int64_t first_row) {
        const int64_t groups = a.cols / 32, panel = first_row / kPanelRows;
        values = a.values + panel * kPanelRows * a.cols;
        scales = a.scales + panel * kPanelRows * groups;
        sums = a.sums + panel * kPanelRows * groups;
    }
    CLLM_INLINE __m256i quad(int t, int64_t at) const {
        int32_t four;
        std::memcpy(&four, values + (at * kPanelRows + t) * 4, 4);
        return _mm256_set1_epi32(four);
    }
    CLLM_INLINE __m256 scale(int t, int64_t g) const { return _mm256_set1_ps(scales[g * kPanelRows + t]); }
    CLLM_INLINE __m256 sum(int t, int64_t g) const { return _mm256_set1_ps(sums[g * kPanelRows + t]); }
};

CLLM_INLINE __m256 load_f16_8(const uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }

// A group's integer sums of a tile, of its upper and its lower eight rows, scaled onto accumulators that live in memory.
template <int T, bool HasMin>
CLLM_INLINE void scale_sums(const __m256i (&sums)[2][T], const uint8_t* scales_at, const Inputs<T>& in, int64_t g,
                            float (*acc)[kTileRows]) {
    __m256 scale[2], minimum[2];
    for (int half = 0; half < 2; ++half) {
        scale[half] = load_f16_8(scales_at + half * 16);
        minimum[half] = HasMin ? load_f16_8(scales_at + 32 + half * 16) : _mm256_setzero_ps();
    }
    for (int t = 0; t < T; ++t) {
        const __m256 input_scale = in.scale(t, g), input_sum = HasMin ? in.sum(t, g) : _mm256_setzero_ps();
        for (int half = 0; half < 2; ++half) {
            __m256 total = _mm256_load_ps(acc[t] + half * 8);
            if (HasMin) total = _mm256_fmadd_ps(minimum[half], input_sum, total);
            total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[half][t]), _mm256_mul_ps(scale[half], input_scale), total);
            _mm256_store_ps(acc[t] + half * 8, total);
        }
    }
}

// One line of a half tile: 8 rows x 4 columns of nibbles as bytes, for the low (0) or high (1) half of the group.
template <bool Unpacked>
CLLM_INLINE __m256i nibbles(const uint8_t* packed, const uint8_t* bytes, int high, int line, int half) {
    if (Unpacked) return _mm256_load_si256((const __m256i*)(bytes + high * 256 + line * 64 + half * 32));
    const __m256i both = _mm256_loadu_si256((const __m256i*)(packed + line * 64 + half * 32));
    return _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}

template <int T, bool Unpacked>
CLLM_INLINE void q4_group(const uint8_t* packed, const uint8_t* bytes, const Inputs<T>& in, int64_t g,
                          float (*acc)[kTileRows]) {
    __m256i sums[2][T];
    for (int half = 0; half < 2; ++half)
        for (int t = 0; t < T; ++t) sums[half][t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line) {
        const __m256i top = nibbles<Unpacked>(packed, bytes, line / 4, line % 4, 0);
        const __m256i bottom = nibbles<Unpacked>(packed, bytes, line / 4, line % 4, 1);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            const __m256i x = in.quad(t, g * 8 + line);
            sums[0][t] = _mm256_add_epi16(sums[0][t], _mm256_maddubs_epi16(top, x));
            sums[1][t] = _mm256_add_epi16(sums[1][t], _mm256_maddubs_epi16(bottom, x));
        }
    }
    for (int half = 0; half < 2; ++half)
        for (int t = 0; t < T; ++t) sums[half][t] = _mm256_madd_epi16(sums[half][t], _mm256_set1_epi16(1));
    scale_sums<T, true>(sums, packed + 256, in, g, acc);
}

// Signed bytes: the weight's sign moves to the input, since the instruction wants one side unsigned.
template <int T, int Group, bool HasMin>
CLLM_INLINE void q8_group(const uint8_t* bytes, const Inputs<T>& in, int64_t g, float (*acc)[kTileRows]) {
    constexpr int lines = Group / 4;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[2][T];
    for (int half = 0; half < 2; ++half)
        for (int t = 0; t < T; ++t) sums[half][t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int line = 0; line < lines; ++line) {
        __m256i w[2], magnitude[2];
        for (int half = 0; half < 2; ++half) {
            w[half] = _mm256_loadu_si256((const __m256i*)(bytes + line * 64 + half * 32));
            magnitude[half] = _mm256_abs_epi8(w[half]);
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            const __m256i x = in.quad(t, g * lines + line);
            for (int half = 0; half < 2; ++half) {
                const __m256i pairs = _mm256_maddubs_epi16(magnitude[half], _mm256_sign_epi8(x, w[half]));
                sums[half][t] = _mm256_add_epi32(sums[half][t], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    scale_sums<T, HasMin>(sums, bytes + Group * kTileRows, in, g * Group / 32, acc);
}

// T inputs with R tiles, group by group, so that the memory is read in R places at once.
template <int T, int R>
static void run_tiles(const TileJob& job, int64_t row) {
    const PackedMatrix& w = job.w;
    const uint8_t* tile = w.data + size_t(job.tile) * w.tile_bytes();
    const int64_t groups = w.cols / w.group;
    const Inputs<T> in(job.inputs, row);
    alignas(64) float acc[R][T][kTileRows] = {};
    // Of many rows the output is larger than the L2 cache; fetched now, it is there when the sums are.
    for (int t = 0; t < T; ++t) __builtin_prefetch(job.out + (row + t) * job.out_stride + job.tile * kTileRows, 1);
    const auto each_group = [&](auto&& add_group) {
        for (int64_t g = 0; g < groups; ++g)
            for (int r = 0; r < R; ++r) add_group(tile + r * w.tile_bytes() + g * w.group_bytes(), g, acc[r]);
    };
    using Acc = float (*)[kTileRows];
    if (w.packing == Packing::q4 && job.unpacked)
        each_group([&](const uint8_t* at, int64_t g, Acc to) { q4_group<T, true>(at, job.unpacked + g * 512, in, g, to); });
    else if (w.packing == Packing::q4)
        each_group([&](const uint8_t* at, int64_t g, Acc to) { q4_group<T, false>(at, nullptr, in, g, to); });
    else if (w.group == 16)
        each_group([&](const uint8_t* at, int64_t g, Acc to) { q8_group<T, 16, false>(at, in, g, to); });
    else if (w.has_min)
        each_group([&](const uint8_t* at, int64_t g, Acc to) { q8_group<T, 32, true>(at, in, g, to); });
    else
        each_group([&](const uint8_t* at, int64_t g, Acc to) { q8_group<T, 32, false>(at, in, g, to); });
    for (int r = 0; r < R; ++r)
        put_results<T>(acc[r], w, job.tile + r, job.out + row * job.out_stride, job.out_stride, job.add);
}

// Few inputs wait for the memory, which is read faster from four places at once.
CLLM_INLINE int64_t tiles_together(int64_t inputs) { return inputs <= 2 ? 4 : 1; }

using RunTiles = void (*)(const TileJob&, int64_t);
constexpr RunTiles kRunTiles[5][kPanelRows + 1] = {
    {},
    {nullptr, run_tiles<1, 1>, run_tiles<2, 1>, run_tiles<3, 1>, run_tiles<4, 1>},
    {nullptr, run_tiles<1, 2>, run_tiles<2, 2>},
    {},
    {nullptr, run_tiles<1, 4>, run_tiles<2, 4>},
};

static void unpack_nibbles(const uint8_t* tile, int64_t groups, uint8_t* bytes) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int64_t g = 0; g < groups; ++g)
        for (int at = 0; at < 256; at += 32) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(tile + g * 320 + at));
            _mm256_store_si256((__m256i*)(bytes + g * 512 + at), _mm256_and_si256(both, nibble));
            _mm256_store_si256((__m256i*)(bytes + g * 512 + 256 + at), _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));
        }
}

#include "matmul_loop.inl"

}  // namespace CLLM_NS
}  // namespace cllm

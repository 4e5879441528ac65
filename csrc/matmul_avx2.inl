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

CLLM_INLINE int64_t tiles_together(int64_t) { return 1; }
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

// One group's integer sums, scaled onto the accumulators of eight rows (half a tile), which live in memory.
template <int T, bool HasMin>
CLLM_INLINE void scale_sums(const __m256i (&sums)[T], const uint8_t* scales_at, const Inputs<T>& in, int64_t g, int half,
                            float (*acc)[kTileRows]) {
    const __m256 scale = load_f16_8(scales_at + half * 16);
    const __m256 minimum = HasMin ? load_f16_8(scales_at + 32 + half * 16) : _mm256_setzero_ps();
    for (int t = 0; t < T; ++t) {
        __m256 total = _mm256_load_ps(acc[t] + half * 8);
        if (HasMin) total = _mm256_fmadd_ps(minimum, in.sum(t, g), total);
        total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[t]), _mm256_mul_ps(scale, in.scale(t, g)), total);
        _mm256_store_ps(acc[t] + half * 8, total);
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
CLLM_INLINE void q4_tile(const uint8_t* tile, const uint8_t* bytes, int64_t groups, const Inputs<T>& in,
                         float (*acc)[kTileRows]) {
    for (int64_t g = 0; g < groups; ++g, tile += 320, bytes += Unpacked ? 512 : 0) {
        __m256i sums[2][T];
        for (int half = 0; half < 2; ++half)
            for (int t = 0; t < T; ++t) sums[half][t] = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (int high = 0; high < 2; ++high)
#pragma GCC unroll 4
            for (int line = 0; line < 4; ++line) {
                const __m256i top = nibbles<Unpacked>(tile, bytes, high, line, 0);
                const __m256i bottom = nibbles<Unpacked>(tile, bytes, high, line, 1);
                for (int t = 0; t < T; ++t) {
                    const __m256i x = in.quad(t, g * 8 + high * 4 + line);
                    sums[0][t] = _mm256_add_epi16(sums[0][t], _mm256_maddubs_epi16(top, x));
                    sums[1][t] = _mm256_add_epi16(sums[1][t], _mm256_maddubs_epi16(bottom, x));
                }
            }
        for (int half = 0; half < 2; ++half) {
            for (int t = 0; t < T; ++t) sums[half][t] = _mm256_madd_epi16(sums[half][t], _mm256_set1_epi16(1));
            scale_sums<T, true>(sums[half], tile + 256, in, g, half, acc);
        }
    }
}

// Signed bytes: the weight's sign moves to the input, since the instruction wants one side unsigned.
template <int T, int Group, bool HasMin>
CLLM_INLINE void q8_tile(const uint8_t* tile, int64_t groups, const Inputs<T>& in, float (*acc)[kTileRows]) {
    constexpr int lines = Group / 4;
    constexpr int size = Group * kTileRows + 32 + (HasMin ? 32 : 0);
    for (int64_t g = 0; g < groups; ++g, tile += size)
        for (int half = 0; half < 2; ++half) {
            __m256i sums[T];
            for (int t = 0; t < T; ++t) sums[t] = _mm256_setzero_si256();
            for (int line = 0; line < lines; ++line) {
                const __m256i w = _mm256_loadu_si256((const __m256i*)(tile + line * 64 + half * 32));
                const __m256i magnitude = _mm256_abs_epi8(w);
                for (int t = 0; t < T; ++t) {
                    const __m256i x = _mm256_sign_epi8(in.quad(t, g * lines + line), w);
                    const __m256i pairs = _mm256_maddubs_epi16(magnitude, x);
                    sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                }
            }
            scale_sums<T, HasMin>(sums, tile + Group * kTileRows, in, g * Group / 32, half, acc);
        }
}

template <int T>
static void run_tile(const TileJob& job, int64_t row) {
    const PackedMatrix& w = job.w;
    const uint8_t* tile = w.data + size_t(job.tile) * w.tile_bytes();
    const int64_t groups = w.cols / w.group;
    const Inputs<T> in(job.inputs, row);
    alignas(64) float acc[T][kTileRows] = {};
    // Of many rows the output is larger than the L2 cache; fetched now, it is there when the sums are.
    for (int t = 0; t < T; ++t) __builtin_prefetch(job.out + (row + t) * job.out_stride + job.tile * kTileRows, 1);
    if (w.packing == Packing::q4 && job.unpacked)
        q4_tile<T, true>(tile, job.unpacked, groups, in, acc);
    else if (w.packing == Packing::q4)
        q4_tile<T, false>(tile, nullptr, groups, in, acc);
    else if (w.group == 16)
        q8_tile<T, 16, false>(tile, groups, in, acc);
    else if (w.has_min)
        q8_tile<T, 32, true>(tile, groups, in, acc);
    else
        q8_tile<T, 32, false>(tile, groups, in, acc);
    put_results<T>(acc, w, job.tile, job.out + row * job.out_stride, job.out_stride, job.add);
}

static void unpack_nibbles(const uint8_t* tile, int64_t groups, uint8_t* bytes) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int64_t g = 0; g < groups; ++g)
        for (int at = 0; at < 256; at += 32) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(tile + g * 320 + at));
            _mm256_store_si256((__m256i*)(bytes + g * 512 + at), _mm256_and_si256(both, nibble));
            _mm256_store_si256((__m256i*)(bytes + g * 512 + 256 + at), _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));
        }
}

using RunTiles = void (*)(const TileJob&, int64_t);
constexpr RunTiles kRunTiles[2][kPanelRows + 1] = {
    {},
    {nullptr, run_tile<1>, run_tile<2>, run_tile<3>, run_tile<4>},
};

#include "matmul_loop.inl"

}  // namespace CLLM_NS
}  // namespace cllm

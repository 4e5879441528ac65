// Products with quantised weights by VPDPBUSD: 16 output rows are the lanes of a register, four columns at a time.
//
// For a group of columns the products of weights and inputs are added up in int32, exactly, so the order does not matter;
// then the sum is scaled into the float accumulator, group after group. That sequence is the same for every number of
// inputs T and of tiles R that are computed together: they only decide how often a value is used once it is in a register.
#pragma once

#include "matmul_float.inl"
#include "matmul_job.inl"

namespace cllm {
namespace CLLM_NS {

constexpr int64_t kInputBytes = 400000;  // of inputs that are gone through for one tile: they stay in the L2 cache
constexpr int64_t kUnpackFrom = 13;      // inputs from which on it pays to unpack nibbles once into the L1 cache

// The inputs of one panel.
struct Inputs {
    const int8_t* values;
    const float* scales;
    const float* sums;
    const int32_t* offsets;

    CLLM_INLINE Inputs(const QuantRows& a, int64_t panel, bool groups_of_16) {
        const int64_t groups = a.cols / 32;
        values = a.values + panel * kPanelRows * a.cols;
        scales = a.scales + panel * kPanelRows * groups;
        sums = a.sums + panel * kPanelRows * groups;
        offsets = groups_of_16 ? a.offsets16 + panel * kPanelRows * groups * 2 : a.offsets32 + panel * kPanelRows * groups;
    }
    CLLM_INLINE __m512i quad(int t, int64_t at) const {
        int32_t four;
        std::memcpy(&four, values + (at * kPanelRows + t) * 4, 4);
        __m512i all = _mm512_set1_epi32(four);
        // In a register: as a memory operand it would be read again for every tile.
        asm("" : "+v"(all));
        return all;
    }
    CLLM_INLINE __m512 scale(int t, int64_t g) const { return _mm512_set1_ps(scales[g * kPanelRows + t]); }
    CLLM_INLINE __m512 sum(int t, int64_t g) const { return _mm512_set1_ps(sums[g * kPanelRows + t]); }
    CLLM_INLINE __m512i offset(int t, int64_t g) const { return _mm512_set1_epi32(offsets[g * kPanelRows + t]); }
};

CLLM_INLINE __m512 load_f16_16(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }

// One group's integer sums, scaled onto the float accumulators of one tile.
template <int T, bool HasMin>
CLLM_INLINE void scale_sums(const __m512i (&sums)[T], const uint8_t* scales_at, const Inputs& in, int64_t g, __m512 (&acc)[T]) {
    const __m512 scale = load_f16_16(scales_at);
    const __m512 minimum = HasMin ? load_f16_16(scales_at + 32) : _mm512_setzero_ps();
    for (int t = 0; t < T; ++t) {
        if (HasMin) acc[t] = _mm512_fmadd_ps(minimum, in.sum(t, g), acc[t]);
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), _mm512_mul_ps(scale, in.scale(t, g)), acc[t]);
    }
}

// Nibbles of R tiles, unpacked on the way (Unpacked = false) or lying as bytes in `bytes`, 512 a group.
template <int T, int R, bool Unpacked>
CLLM_INLINE void q4_tiles(const TileJob& job, const uint8_t* tile, int64_t groups, const Inputs& in, __m512 (&acc)[R][T]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const size_t next_tile = job.w.tile_bytes(), next_bytes = size_t(groups) * 512;
    const uint8_t* bytes = job.unpacked;
    for (int64_t g = 0; g < groups; ++g, tile += 320, bytes += Unpacked ? 512 : 0) {
        __m512i sums[R][T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) sums[r][t] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int line = 0; line < 4; ++line) {
            __m512i low[R], high[R];
            for (int r = 0; r < R; ++r) {
                if (Unpacked) {
                    low[r] = _mm512_load_si512(bytes + r * next_bytes + line * 64);
                    high[r] = _mm512_load_si512(bytes + r * next_bytes + 256 + line * 64);
                } else {
                    const __m512i both = _mm512_loadu_si512(tile + r * next_tile + line * 64);
                    low[r] = _mm512_and_si512(both, nibble);
                    high[r] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
                }
            }
            for (int t = 0; t < T; ++t) {
                const __m512i x = in.quad(t, g * 8 + line);
                for (int r = 0; r < R; ++r) sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], low[r], x);
            }
            for (int t = 0; t < T; ++t) {
                const __m512i x = in.quad(t, g * 8 + 4 + line);
                for (int r = 0; r < R; ++r) sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], high[r], x);
            }
        }
        for (int r = 0; r < R; ++r) scale_sums<T, true>(sums[r], tile + r * next_tile + 256, in, g, acc[r]);
    }
}

// Bytes stored plus 128; the inputs' offsets take that away again.
template <int T, int R, int Group, bool HasMin>
CLLM_INLINE void q8_tiles(const TileJob& job, const uint8_t* tile, int64_t groups, const Inputs& in, __m512 (&acc)[R][T]) {
    constexpr int lines = Group / 4;
    constexpr int size = Group * kTileRows + 32 + (HasMin ? 32 : 0);
    const size_t next_tile = job.w.tile_bytes();
    for (int64_t g = 0; g < groups; ++g, tile += size) {
        __m512i sums[R][T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) sums[r][t] = in.offset(t, g);
#pragma GCC unroll 8
        for (int line = 0; line < lines; ++line) {
            __m512i w[R];
            for (int r = 0; r < R; ++r) w[r] = _mm512_loadu_si512(tile + r * next_tile + line * 64);
            for (int t = 0; t < T; ++t) {
                const __m512i x = in.quad(t, g * lines + line);
                for (int r = 0; r < R; ++r) sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], w[r], x);
            }
        }
        for (int r = 0; r < R; ++r)
            scale_sums<T, HasMin>(sums[r], tile + r * next_tile + Group * kTileRows, in, g * Group / 32, acc[r]);
    }
}

template <int T, int R>
CLLM_INLINE void put_sums(const TileJob& job, int64_t row, __m512 (&acc)[R][T]) {
    for (int r = 0; r < R; ++r) {
        const int64_t first = (job.tile + r) * kTileRows, left = job.w.rows - first;
        const __mmask16 rows = left >= kTileRows ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
        for (int t = 0; t < T; ++t) {
            float* to = job.out + (row + t) * job.out_stride + first;
            if (job.add) acc[r][t] = _mm512_add_ps(_mm512_maskz_loadu_ps(rows, to), acc[r][t]);
            _mm512_mask_storeu_ps(to, rows, acc[r][t]);
        }
    }
}

template <int T, int R>
static void run_tiles(const TileJob& job, int64_t row) {
    const PackedMatrix& w = job.w;
    const uint8_t* tile = w.data + size_t(job.tile) * w.tile_bytes();
    const int64_t groups = w.cols / w.group;
    const Inputs in(job.inputs, row / kPanelRows, w.group == 16);
    __m512 acc[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            acc[r][t] = _mm512_setzero_ps();
            // Of many rows the output is larger than the L2 cache; fetched now, it is there when the sums are.
            __builtin_prefetch(job.out + (row + t) * job.out_stride + (job.tile + r) * kTileRows, 1);
        }
    if (w.packing == Packing::q4 && job.unpacked)
        q4_tiles<T, R, true>(job, tile, groups, in, acc);
    else if (w.packing == Packing::q4)
        q4_tiles<T, R, false>(job, tile, groups, in, acc);
    else if (w.group == 16)
        q8_tiles<T, R, 16, false>(job, tile, groups, in, acc);
    else if (w.has_min)
        q8_tiles<T, R, 32, true>(job, tile, groups, in, acc);
    else
        q8_tiles<T, R, 32, false>(job, tile, groups, in, acc);
    put_sums<T, R>(job, row, acc);
}

// Two, so that with 6 inputs the 12 integer and 12 float accumulators fit the 32 registers. Few inputs wait for the memory,
// which is read faster from four places at once.
CLLM_INLINE int64_t tiles_together(int64_t inputs) { return inputs <= 2 ? 4 : 2; }

using RunTiles = void (*)(const TileJob&, int64_t);
constexpr RunTiles kRunTiles[5][kPanelRows + 1] = {
    {},
    {nullptr, run_tiles<1, 1>, run_tiles<2, 1>, run_tiles<3, 1>, run_tiles<4, 1>, run_tiles<5, 1>, run_tiles<6, 1>},
    {nullptr, run_tiles<1, 2>, run_tiles<2, 2>, run_tiles<3, 2>, run_tiles<4, 2>, run_tiles<5, 2>, run_tiles<6, 2>},
    {},
    {nullptr, run_tiles<1, 4>, run_tiles<2, 4>},
};

static void unpack_nibbles(const uint8_t* tile, int64_t groups, uint8_t* bytes) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int64_t g = 0; g < groups; ++g)
        for (int line = 0; line < 4; ++line) {
            const __m512i both = _mm512_loadu_si512(tile + g * 320 + line * 64);
            _mm512_store_si512(bytes + g * 512 + line * 64, _mm512_and_si512(both, nibble));
            _mm512_store_si512(bytes + g * 512 + 256 + line * 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
        }
}

#include "matmul_loop.inl"

}  // namespace CLLM_NS
}  // namespace cllm

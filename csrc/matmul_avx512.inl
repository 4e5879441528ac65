// Products with quantised weights by VPDPBUSD: 16 output rows are the lanes of a register, four columns at a time.
//
// For a group of columns the products of weights and inputs are added up in int32, exactly, so the order does not matter;
// then the sum is scaled into the float accumulator, group after group. That sequence is the same for every number of
// inputs T that is computed together: T only decides how often a weight is used once it is in a register.
#pragma once

#include "matmul_float.inl"
#include "matmul_job.inl"

namespace cllm {
namespace CLLM_NS {

constexpr int kMaxTokens = 12;          // 12 integer and 12 float accumulators fit the 32 registers
constexpr int64_t kInputBytes = 400000;  // of inputs that are gone through for one tile: they stay in the L2 cache
constexpr int64_t kUnpackFrom = 16;      // inputs from which on it pays to unpack a tile of nibbles once into the L1 cache

// Where the inputs of T rows lie, from a row that begins a panel.
template <int T>
struct Inputs {
    static constexpr int panels = (T + kPanelRows - 1) / kPanelRows;
    const int8_t* values[panels];
    const float* scales[panels];
    const float* sums[panels];
    const int32_t* offsets[panels];

    CLLM_INLINE Inputs(const QuantRows& a, int64_t first_row, bool groups_of_16) {
        const int64_t groups = a.cols / 32;
        for (int p = 0; p < panels; ++p) {
            const int64_t panel = first_row / kPanelRows + p;
            values[p] = a.values + panel * kPanelRows * a.cols;
            scales[p] = a.scales + panel * kPanelRows * groups;
            sums[p] = a.sums + panel * kPanelRows * groups;
            offsets[p] = groups_of_16 ? a.offsets16 + panel * kPanelRows * groups * 2 : a.offsets32 + panel * kPanelRows * groups;
        }
    }
    CLLM_INLINE __m512i quad(int t, int64_t at) const {
        int32_t four;
        std::memcpy(&four, values[t / kPanelRows] + (at * kPanelRows + t % kPanelRows) * 4, 4);
        return _mm512_set1_epi32(four);
    }
    CLLM_INLINE __m512 scale(int t, int64_t g) const {
        return _mm512_set1_ps(scales[t / kPanelRows][g * kPanelRows + t % kPanelRows]);
    }
    CLLM_INLINE __m512 sum(int t, int64_t g) const {
        return _mm512_set1_ps(sums[t / kPanelRows][g * kPanelRows + t % kPanelRows]);
    }
    CLLM_INLINE __m512i offset(int t, int64_t g) const {
        return _mm512_set1_epi32(offsets[t / kPanelRows][g * kPanelRows + t % kPanelRows]);
    }
};

CLLM_INLINE __m512 load_f16_16(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }

// Nibbles, unpacked on the way (Unpacked = false) or lying as bytes in `bytes`, 512 a group.
template <int T, bool Unpacked>
CLLM_INLINE void q4_tile(const uint8_t* tile, const uint8_t* bytes, int64_t groups, const Inputs<T>& in, __m512 (&acc)[T]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int t = 0; t < T; ++t) acc[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, tile += 320) {
        __m512i sums[T];
        for (int t = 0; t < T; ++t) sums[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int line = 0; line < 4; ++line) {
            __m512i low, high;
            if (Unpacked) {
                low = _mm512_load_si512(bytes + g * 512 + line * 64);
                high = _mm512_load_si512(bytes + g * 512 + 256 + line * 64);
            } else {
                const __m512i both = _mm512_loadu_si512(tile + line * 64);
                low = _mm512_and_si512(both, nibble);
                high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            }
            for (int t = 0; t < T; ++t) sums[t] = _mm512_dpbusd_epi32(sums[t], low, in.quad(t, g * 8 + line));
            for (int t = 0; t < T; ++t) sums[t] = _mm512_dpbusd_epi32(sums[t], high, in.quad(t, g * 8 + 4 + line));
        }
        const __m512 scale = load_f16_16(tile + 256), minimum = load_f16_16(tile + 288);
        for (int t = 0; t < T; ++t) {
            const __m512 scales = _mm512_mul_ps(scale, in.scale(t, g));
            acc[t] = _mm512_fmadd_ps(minimum, in.sum(t, g), acc[t]);
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), scales, acc[t]);
        }
    }
}

// Bytes stored plus 128; the inputs' offsets take that away again.
template <int T, int Group, bool HasMin>
CLLM_INLINE void q8_tile(const uint8_t* tile, int64_t groups, const Inputs<T>& in, __m512 (&acc)[T]) {
    constexpr int lines = Group / 4;
    constexpr int bytes = Group * kTileRows + 32 + (HasMin ? 32 : 0);
    for (int t = 0; t < T; ++t) acc[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, tile += bytes) {
        __m512i sums[T];
        for (int t = 0; t < T; ++t) sums[t] = in.offset(t, g);
#pragma GCC unroll 8
        for (int line = 0; line < lines; ++line) {
            const __m512i w = _mm512_loadu_si512(tile + line * 64);
            for (int t = 0; t < T; ++t) sums[t] = _mm512_dpbusd_epi32(sums[t], w, in.quad(t, g * lines + line));
        }
        const __m512 scale = load_f16_16(tile + Group * kTileRows);
        const int64_t g32 = g * Group / 32;
        for (int t = 0; t < T; ++t) {
            const __m512 scales = _mm512_mul_ps(scale, in.scale(t, g32));
            if (HasMin) acc[t] = _mm512_fmadd_ps(load_f16_16(tile + Group * kTileRows + 32), in.sum(t, g32), acc[t]);
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), scales, acc[t]);
        }
    }
}

template <int T>
static void run_tile(const TileJob& job, int64_t row) {
    const PackedMatrix& w = job.w;
    const uint8_t* tile = w.data + size_t(job.tile) * w.tile_bytes();
    const int64_t groups = w.cols / w.group;
    const Inputs<T> in(job.inputs, row, w.group == 16);
    __m512 acc[T];
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
    const int64_t left = w.rows - job.tile * kTileRows;
    const __mmask16 rows = left >= kTileRows ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
    for (int t = 0; t < T; ++t) {
        float* to = job.out + (row + t) * job.out_stride + job.tile * kTileRows;
        if (job.add) acc[t] = _mm512_add_ps(_mm512_maskz_loadu_ps(rows, to), acc[t]);
        _mm512_mask_storeu_ps(to, rows, acc[t]);
    }
}

using RunTile = void (*)(const TileJob&, int64_t);
constexpr RunTile kRunTile[kMaxTokens + 1] = {
    nullptr,     run_tile<1>, run_tile<2>, run_tile<3>, run_tile<4>,  run_tile<5>,  run_tile<6>,
    run_tile<7>, run_tile<8>, run_tile<9>, run_tile<10>, run_tile<11>, run_tile<12>,
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

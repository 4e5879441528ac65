// Products of many inputs by AMX: a panel of 16 inputs times a tile of 16 outputs, a group of columns at a time.
//
//   inputs of a group           an opened tile's group         sums
//   16 rows of 32 bytes    x    8 lines of 64 bytes       =    16 rows of 16 int32
//
// One instruction computes that, and its sums are exact, as those of the other kernels are; what follows each group is their
// sequence of float operations, too. The instruction takes 16 cycles, but storing its sums for the scaling takes as long again,
// and scaling them 24 to 32: that is the price of a scale per group, and why AMX gains far less than eightfold. The
// float accumulators stay in registers, which have room for one panel and one tile, and the tiles run ahead of the scaling by
// kAhead groups. More of them under way, or two panels and two tiles at once, were slower with all threads at work. Few inputs
// go to the AVX-512 kernels.
#pragma once

#include <algorithm>
#include <cstring>

#include "matmul_avx512.inl"
#include "tiles.h"

namespace cllm {
namespace CLLM_NS {

constexpr int64_t kTilesFrom = 16;    // inputs from which on it pays to open a tile for AMX
constexpr int64_t kBlockCols = 2048;  // columns of a tile that are opened at a time: they stay in the L1 cache
constexpr int64_t kBlockRows = 512;   // inputs multiplied with them: they stay in the L2 cache
constexpr int kRing = 4;              // groups whose sums are in memory, kAhead and the one that is scaled among them
constexpr int kAhead = 2;             // groups by which sums are computed before they are scaled
static_assert(kPanelRows == kTileLines && kTileRows == kTileLines, "a panel and a tile of weights fill a tile register");

using Sums = int32_t[kPanelRows][kTileRows];

// A thread's memory beside the packed weights and the inputs.
struct TileScratch {
    alignas(64) Sums ring[kRing];
    alignas(64) float totals[kBlockRows][kTileRows];  // of the columns so far
    alignas(64) uint8_t opened[kBlockCols * kOpenedColumnBytes];
};
static_assert(sizeof(TileScratch) <= kLeastMatmulScratch, "kernels.h says how much there is");

// Registers 0 and 1 hold sums, 2 and 3 inputs, 4 and 5 weights, of even and odd groups.
template <Packing P>
CLLM_INLINE TileShapes tile_shapes() {
    constexpr int group = layout_of(P).group;
    TileShapes shapes;
    for (int odd = 0; odd < 2; ++odd) {
        shapes.set(odd, kPanelRows, kTileRows * 4);
        shapes.set(2 + odd, kPanelRows, group);
        shapes.set(4 + odd, group / 4, kLineBytes);
    }
    return shapes;
}

// One panel of inputs and some groups of an opened tile.
struct PanelJob {
    const int8_t* values;
    const float* scales;
    const float* sums;
    const int32_t* offsets16;
    const uint8_t* opened;
    int64_t groups;
    Sums* ring;
};

template <Packing P, int Odd>
CLLM_INLINE void sum_group(const PanelJob& job, int64_t g) {
    constexpr Layout layout = layout_of(P);
    const int64_t column = g * layout.group;
    const int8_t* values = job.values + column / kPanelCols * kPanelCols * kPanelRows + column % kPanelCols;
    const uint8_t* lines = job.opened + g * layout.opened_bytes();
    int32_t* to = job.ring[g % kRing][0];
    // The registers' numbers are part of the instructions.
    if (Odd) {
        _tile_zero(1);
        _tile_loadd(3, values, kPanelCols);
        _tile_loadd(5, lines, kLineBytes);
        _tile_dpbssd(1, 3, 5);
        _tile_stored(1, to, kTileRows * 4);
    } else {
        _tile_zero(0);
        _tile_loadd(2, values, kPanelCols);
        _tile_loadd(4, lines, kLineBytes);
        _tile_dpbssd(0, 2, 4);
        _tile_stored(0, to, kTileRows * 4);
    }
}

template <Packing P, int T>
CLLM_INLINE void scale_group(const PanelJob& job, int64_t g, __m512 (&acc)[T]) {
    constexpr Layout layout = layout_of(P);
    const float* factors = (const float*)(job.opened + g * layout.opened_bytes() + layout.opened_factors_at());
    const int64_t run = g * layout.group / kRun;
    const float* input_scales = job.scales + run * kPanelRows;
    const float* input_sums = job.sums + run * kPanelRows;
    alignas(64) float sums_of_16[kPanelRows];
    if constexpr (layout.has_min && layout.group == 16) {
        const __m512 of_128 = _mm512_cvtepi32_ps(_mm512_loadu_si512(job.offsets16 + g * kPanelRows));
        const __m512 whole = _mm512_mul_ps(of_128, _mm512_set1_ps(kSumOfOffset));
        _mm512_store_ps(sums_of_16, _mm512_mul_ps(_mm512_loadu_ps(input_scales), whole));
        input_sums = sums_of_16;
    }
    const Sums& sums = job.ring[g % kRing];
    const __m512 scale = _mm512_load_ps(factors);
    const __m512 minimum = layout.has_min ? _mm512_load_ps(factors + kTileRows) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
        if (layout.has_min) acc[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(input_sums[t]), acc[t]);
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[t])),
                                 _mm512_mul_ps(scale, _mm512_set1_ps(input_scales[t])), acc[t]);
    }
}

// Adds the products of all groups onto the first T rows of `totals`.
template <Packing P, int T>
static void add_panel(const PanelJob& whole, float (*totals)[kTileRows]) {
    static_assert(kAhead == 2 && kRing > kAhead, "as written out below");
    const PanelJob job = whole;  // not in memory, which may have changed with every tile that is stored
    __m512 acc[T];  // in registers, as no index is computed
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[t] = _mm512_load_ps(totals[t]);
    sum_group<P, 0>(job, 0);
    if (job.groups > 1) sum_group<P, 1>(job, 1);
    int64_t g = 0;
    for (; g + 3 < job.groups; g += 2) {
        sum_group<P, 0>(job, g + 2);
        scale_group<P>(job, g, acc);
        sum_group<P, 1>(job, g + 3);
        scale_group<P>(job, g + 1, acc);
    }
    if (g + 2 < job.groups) sum_group<P, 0>(job, g + 2);
    for (; g < job.groups; ++g) scale_group<P>(job, g, acc);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) _mm512_store_ps(totals[t], acc[t]);
}

// These are opened like the others.
CLLM_INLINE constexpr Packing tiled_like(Packing packing) {
    const Layout layout = layout_of(packing);
    if (layout.group == 16) return layout.has_min ? Packing::q2_k : Packing::q6_k;
    return layout.has_min ? Packing::q4_1 : Packing::q4_0;
}

// In quarters of a panel's rows; the results of rows beyond the last input are computed from arbitrary bytes and discarded.
using AddPanel = void (*)(const PanelJob&, float (*)[kTileRows]);
template <Packing P>
constexpr AddPanel kAddPanel[] = {nullptr, add_panel<P, 4>, add_panel<P, 8>,
                                  add_panel<P, 12>, add_panel<P, 16>};

// The rows of `totals` into (or onto) the output; a last tile has fewer than 16 outputs.
CLLM_INLINE void put_totals(const float (*totals)[kTileRows], int64_t rows, int64_t outputs, float* out, int64_t out_stride,
                            bool add) {
    const __mmask16 mask = outputs >= kTileRows ? __mmask16(0xffff) : __mmask16((1u << outputs) - 1);
    for (int64_t row = 0; row < rows; ++row, out += out_stride) {
        __m512 total = _mm512_load_ps(totals[row]);
        if (add) total = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), total);
        _mm512_mask_storeu_ps(out, mask, total);
    }
}

// A tile times the inputs [begin, end), at most kBlockRows of them.
template <Packing P>
static void multiply_tile(const TileJob& job, int64_t begin, int64_t end, TileScratch& scratch) {
    constexpr Layout layout = layout_of(P);
    const QuantRows& inputs = job.inputs;
    const int64_t cols = inputs.cols, runs = cols / kRun, first = job.tile * kTileRows;
    for (int64_t column = 0; column < cols; column += kBlockCols) {
        const int64_t n_cols = std::min(kBlockCols, cols - column);
        const bool all = n_cols == cols, last = column + n_cols == cols;
        open_blocks<P, true>(job.w.tile(job.tile) + column / layout.columns * layout.bytes(), n_cols / layout.columns, scratch.opened);
        asm volatile("" : : : "memory");  // written before tiles are loaded, of which the compiler does not know what they read
        for (int64_t row = begin; row < end; row += kPanelRows) {
            const int64_t rows = std::min<int64_t>(kPanelRows, end - row), at = (row * runs + column / kRun * kPanelRows);
            float(*totals)[kTileRows] = scratch.totals + (all ? 0 : row - begin);
            float* out = job.out + row * job.out_stride + first;
            if (column == 0) std::memset(totals, 0, sizeof(float) * kTileRows * kPanelRows);
            for (int64_t t = 0; last && t < rows; ++t) __builtin_prefetch(out + t * job.out_stride, 1);
            const PanelJob panel{inputs.values + row * cols + column * kPanelRows, inputs.scales + at, inputs.sums + at,
                                 inputs.offsets16 + 2 * at, scratch.opened, n_cols / layout.group, scratch.ring};
            kAddPanel<tiled_like(P)>[(rows + 3) / 4](panel, totals);
            if (last) put_totals(totals, rows, job.w.rows - first, out, job.out_stride, job.add);
        }
    }
}

static void matmul_by_tiles(const PackedMatrix& w, const QuantRows& quants, const float* floats, int64_t m, int64_t first_tile,
                            int64_t last_tile, float* out, int64_t out_stride, bool add, uint8_t* scratch) {
    if (!w.quantised() || m < kTilesFrom)
        return matmul(w, quants, floats, m, first_tile, last_tile, out, out_stride, add, scratch);
    with_packing(w.packing, [&](auto packing) {
        const TileShapes shapes = tile_shapes<packing>();
        const Tiles tiles(shapes);
        for (int64_t begin = 0; begin < m; begin += kBlockRows)
            for (int64_t tile = first_tile; tile < last_tile; ++tile)
                multiply_tile<packing>({w, quants, tile, nullptr, out, out_stride, add}, begin,
                                       std::min(m, begin + kBlockRows), *(TileScratch*)scratch);
    });
}

}  // namespace CLLM_NS
}  // namespace cllm

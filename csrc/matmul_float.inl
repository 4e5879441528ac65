// Matrix products with f32, f16 and bf16 weights: a lane is an output row, columns are added up one after another.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

template <Packing P>
CLLM_INLINE Vec load_weights(const uint8_t* at) {
    if (P == Packing::f16) return Vec::load_f16((const uint16_t*)at);
    if (P == Packing::bf16) return Vec::load_bf16((const uint16_t*)at);
    return Vec::load((const float*)at);
}

template <Packing P, int T>
static void float_tile(const uint8_t* tile, int64_t cols, const float* x, float results[T][kTileRows]) {
    constexpr int parts = kTileRows / Vec::lanes;
    constexpr int width = P == Packing::f32 ? 4 : 2;
    Vec sums[T][parts];
    for (int t = 0; t < T; ++t)
        for (int p = 0; p < parts; ++p) sums[t][p] = Vec::zero();
    for (int64_t c = 0; c < cols; ++c)
        for (int p = 0; p < parts; ++p) {
            const Vec w = load_weights<P>(tile + (c * kTileRows + p * Vec::lanes) * width);
            for (int t = 0; t < T; ++t) sums[t][p] = fma(w, Vec::all(x[t * cols + c]), sums[t][p]);
        }
    for (int t = 0; t < T; ++t)
        for (int p = 0; p < parts; ++p) sums[t][p].store(results[t] + p * Vec::lanes);
}

// The results of one tile for T inputs, into (or onto) the output; a last tile has fewer than 16 rows.
template <int T>
CLLM_INLINE void put_results(const float results[T][kTileRows], const PackedMatrix& w, int64_t tile, float* out,
                             int64_t out_stride, bool add) {
    const int64_t first = tile * kTileRows;
    const int64_t rows = w.rows - first < kTileRows ? w.rows - first : kTileRows;
    for (int t = 0; t < T; ++t) {
        float* to = out + t * out_stride + first;
        for (int64_t r = 0; r < rows; ++r) to[r] = add ? to[r] + results[t][r] : results[t][r];
    }
}

template <Packing P>
static void matmul_float(const PackedMatrix& w, const float* x, int64_t m, int64_t first_tile, int64_t last_tile, float* out,
                         int64_t out_stride, bool add) {
    constexpr int kTokens = 4;
    alignas(64) float results[kTokens][kTileRows];
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const uint8_t* data = w.data + size_t(tile) * w.tile_bytes();
        int64_t row = 0;
        for (; row + kTokens <= m; row += kTokens) {
            float_tile<P, kTokens>(data, w.cols, x + row * w.cols, results);
            put_results<kTokens>(results, w, tile, out + row * out_stride, out_stride, add);
        }
        for (; row < m; ++row) {
            float_tile<P, 1>(data, w.cols, x + row * w.cols, results);
            put_results<1>(results, w, tile, out + row * out_stride, out_stride, add);
        }
    }
}

static void matmul_any_float(const PackedMatrix& w, const float* x, int64_t m, int64_t first_tile, int64_t last_tile,
                             float* out, int64_t out_stride, bool add) {
    switch (w.packing) {
        case Packing::f16: return matmul_float<Packing::f16>(w, x, m, first_tile, last_tile, out, out_stride, add);
        case Packing::bf16: return matmul_float<Packing::bf16>(w, x, m, first_tile, last_tile, out, out_stride, add);
        default: return matmul_float<Packing::f32>(w, x, m, first_tile, last_tile, out, out_stride, add);
    }
}

}  // namespace CLLM_NS
}  // namespace cllm

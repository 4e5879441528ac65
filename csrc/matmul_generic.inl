// Products with quantised weights for any CPU: plain loops over the packed layout, one input row at a time.
#pragma once

#include "elementwise.inl"
#include "matmul_float.inl"

namespace cllm {
namespace CLLM_NS {

// Integer products of one group of one tile with one input row, summed per output row.
static void sum_group(const PackedMatrix& w, const uint8_t* group, const int8_t* x, int32_t sums[kTileRows]) {
    for (int r = 0; r < kTileRows; ++r) sums[r] = 0;
    const bool q4 = w.packing == Packing::q4;
    const int lines = q4 ? 4 : w.group / 4;
    for (int line = 0; line < lines; ++line)
        for (int r = 0; r < kTileRows; ++r)
            for (int i = 0; i < 4; ++i) {
                const uint8_t byte = group[line * 64 + r * 4 + i];
                // A quad of columns of this input row is every fourth quad of its panel.
                const int8_t* quad = x + line * 4 * kPanelRows;
                if (q4)
                    sums[r] += (byte & 15) * quad[i] + (byte >> 4) * quad[4 * 4 * kPanelRows + i];
                else
                    sums[r] += int8_t(byte) * quad[i];
            }
}

static void quant_tile(const PackedMatrix& w, const uint8_t* tile, const QuantRows& a, int64_t row,
                       float results[kTileRows]) {
    const int64_t panel = row / kPanelRows, lane = row % kPanelRows, groups32 = w.cols / 32;
    const int8_t* values = a.values + panel * kPanelRows * w.cols + lane * 4;
    for (int r = 0; r < kTileRows; ++r) results[r] = 0.0f;
    for (int64_t g = 0; g < w.cols / w.group; ++g) {
        const uint8_t* group = tile + size_t(g) * w.group_bytes();
        int32_t sums[kTileRows];
        sum_group(w, group, values + g * w.group * kPanelRows, sums);
        const uint16_t* scales = (const uint16_t*)(group + (w.packing == Packing::q4 ? 256 : w.group * kTileRows));
        const int64_t at = (panel * groups32 + g * w.group / 32) * kPanelRows + lane;
        for (int r = 0; r < kTileRows; ++r) {
            results[r] += float(sums[r]) * (f16_to_f32(scales[r]) * a.scales[at]);
            if (w.has_min) results[r] += f16_to_f32(scales[kTileRows + r]) * a.sums[at];
        }
    }
}

static void matmul(const PackedMatrix& w, const QuantRows& quants, const float* floats, int64_t m, int64_t first_tile,
                   int64_t last_tile, float* out, int64_t out_stride, bool add, uint8_t*) {
    if (!w.quantised()) return matmul_any_float(w, floats, m, first_tile, last_tile, out, out_stride, add);
    float results[1][kTileRows];
    for (int64_t tile = first_tile; tile < last_tile; ++tile)
        for (int64_t row = 0; row < m; ++row) {
            quant_tile(w, w.data + size_t(tile) * w.tile_bytes(), quants, row, results[0]);
            put_results<1>(results, w, tile, out + row * out_stride, out_stride, add);
        }
}

}  // namespace CLLM_NS
}  // namespace cllm

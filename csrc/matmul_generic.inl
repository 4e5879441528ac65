// Products with quantised weights for any CPU: each tile is opened, then multiplied by plain loops, one input row at a time.
#pragma once

#include "quantise.inl"
#include "matmul_float.inl"
#include "packed_blocks.h"

namespace cllm {
namespace CLLM_NS {

// A block of a tile in the opened form; bytes of q8_0 stay signed.
template <Packing P>
static void open_block(const uint8_t* block, uint8_t* out) {
    constexpr Layout layout = layout_of(P);
    constexpr int lines = layout.group / 4;
    for (int g = 0; g < layout.groups(); ++g, out += layout.opened_bytes()) {
        float* const factors = (float*)(out + layout.opened_factors_at());
        for (int r = 0; r < kTileRows; ++r) {
            for (int line = 0; line < lines; ++line) {
                const int quad = g * lines + line;
                write_as(out + line * kLineBytes + 4 * r, quad_of<P>(block, quad / kRunLines, quad % kRunLines, r));
            }
            factors[r] = scale_of<P>(block, g, r);
            if (layout.has_min) factors[kTileRows + r] = minimum_of<P>(block, g, r);
        }
    }
}

static void open_tile(const PackedMatrix& w, int64_t tile, uint8_t* out) {
    with_packing(w.packing, [&](auto packing) {
        constexpr Layout layout = layout_of(packing);
        const uint8_t* block = w.tile(tile);
        for (int64_t c = 0; c < w.cols; c += layout.columns, block += layout.bytes()) {
            open_block<packing>(block, out);
            out += layout.groups() * layout.opened_bytes();
        }
    });
}

// Integer products of one opened group with one input row, summed per output row. A quad of columns of this input row is
// every kPanelRows-th quad of its panel.
static void sum_group(const uint8_t* lines, int n_lines, bool is_signed, const int8_t* x, int32_t sums[kTileRows]) {
    for (int line = 0; line < n_lines; ++line, lines += kLineBytes, x += 4 * kPanelRows)
        for (int r = 0; r < kTileRows; ++r)
            for (int i = 0; i < 4; ++i) sums[r] += (is_signed ? int8_t(lines[4 * r + i]) : lines[4 * r + i]) * x[i];
}

static void quant_tile(const Layout& layout, const uint8_t* group, const QuantRows& a, int64_t row, float results[kTileRows]) {
    const int64_t panel = row / kPanelRows, lane = row % kPanelRows, runs = a.cols / kRun, groups = a.cols / layout.group;
    const int8_t* values = a.values + panel * kPanelRows * a.cols + lane * 4;
    const int32_t* offsets = (layout.group == 16 ? a.offsets16 : a.offsets32) + panel * kPanelRows * groups + lane;
    for (int r = 0; r < kTileRows; ++r) results[r] = 0.0f;
    for (int64_t g = 0; g < groups; ++g, group += layout.opened_bytes()) {
        const float* factors = (const float*)(group + layout.opened_factors_at());
        const int64_t at = (panel * runs + g * layout.group / kRun) * kPanelRows + lane;
        const int32_t offset = layout.bits == 8 ? 0 : offsets[g * kPanelRows] / 128 * layout.centre;
        const float sum = layout.group == kRun ? a.sums[at] : a.scales[at] * float(offsets[g * kPanelRows] / -128);
        int32_t sums[kTileRows];
        for (int r = 0; r < kTileRows; ++r) sums[r] = offset;
        sum_group(group, layout.group / 4, layout.bits == 8, values + g * layout.group * kPanelRows, sums);
        for (int r = 0; r < kTileRows; ++r) {
            if (layout.has_min) results[r] += factors[kTileRows + r] * sum;
            results[r] += float(sums[r]) * (factors[r] * a.scales[at]);
        }
    }
}

static void matmul(const PackedMatrix& w, const QuantRows& quants, const float* floats, int64_t m, int64_t first_tile,
                   int64_t last_tile, float* out, int64_t out_stride, bool add, uint8_t* scratch) {
    if (!w.quantised()) return matmul_any_float(w, floats, m, first_tile, last_tile, out, out_stride, add);
    float results[1][kTileRows];
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        open_tile(w, tile, scratch);
        for (int64_t row = 0; row < m; ++row) {
            quant_tile(w.layout(), scratch, quants, row, results[0]);
            put_results<1>(results, w, tile, out + row * out_stride, out_stride, add);
        }
    }
}

}  // namespace CLLM_NS
}  // namespace cllm

#include "limits_loops.h"
#include "../tiles.h"

namespace cllm {
namespace {

constexpr int kSums = 4;  // tiles of sums, the registers 0 to 3
constexpr int kWide = 64;

// Sums in 0 to 3, inputs in 4 and 5, weights in 6 and 7, all of `cols` columns.
TileShapes shapes(int cols) {
    TileShapes all;
    for (int tile = 0; tile < 6; tile++) all.set(tile, kTileLines, tile < kSums ? kTileLineBytes : cols);
    for (int tile = 6; tile < 8; tile++) all.set(tile, cols / 4, kTileLineBytes);
    return all;
}

void zero_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
}

double dots() {
    const TileShapes wide = shapes(kWide);
    const Tiles tiles(wide);
    zero_tiles();
    for (int group = 0; group < kGroupsPerCall; group++) {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    return double(kGroupsPerCall) * kSums * kTileLines * kTileLines * kWide;
}

// The sums leave the tiles through memory. While those of one group are scaled, those of the next are computed.
double grouped_dots() {
    alignas(64) int32_t sums[2][kTileLines * kTileLines] = {};
    const TileShapes narrow = shapes(32);
    const Tiles tiles(narrow);
    zero_tiles();
    const __m512 scale = _mm512_set1_ps(1e-6f);
    __m512 floats[kTileLines];
    for (auto& value : floats) value = _mm512_setzero_ps();
    const auto add = [&](const int32_t* from) {
#pragma GCC unroll 16
        for (int i = 0; i < kTileLines; i++)
            floats[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(from + i * kTileLines)), scale, floats[i]);
    };
    for (int group = 0; group < kGroupsPerCall; group += 2) {
        _tile_zero(0);
        _tile_dpbsud(0, 4, 6);
        _tile_stored(0, sums[0], kTileLineBytes);
        add(sums[1]);
        _tile_zero(1);
        _tile_dpbsud(1, 5, 7);
        _tile_stored(1, sums[1], kTileLineBytes);
        add(sums[0]);
    }
    __m512 total = _mm512_setzero_ps();
    for (auto& value : floats) total = _mm512_add_ps(total, value);
    keep(total);
    return double(kGroupsPerCall) * kTileLines * kTileLines * 32;
}

}  // namespace

Dots amx_dots() { return {dots, grouped_dots}; }

}  // namespace cllm

// The order of tiles and inputs; included inside the namespace of a file that defines
// tiles_together, kInputsTogether, kInputBytes, opens_from, run_tiles_of and open_tile.

static void matmul(const PackedMatrix& w, const QuantRows& quants, const float* floats, int64_t m, int64_t first_tile,
                   int64_t last_tile, float* out, int64_t out_stride, bool add, uint8_t* scratch) {
    if (!w.quantised()) return matmul_any_float(w, floats, m, first_tile, last_tile, out, out_stride, add);
    // Even for the widest matrices enough inputs for opening their tiles to pay.
    constexpr int64_t least = 48 / kPanelRows * kPanelRows;
    const int64_t fitting = kInputBytes / w.cols / kPanelRows * kPanelRows, stretch = fitting < least ? least : fitting;
    for (int64_t begin = 0; begin < m; begin += stretch) {
        const int64_t end = begin + stretch < m ? begin + stretch : m;
        const bool opens = end - begin >= opens_from(w.packing);
        int64_t tiles = tiles_together(end - begin, opens);
        for (int64_t tile = first_tile; tile < last_tile; tile += tiles) {
            while (tiles > last_tile - tile) tiles /= 2;
            for (int64_t r = 0; opens && r < tiles; ++r) open_tile(w, tile + r, scratch + size_t(r) * w.opened_bytes());
            const TileJob job{w, quants, tile, opens ? scratch : nullptr, out, out_stride, add};
            for (int64_t row = begin, next; row < end; row = next) {
                const int64_t panel_end = row - row % kPanelRows + kPanelRows;
                next = std::min(end, std::min(panel_end, row + kInputsTogether));
                run_tiles_of(w.packing, opens, tiles, next - row)(job, row);
            }
        }
    }
}

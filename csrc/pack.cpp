// From GGUF's blocks to the tiles of packed.h, once per weight at load. Plain C++: not compiled per instruction set.
#include <stdexcept>
#include <string>

#include "packed_blocks.h"

namespace cllm {
namespace {

constexpr int64_t kMostWeights = int64_t(1) << 44;  // of one matrix: far above any model, far below overflow

// How many rows of a tile belong to the matrix.
int rows_present(const PackedMatrix& form, int64_t tile) {
    const int64_t left = form.rows - tile * kTileRows;
    return int(left < kTileRows ? left : kTileRows);
}

template <class Format>
bool pack_blocks(const uint8_t* raw, const PackedMatrix& form, uint8_t* target, int64_t first, int64_t last) {
    constexpr Packing packing = Format::packing;
    const size_t row_bytes = size_t(form.cols / Format::columns) * Format::bytes;
    const RawBlock nothing;
    RawBlock block;
    bool finite = true;
    for (int64_t tile = first; tile < last; ++tile) {
        uint8_t* out = target + size_t(tile) * form.tile_bytes();
        const uint8_t* rows = raw + size_t(tile - first) * kTileRows * row_bytes;
        const int present = rows_present(form, tile);
        for (size_t at = 0; at < row_bytes; at += Format::bytes) {
            for (int r = 0; r < present; ++r) {
                Format::read(rows + size_t(r) * row_bytes + at, block);
                finite &= block.finite();
                put_row<packing>(block, r, out);
            }
            for (int r = present; r < kTileRows; ++r) put_row<packing>(nothing, r, out);
            out += layout_of(packing).bytes();
        }
    }
    return finite;
}

// --- floats ---

CLLM_INLINE float float_of(Packing packing, const uint8_t* from) {
    switch (packing) {
        case Packing::f16: return f16_to_f32(read_as<uint16_t>(from));
        case Packing::bf16: return bf16_to_f32(read_as<uint16_t>(from));
        default: return read_as<float>(from);
    }
}

template <class Format>
CLLM_INLINE bool finite_word(typename Format::word word) {
    return (word & Format::exponent) != Format::exponent;
}

// Columns [begin, end) of a tile; in short stretches, so that 16 rows of them stay in the first cache.
template <class Format>
bool transpose(const uint8_t* rows, size_t row_bytes, int present, int64_t begin, int64_t end, uint8_t* out) {
    using Word = typename Format::word;
    bool finite = true;
    for (int r = 0; r < present; ++r) {
        const uint8_t* row = rows + size_t(r) * row_bytes;
        for (int64_t c = begin; c < end; ++c) {
            const Word word = read_as<Word>(row + c * int64_t(sizeof(Word)));
            finite &= finite_word<Format>(word);
            std::memcpy(out + size_t(c * kTileRows + r) * sizeof(Word), &word, sizeof word);
        }
    }
    return finite;
}

template <class Format>
bool pack_floats(const uint8_t* raw, const PackedMatrix& form, uint8_t* target, int64_t first, int64_t last) {
    constexpr int64_t stretch = 256 / Format::bytes;
    const size_t row_bytes = size_t(form.cols) * Format::bytes;
    bool finite = true;
    for (int64_t tile = first; tile < last; ++tile) {
        uint8_t* out = target + size_t(tile) * form.tile_bytes();
        const uint8_t* rows = raw + size_t(tile - first) * kTileRows * row_bytes;
        const int present = rows_present(form, tile);
        if (present < kTileRows) std::memset(out, 0, form.tile_bytes());
        for (int64_t c = 0; c < form.cols; c += stretch) {
            const int64_t end = c + stretch < form.cols ? c + stretch : form.cols;
            finite &= transpose<Format>(rows, row_bytes, present, c, end, out);
        }
    }
    return finite;
}

// --- one row as floats ---

// Row r of a block of a tile.
template <Packing P>
void unpack_block(const uint8_t* block, int r, float* out) {
    constexpr Layout layout = layout_of(P);
    constexpr int quads = layout.group / 4, centre = layout.bits == 8 ? 0 : layout.centre;
    for (int g = 0; g < layout.groups(); ++g) {
        const float scale = scale_of<P>(block, g, r), minimum = minimum_of<P>(block, g, r);
        for (int quad = g * quads; quad < (g + 1) * quads; ++quad, out += 4) {
            const uint32_t quants = quad_of<P>(block, quad / kRunLines, quad % kRunLines, r);
            for (int i = 0; i < 4; ++i) {
                const int q = layout.bits == 8 ? int(int8_t(quants >> 8 * i)) : int(quants >> 8 * i & 255u);
                out[i] = scale * float(q - centre) + minimum;
            }
        }
    }
}

template <class Format>
bool read_block_row(const uint8_t* raw, int64_t cols, float* out) {
    constexpr Packing packing = Format::packing;
    RawBlock block;
    uint8_t packed[layout_of(packing).bytes()];
    bool finite = true;
    for (int64_t c = 0; c < cols; c += Format::columns, raw += Format::bytes) {
        Format::read(raw, block);
        finite &= block.finite();
        put_row<packing>(block, 0, packed);
        unpack_block<packing>(packed, 0, out + c);
    }
    return finite;
}

template <class Format>
bool read_float_row(const uint8_t* raw, int64_t cols, float* out) {
    bool finite = true;
    for (int64_t c = 0; c < cols; ++c, raw += Format::bytes) {
        finite &= finite_word<Format>(read_as<typename Format::word>(raw));
        out[c] = float_of(Format::packing, raw);
    }
    return finite;
}

}  // namespace

PackedMatrix packed_form(GgmlType type, int64_t rows, int64_t cols) {
    raw_row_bytes(type, cols);  // refuses what is no whole number of blocks
    if (rows <= 0 || rows > kMostWeights / cols) {
        throw std::invalid_argument("a matrix cannot be " + std::to_string(rows) + " x " + std::to_string(cols));
    }
    PackedMatrix form;
    form.rows = rows;
    form.cols = cols;
    form.packing = with_format(type, [](auto format) { return format.packing; });
    return form;
}

size_t raw_row_bytes(GgmlType type, int64_t cols) {
    return with_format(type, [&](auto format) {
        if (cols <= 0 || cols % format.columns != 0) {
            throw std::invalid_argument("a row of " + std::to_string(cols) + " has no whole blocks of " +
                                        std::to_string(format.columns));
        }
        return size_t(cols / format.columns) * size_t(format.bytes);
    });
}

bool pack_tiles(GgmlType type, const uint8_t* raw, const PackedMatrix& form, uint8_t* target, int64_t first,
                int64_t last) {
    return with_format(
        type, [&](auto format) { return pack_blocks<decltype(format)>(raw, form, target, first, last); },
        [&](auto format) { return pack_floats<decltype(format)>(raw, form, target, first, last); });
}

void unpack_row(const PackedMatrix& matrix, int64_t row, float* out) {
    const uint8_t* tile = matrix.tile(row / kTileRows);
    const int r = int(row % kTileRows);
    if (matrix.quantised()) {
        return with_packing(matrix.packing, [&](auto packing) {
            constexpr Layout layout = layout_of(packing);
            for (int64_t c = 0; c < matrix.cols; c += layout.columns, tile += layout.bytes())
                unpack_block<packing>(tile, r, out + c);
        });
    }
    const size_t bytes = size_t(matrix.layout().bits / 8);
    for (int64_t c = 0; c < matrix.cols; ++c) {
        out[c] = float_of(matrix.packing, tile + size_t(c * kTileRows + r) * bytes);
    }
}

bool read_raw_row(GgmlType type, const uint8_t* raw, int64_t cols, float* out) {
    return with_format(
        type, [&](auto format) { return read_block_row<decltype(format)>(raw, cols, out); },
        [&](auto format) { return read_float_row<decltype(format)>(raw, cols, out); });
}

}  // namespace cllm

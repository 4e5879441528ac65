// From GGUF's blocks to the tiles of packed.h, once per weight at load. Plain C++: not compiled per instruction set.
#include <stdexcept>
#include <string>

#include "raw_formats.h"

namespace cllm {
namespace {

constexpr int kLineBytes = 4 * kTileRows;
constexpr int64_t kMostWeights = int64_t(1) << 44;  // of one matrix: far above any model, far below overflow

CLLM_INLINE bool finite_half(uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }

// A block as the formats read it; a block without minima leaves them zero.
template <class Format>
struct Block {
    static constexpr int groups = Format::columns / Format::group;
    static constexpr int group_values = Format::packing == Packing::q4 ? Format::group / 2 : Format::group;
    uint8_t values[groups * group_values] = {};
    uint16_t scales[groups] = {};
    uint16_t minima[groups] = {};

    CLLM_INLINE void read(const uint8_t* raw) { Format::read(raw, values, scales, minima); }
    CLLM_INLINE bool finite() const {
        bool all = true;
        for (int g = 0; g < groups; ++g) all &= finite_half(scales[g]) & finite_half(minima[g]);
        return all;
    }
};

// Put row r's part of a block into the groups at `target`.
template <class Format>
CLLM_INLINE void scatter(const Block<Format>& block, int r, uint32_t bias, size_t group_bytes, uint8_t* target) {
    constexpr int lines = Block<Format>::group_values / 4;
    for (int g = 0; g < Block<Format>::groups; ++g) {
        for (int j = 0; j < lines; ++j) {
            const uint32_t word = read_as<uint32_t>(block.values + (g * lines + j) * 4) ^ bias;
            std::memcpy(target + j * kLineBytes + 4 * r, &word, sizeof word);
        }
        uint8_t* factors = target + lines * kLineBytes + 2 * r;
        std::memcpy(factors, &block.scales[g], 2);
        if (Format::has_min) std::memcpy(factors + 2 * kTileRows, &block.minima[g], 2);
        target += group_bytes;
    }
}

template <class Format>
bool pack_blocks(const uint8_t* raw, const PackedMatrix& form, uint8_t* target, int64_t first, int64_t last) {
    const size_t row_bytes = size_t(form.cols / Format::columns) * Format::bytes;
    const size_t group_bytes = form.group_bytes();
    const uint32_t bias = form.biased ? 0x80808080u : 0u;
    const Block<Format> nothing;
    Block<Format> block;
    bool finite = true;
    for (int64_t tile = first; tile < last; ++tile) {
        uint8_t* out = target + size_t(tile) * form.tile_bytes();
        const uint8_t* rows = raw + size_t(tile) * kTileRows * row_bytes;
        const int64_t left = form.rows - tile * kTileRows;
        const int present = int(left < kTileRows ? left : kTileRows);
        for (size_t at = 0; at < row_bytes; at += Format::bytes) {
            for (int r = 0; r < present; ++r) {
                block.read(rows + size_t(r) * row_bytes + at);
                finite &= block.finite();
                scatter(block, r, bias, group_bytes, out);
            }
            for (int r = present; r < kTileRows; ++r) scatter(nothing, r, bias, group_bytes, out);
            out += Block<Format>::groups * group_bytes;
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
        const uint8_t* rows = raw + size_t(tile) * kTileRows * row_bytes;
        const int64_t left = form.rows - tile * kTileRows;
        const int present = int(left < kTileRows ? left : kTileRows);
        if (present < kTileRows) std::memset(out, 0, form.tile_bytes());
        for (int64_t c = 0; c < form.cols; c += stretch) {
            const int64_t end = c + stretch < form.cols ? c + stretch : form.cols;
            finite &= transpose<Format>(rows, row_bytes, present, c, end, out);
        }
    }
    return finite;
}

// --- one row as floats ---

// The group's columns from `values`, one byte a column, or two nibbles.
void expand_group(Packing packing, int group, const uint8_t* values, float scale, float minimum, float* out) {
    if (packing == Packing::q4) {
        for (int k = 0; k < group / 2; ++k) {
            out[k] = scale * float(values[k] & 15) + minimum;
            out[k + group / 2] = scale * float(values[k] >> 4) + minimum;
        }
    } else {
        for (int k = 0; k < group; ++k) out[k] = scale * float(int8_t(values[k])) + minimum;
    }
}

template <class Format>
bool read_block_row(const uint8_t* raw, int64_t cols, float* out) {
    Block<Format> block;
    bool finite = true;
    for (int64_t c = 0; c < cols; c += Format::columns, raw += Format::bytes) {
        block.read(raw);
        finite &= block.finite();
        for (int g = 0; g < Block<Format>::groups; ++g, out += Format::group) {
            expand_group(Format::packing, Format::group, block.values + g * Block<Format>::group_values,
                         f16_to_f32(block.scales[g]), f16_to_f32(block.minima[g]), out);
        }
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

void unpack_quantised(const PackedMatrix& matrix, const uint8_t* tile, int r, float* out) {
    const int lines = (matrix.packing == Packing::q4 ? matrix.group / 2 : matrix.group) / 4;
    const uint32_t bias = matrix.biased ? 0x80808080u : 0u;
    uint8_t values[32];
    for (int64_t c = 0; c < matrix.cols; c += matrix.group, tile += matrix.group_bytes()) {
        for (int j = 0; j < lines; ++j) {
            const uint32_t word = read_as<uint32_t>(tile + j * kLineBytes + 4 * r) ^ bias;
            std::memcpy(values + 4 * j, &word, sizeof word);
        }
        const uint8_t* factors = tile + lines * kLineBytes + 2 * r;
        const float scale = f16_to_f32(read_as<uint16_t>(factors));
        const float minimum = matrix.has_min ? f16_to_f32(read_as<uint16_t>(factors + 2 * kTileRows)) : 0.0f;
        expand_group(matrix.packing, matrix.group, values, scale, minimum, out + c);
    }
}

}  // namespace

PackedMatrix packed_form(GgmlType type, int64_t rows, int64_t cols, bool biased) {
    raw_row_bytes(type, cols);  // refuses what is no whole number of blocks
    if (rows <= 0 || rows > kMostWeights / cols) {
        throw std::invalid_argument("a matrix cannot be " + std::to_string(rows) + " x " + std::to_string(cols));
    }
    PackedMatrix form;
    form.rows = rows;
    form.cols = cols;
    with_format(type, [&](auto format) {
        form.packing = format.packing;
        form.group = format.group;
        form.has_min = format.has_min;
    });
    form.biased = biased && form.packing == Packing::q8;
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
    const uint8_t* tile = matrix.data + size_t(row / kTileRows) * matrix.tile_bytes();
    const int r = int(row % kTileRows);
    if (matrix.quantised()) return unpack_quantised(matrix, tile, r, out);
    const size_t bytes = matrix.group_bytes() / kTileRows;
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

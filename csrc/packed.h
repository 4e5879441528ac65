// Weight matrices as the kernels read them.
//
// A matrix has `rows` outputs and `cols` inputs. Rows are cut into tiles of 16; the last tile is filled up with zero rows.
// A tile's bytes are contiguous and read once, front to back:
//
//   q4   for each group of 32 columns: 4 x 64 bytes of nibbles, 16 f16 scales, 16 f16 minima             (320 bytes)
//          byte 4*r + i of line j:  low nibble  = row r, column 4*j + i
//                                   high nibble = row r, column 16 + 4*j + i
//   q8   for each group of 32 or 16 columns: group/4 x 64 bytes, 16 f16 scales, 16 f16 minima if has_min
//          byte 4*r + i of line j = row r, column 4*j + i, as a signed byte (plus 128 if `biased`)
//   f32, f16, bf16   for each column: 16 values
//
// The value of a weight is scale * q + minimum (0 without has_min). Nibbles are unsigned, bytes signed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "half.h"

namespace cllm {

constexpr int kTileRows = 16;

enum class Packing : uint8_t { f32, f16, bf16, q4, q8 };

struct PackedMatrix {
    int64_t rows = 0;
    int64_t cols = 0;
    Packing packing = Packing::f32;
    int group = 1;         // columns that share a scale; 1 for floats
    bool has_min = false;  // always true for q4
    bool biased = false;   // q8 only: bytes are stored plus 128, as the AVX-512 dot product wants them
    const uint8_t* data = nullptr;

    CLLM_INLINE int64_t tiles() const { return (rows + kTileRows - 1) / kTileRows; }
    CLLM_INLINE bool quantised() const { return packing == Packing::q4 || packing == Packing::q8; }
    CLLM_INLINE size_t group_bytes() const {
        switch (packing) {
            case Packing::f32: return 4 * kTileRows;
            case Packing::f16:
            case Packing::bf16: return 2 * kTileRows;
            case Packing::q4: return size_t(group / 2 + 4) * kTileRows;
            case Packing::q8: return size_t(group + 2 + (has_min ? 2 : 0)) * kTileRows;
        }
        return 0;
    }
    CLLM_INLINE size_t tile_bytes() const { return size_t(cols / group) * group_bytes(); }
    // Some of its tiles as a matrix of their own.
    CLLM_INLINE PackedMatrix part(int64_t first_tile, int64_t n_tiles) const {
        PackedMatrix found = *this;
        const int64_t left = rows - first_tile * kTileRows;
        found.rows = left < n_tiles * kTileRows ? left : n_tiles * kTileRows;
        found.data += size_t(first_tile) * tile_bytes();
        return found;
    }
    CLLM_INLINE size_t bytes() const { return size_t(tiles()) * tile_bytes(); }
};

// GGUF's numbers of the types we read.
enum class GgmlType : int32_t {
    f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q4_k = 12, q5_k = 13, q6_k = 14, bf16 = 30,
};

// How a matrix of this type will be packed; throws std::invalid_argument for a type we cannot read or columns that
// are no whole number of its blocks. `data` of the answer is null.
PackedMatrix packed_form(GgmlType type, int64_t rows, int64_t cols, bool biased);

// Bytes of one row as GGUF stores it; throws std::invalid_argument as above.
size_t raw_row_bytes(GgmlType type, int64_t cols);

// Fill tiles [first, last) of `target` (of the form above) from the raw rows of the whole matrix, `raw`.
// Returns false if a scale, minimum or float weight in them is NaN or infinite; what was written is then of no use.
bool pack_tiles(GgmlType type, const uint8_t* raw, const PackedMatrix& form, uint8_t* target, int64_t first, int64_t last);

// One row of a packed matrix as floats (an embedding).
void unpack_row(const PackedMatrix& matrix, int64_t row, float* out);

// One row of raw GGUF data as floats (norms, biases). False if a value is not finite.
bool read_raw_row(GgmlType type, const uint8_t* raw, int64_t cols, float* out);

}  // namespace cllm

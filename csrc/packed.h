// Weight matrices as the kernels read them: as many bits a weight as in the file.
//
// A matrix has `rows` outputs and `cols` inputs. Rows are cut into tiles of 16; the last tile is filled up with zero rows.
// A tile's bytes are contiguous and read once, front to back, as fast memory wants it: blocks of some columns, each of 16 rows.
//
//   columns      of each run of 32 columns           for the 16 rows                                     bytes of a block
//   q4_0     32  4 lines of nibbles                  f16 scales, after the quants                                     288
//   q4_1     32  4 lines of nibbles                  f16 scales, f16 minima, after the quants                         320
//   q5_0     32  4 lines of nibbles, 1 of fifth bits f16 scales, after the quants                                     352
//   q5_1     32  4 lines of nibbles, 1 of fifth bits f16 scales, f16 minima, after the quants                         384
//   q8_0     32  8 lines of signed bytes             f16 scales, after the quants                                     544
//   mxfp4    32  4 lines of nibbles                  exponents, a byte each, after the quants                         272
//   iq4_nl   32  4 lines of nibbles                  f16 scales, after the quants                                     288
//   iq4_xs  256  4 lines of nibbles                  first f16 scales, a line of nibbles, words of upper bits        2176
//   q2_k    256  2 lines of twos                     first f16 scales, f16 scales of minima, a byte for each group   1344
//   q3_k    256  2 lines of twos, 1 of third bits    first f16 scales, three lines of numbers                        1760
//   q4_k    256  4 lines of nibbles                  first f16 scales, f16 scales of minima, three lines of numbers  2304
//   q5_k    256  4 lines of nibbles, 1 of fifth bits the same                                                        2816
//   q6_k    256  4 lines of nibbles, 2 of upper bits first int8 numbers of the 16 groups of 16 columns, f16 scales   3360
//   iq2_xxs 256  4 codes, signs                      first f16 scales                                                1056
//   iq2_xs  256  4 codes, signs                      first f16 scales, two lines of nibbles                          1184
//   iq2_s   256  4 codes, upper bits, signs          the same                                                        1312
//   iq3_xxs 256  8 codes, signs                      first f16 scales                                                1568
//   iq3_s   256  8 codes, upper bits, signs          first f16 scales, a line of nibbles                             1760
//   f32, f16, bf16   for each column: 16 values
//
// A line is 64 bytes: byte 4*r + i belongs to row r. Of a run of 32 columns, which has 8 quads of columns, the byte has
//   nibbles, line j           low: column 4*j + i, high: column 16 + 4*j + i     (quads j and j + 4)
//   third or fifth bits       bit q: of column 4*q + i
//   twos or upper bits,       bits 2*k, 2*k + 1: of column 16*u + 4*k + i
//     line u
//   signed bytes, line j      column 4*j + i
// The nibbles of mxfp4 and iq4 stand for signed bytes (packed_codes.h).
//
// The numbers of q3_k to q5_k have 6 bits; of q4_k and q5_k, number n < 8 is of group n's scale, number 8 + n of its minimum,
// and those of q3_k are of its 16 scales, plus 32. Line n / 5 holds number n of row r at bits 6 * (n % 5) of its dword r; of
// the last number, line w has bits 2*w and 2*w + 1 at the top. Byte 16*g + r of q2_k has group g's scale in its low nibble
// and its minimum in the high one. Of a line of nibbles, dword r has those of groups 0 to 7, or of the second line 8 to 15,
// from the lowest bits on. Of iq4_xs, word r has two more bits of each: the number is the scale's, plus 32.
//
// A code stands for the magnitudes of 4 columns, or of iq2 of 8. Byte 16*c + r is the low byte of code c of row r; byte r of
// the upper bits has one bit of each code of iq3_s, two of iq2_s. The signs are a line: dword r has those of row r, of iq3_s and
// iq2_s a bit for each column, of the others 7 bits for 8 columns, whose last is such that an even number is set. The top four
// bits are then the group's scale, or of iq2_xs the ninth bits of the codes. A scale s stands for 2*s + 1.
//
// The value of a weight is scale * (q - centre) + minimum, with the group's scale and minimum as f32: of super-blocks they
// are the product of an f16 and a number, which f32 holds exactly, of minima with the sign changed.
//
// Many inputs *open* a tile first, into one form for all types. For each group of 32 or 16 columns, one after another:
//   group / 4 lines of bytes: byte 4*r + i of line j = q of row r, column 4*j + i     (a row of an AMX tile is a line)
//   16 f32 scales
//   16 f32 minima, if has_min
// q is unsigned there, except that the AVX2 and generic kernels open q of 8 bits to signed bytes; the others add 128, its centre.
// AMX, which multiplies signed bytes, has q - centre.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "half.h"

namespace cllm {

constexpr int kTileRows = 16;
constexpr int kLineBytes = 4 * kTileRows;
constexpr int kRun = 32;  // columns that share an input's scale
constexpr int kRunLines = kRun / 4;
constexpr int kOpenedColumnBytes = kTileRows + 8;  // at most: a byte of each row, and factors

enum class Packing : uint8_t {
    f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, mxfp4, iq4_nl, iq4_xs, q3_k, q2_k,
    iq3_s, iq3_xxs, iq2_s, iq2_xs, iq2_xxs,
};

// Whether codes stand for several columns each. Such tiles are always opened first.
CLLM_INLINE constexpr bool in_codes(Packing packing) { return packing >= Packing::iq3_s; }

struct Layout {
    int columns;       // of a block
    int quarters;      // of bits: so many are stored for a quant, or for a float
    int bits;          // of a quant as it is multiplied, or of a float
    int group;         // columns that share a scale; 1 for floats
    int centre;        // the quant that stands for zero; of 8 bits, once 128 was added
    bool has_min;      // whether groups have minima
    int factor_bytes;  // of a block: what is not quants

    CLLM_INLINE constexpr bool super() const { return columns == 256; }
    CLLM_INLINE constexpr int runs() const { return columns / kRun; }
    CLLM_INLINE constexpr int groups() const { return columns / group; }
    CLLM_INLINE constexpr int run_bytes() const { return quarters * kTileRows; }
    CLLM_INLINE constexpr int quant_bytes() const { return columns * quarters * kTileRows / 32; }
    CLLM_INLINE constexpr int bytes() const { return quant_bytes() + factor_bytes; }
    // Where a run's quants are in a block, those bits of them that are above the nibbles or twos, and the factors.
    CLLM_INLINE constexpr int run_at(int run) const { return (super() ? factor_bytes : 0) + run * run_bytes(); }
    CLLM_INLINE constexpr int upper_at(int run) const { return run_at(run) + lower_bits() * kLineBytes; }
    CLLM_INLINE constexpr int lower_bits() const { return quarters < 16 ? 2 : 4; }
    CLLM_INLINE constexpr int upper_bits() const { return quarters / 4 - lower_bits(); }
    CLLM_INLINE constexpr int factors_at() const { return super() ? 0 : quant_bytes(); }
    // The same of a group in the opened form.
    CLLM_INLINE constexpr int opened_factors_at() const { return group * kTileRows; }
    CLLM_INLINE constexpr int opened_bytes() const { return group * kTileRows + kLineBytes * (has_min ? 2 : 1); }
};

CLLM_INLINE constexpr Layout layout_of(Packing packing) {
    switch (packing) {
        case Packing::f32: break;
        case Packing::f16:
        case Packing::bf16: return {1, 64, 16, 1, 0, false, 0};
        case Packing::q4_0: return {32, 16, 4, 32, 8, false, 32};
        case Packing::q4_1: return {32, 16, 4, 32, 0, true, 64};
        case Packing::q5_0: return {32, 20, 5, 32, 16, false, 32};
        case Packing::q5_1: return {32, 20, 5, 32, 0, true, 64};
        case Packing::q8_0: return {32, 32, 8, 32, 128, false, 32};
        case Packing::q4_k: return {256, 16, 4, 32, 0, true, 64 + 192};
        case Packing::q5_k: return {256, 20, 5, 32, 0, true, 64 + 192};
        case Packing::q6_k: return {256, 24, 6, 16, 32, false, 256 + 32};
        case Packing::mxfp4: return {32, 16, 5, 32, 16, false, 16};
        case Packing::iq4_nl: return {32, 16, 8, 32, 128, false, 32};
        case Packing::iq4_xs: return {256, 16, 8, 32, 128, false, 32 + 96};
        case Packing::q3_k: return {256, 12, 3, 16, 4, false, 32 + 192};
        case Packing::q2_k: return {256, 8, 2, 16, 0, true, 64 + 256};
        case Packing::iq3_s: return {256, 13, 5, 32, 16, false, 32 + 64};
        case Packing::iq3_xxs: return {256, 12, 8, 32, 128, false, 32};
        case Packing::iq2_s: return {256, 9, 7, 16, 64, false, 32 + 128};
        case Packing::iq2_xs: return {256, 8, 7, 16, 64, false, 32 + 128};
        case Packing::iq2_xxs: return {256, 8, 8, 32, 128, false, 32};
    }
    return {1, 128, 32, 1, 0, false, 0};
}

// Calls `work` with the packing as a constant, for quantised types only.
template <class Work>
CLLM_INLINE auto with_packing(Packing packing, Work&& work) {
    switch (packing) {
        case Packing::q4_1: return work(std::integral_constant<Packing, Packing::q4_1>());
        case Packing::q5_0: return work(std::integral_constant<Packing, Packing::q5_0>());
        case Packing::q5_1: return work(std::integral_constant<Packing, Packing::q5_1>());
        case Packing::q8_0: return work(std::integral_constant<Packing, Packing::q8_0>());
        case Packing::q4_k: return work(std::integral_constant<Packing, Packing::q4_k>());
        case Packing::q5_k: return work(std::integral_constant<Packing, Packing::q5_k>());
        case Packing::q6_k: return work(std::integral_constant<Packing, Packing::q6_k>());
        case Packing::mxfp4: return work(std::integral_constant<Packing, Packing::mxfp4>());
        case Packing::iq4_nl: return work(std::integral_constant<Packing, Packing::iq4_nl>());
        case Packing::iq4_xs: return work(std::integral_constant<Packing, Packing::iq4_xs>());
        case Packing::q3_k: return work(std::integral_constant<Packing, Packing::q3_k>());
        case Packing::q2_k: return work(std::integral_constant<Packing, Packing::q2_k>());
        case Packing::iq3_s: return work(std::integral_constant<Packing, Packing::iq3_s>());
        case Packing::iq3_xxs: return work(std::integral_constant<Packing, Packing::iq3_xxs>());
        case Packing::iq2_s: return work(std::integral_constant<Packing, Packing::iq2_s>());
        case Packing::iq2_xs: return work(std::integral_constant<Packing, Packing::iq2_xs>());
        case Packing::iq2_xxs: return work(std::integral_constant<Packing, Packing::iq2_xxs>());
        default: return work(std::integral_constant<Packing, Packing::q4_0>());
    }
}

struct PackedMatrix {
    int64_t rows = 0;
    int64_t cols = 0;
    Packing packing = Packing::f32;
    const uint8_t* data = nullptr;

    CLLM_INLINE Layout layout() const { return layout_of(packing); }
    CLLM_INLINE int64_t tiles() const { return (rows + kTileRows - 1) / kTileRows; }
    CLLM_INLINE bool quantised() const { return packing >= Packing::q4_0; }
    CLLM_INLINE size_t tile_bytes() const { return size_t(cols / layout().columns) * size_t(layout().bytes()); }
    CLLM_INLINE const uint8_t* tile(int64_t index) const { return data + size_t(index) * tile_bytes(); }
    // The sizes of one tile in the opened form.
    CLLM_INLINE size_t opened_bytes() const { return size_t(cols / layout().group) * size_t(layout().opened_bytes()); }
    // Some of its tiles as a matrix of their own.
    CLLM_INLINE PackedMatrix part(int64_t first_tile, int64_t n_tiles) const {
        PackedMatrix found = *this;
        const int64_t left = rows - first_tile * kTileRows;
        found.rows = left < n_tiles * kTileRows ? left : n_tiles * kTileRows;
        found.data = tile(first_tile);
        return found;
    }
    CLLM_INLINE size_t bytes() const { return size_t(tiles()) * tile_bytes(); }
};

// GGUF's numbers of the types we read.
enum class GgmlType : int32_t {
    f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q2_k = 10, q3_k = 11, q4_k = 12, q5_k = 13, q6_k = 14,
    iq2_xxs = 16, iq2_xs = 17, iq3_xxs = 18, iq4_nl = 20, iq3_s = 21, iq2_s = 22, iq4_xs = 23, bf16 = 30, mxfp4 = 39,
};

// How a matrix of this type will be packed; throws std::invalid_argument for a type we cannot read or columns that
// are no whole number of its blocks. `data` of the answer is null.
PackedMatrix packed_form(GgmlType type, int64_t rows, int64_t cols);

// Bytes of one row as GGUF stores it; throws std::invalid_argument as above.
size_t raw_row_bytes(GgmlType type, int64_t cols);

// Fill tiles [first, last) of `target` (of the form above); `raw` is the first raw row of tile `first`.
// Returns false if a scale, minimum or float weight in them is NaN or infinite; what was written is then useless.
bool pack_tiles(GgmlType type, const uint8_t* raw, const PackedMatrix& form, uint8_t* target, int64_t first, int64_t last);

// One row of a packed matrix as floats (an embedding).
void unpack_row(const PackedMatrix& matrix, int64_t row, float* out);

// One row of raw GGUF data as floats (norms, biases). False if a value is not finite.
bool read_raw_row(GgmlType type, const uint8_t* raw, int64_t cols, float* out);

}  // namespace cllm

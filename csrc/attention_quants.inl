// The two inner loops of attention over tiles of q8_0, and of q4_0 once it is unpacked, for every number of rows up to
// kRowBlock. Queries and weights become 16-bit integers, whose products with bytes are summed exactly:
//
//   scores   a lane is a key:        score[row][key] = unit[row] * sum over groups of scale[key] * (sum of q * k)
//   values   a lane is a dimension:  sums[row][d] = unit[row] * (sum over positions of weight * v)
//
// A weight of a value holds the value's scale, too. A query's unit is chosen for the row, a weight's for the row, the
// split and 32 dimensions. Groups are added up one after another: so results do not depend on the batch.
#pragma once

#include "attention_kernels.inl"

namespace cllm {
namespace CLLM_NS {

constexpr float kLargestInt16 = 32767.0f;
static_assert(kRowBlock <= kMostRowBlock, "the scratch memory has room for the weights of a block of rows");
static_assert(int64_t(kSplit) * 32768 * 128 < INT32_MAX, "a split's products fit in 32 bits");

// The factor with which values up to `peak` fill 16 bits; values that are all next to zero become zero.
static CLLM_INLINE float steps_per_unit(float peak) { return peak > 1e-33f ? kLargestInt16 / peak : 0.0f; }

// A query as 16-bit integers; returns their unit.
static CLLM_INLINE float round_query(const float* q, int head_dim, int16_t* out) {
    Vec largest = Vec::zero();
    for (int d = 0; d < head_dim; d += Vec::lanes) largest = vmax(vabs(Vec::load(q + d)), largest);
    const float peak = largest.max();
    const Vec steps = Vec::all(steps_per_unit(peak));
    for (int d = 0; d < head_dim; d += kTileTokens) {
        Vec scaled[kVecsPerTile];
        for (int v = 0; v < kVecsPerTile; ++v) scaled[v] = Vec::load(q + d + v * Vec::lanes) * steps;
        store_int16(scaled, out + d);
    }
    return peak / kLargestInt16;
}

// A value's weight times its scale. What has no weight may never have been written, and its scale be no number.
static CLLM_INLINE Vec scaled_weight(const float* weight, const float* scale) {
    const Vec weights = Vec::load(weight);
    return where_at_least(weights, Vec::all(1.17549435e-38f), weights * Vec::load(scale));
}

// The weights of `tiles` tiles, times the scales of their values, as 16-bit integers; returns their unit.
static CLLM_INLINE float round_weights(const float* weights, const float* scales, int tiles, int16_t* out) {
    Vec largest = Vec::zero();
    for (int i = 0; i < tiles * kTileTokens; i += Vec::lanes) {
        largest = vmax(vabs(scaled_weight(weights + i, scales + i)), largest);
    }
    const float peak = largest.max();
    const Vec steps = Vec::all(steps_per_unit(peak));
    for (int i = 0; i < tiles * kTileTokens; i += kTileTokens) {
        Vec scaled[kVecsPerTile];
        for (int v = 0; v < kVecsPerTile; ++v) {
            const int at = i + v * Vec::lanes;
            scaled[v] = scaled_weight(weights + at, scales + at) * steps;
        }
        store_int16(scaled, out + i);
    }
    return peak / kLargestInt16;
}

// sums[r][v] += of_row(r) * of_vec(v). The fewer of the two stay in registers.
template <int kRows, int kVecs, class OfRow, class OfVec>
static CLLM_INLINE void add_products(PairSum (&sums)[kRows][kVecs], OfRow of_row, OfVec of_vec) {
    if constexpr (kRows <= kVecs) {
        Pairs kept[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) kept[r] = of_row(r);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
            const Pairs passing = of_vec(v);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) sums[r][v].add(passing, kept[r]);
        }
    } else {
        Pairs kept[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) kept[v] = of_vec(v);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Pairs passing = of_row(r);
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) sums[r][v].add(kept[v], passing);
        }
    }
}

// Scores of kRows rows and kTiles tiles. Tiles in the arena are prefetched meanwhile; unpacked ones already were.
template <bool in_arena, int kRows, int kTiles>
static CLLM_INLINE void score_byte_tiles(const uint8_t* const* tiles, const uint8_t* const* ahead, int head_dim,
                                         const int16_t* q, const float* units, float* scores) {
    constexpr int kVecs = kTiles * kVecsPerTile, kPairs = kQuantGroup / 2;
    Vec totals[kRows][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) totals[r][v] = Vec::zero();
    }
    for (int d = 0, at = 0; d < head_dim; d += kQuantGroup, at += kByteGroup) {
        PairSum sums[kRows][kVecs];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) sums[r][v] = PairSum::zero();
        }
        if (in_arena) {
#pragma GCC unroll 8
            for (int t = 0; t < kTiles; ++t) __builtin_prefetch(ahead[t] + at + kByteGroup - 1);
        }
#pragma GCC unroll 2
        for (int pair = 0; pair < kPairs; ++pair) {
            if (in_arena && pair % 2 == 0) {
#pragma GCC unroll 8
                for (int t = 0; t < kTiles; ++t) __builtin_prefetch(ahead[t] + at + pair * 2 * kTileTokens);
            }
            add_products(
                sums, [&](int r) { return Pairs::all(q + r * head_dim + d + 2 * pair); },
                [&](int v) {
                    const uint8_t* keys = tiles[v / kVecsPerTile] + at + kScaleBytes + pair * 2 * kTileTokens;
                    return Pairs::load_i8(reinterpret_cast<const int8_t*>(keys) + v % kVecsPerTile * 2 * Vec::lanes);
                });
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
            const uint16_t* scales = reinterpret_cast<const uint16_t*>(tiles[v / kVecsPerTile] + at);
            const Vec scale = Vec::load_f16(scales + v % kVecsPerTile * Vec::lanes);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) totals[r][v] = fma(sums[r][v].floats(), scale, totals[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
            (totals[r][v] * Vec::all(units[r])).store(scores + r * kScoreStride + v * Vec::lanes);
        }
    }
}

// Scores of a block of rows with the chunk's first `n_tiles` tiles.
template <bool in_arena, int kRows>
static void score_bytes(const Chunk& chunk, int n_tiles, int head_dim, const int16_t* q, const float* units,
                        float* scores) {
    constexpr int kTogether = vectors_per_row(kRows * kVecsPerTile, kChunkTiles);
    int tile = 0;
    for (; tile + kTogether <= n_tiles; tile += kTogether) {
        score_byte_tiles<in_arena, kRows, kTogether>(chunk.tiles + tile, chunk.ahead + tile, head_dim, q, units,
                                                     scores + tile * kTileTokens);
    }
    for (; tile < n_tiles; ++tile) {
        score_byte_tiles<in_arena, kRows, 1>(chunk.tiles + tile, chunk.ahead + tile, head_dim, q, units,
                                             scores + tile * kTileTokens);
    }
}

// One group of the values of a split's tiles, and what to fetch from memory meanwhile.
struct ValueGroup {
    const uint8_t* const* tiles;
    const uint8_t* const* ahead;
};

// Sums of kRows rows over `n_tiles` tiles, for kVecs vectors of the group's dimensions from `column` on.
template <int kRows, int kVecs>
static CLLM_INLINE void add_byte_columns(const ValueGroup& group, int n_tiles, int column, const int16_t* weights,
                                         const float* units, float* sums, int sums_stride) {
    PairSum sum[kRows][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[r][v] = PairSum::zero();
    }
    for (int tile = 0; tile < n_tiles; ++tile) {
        const int8_t* values = reinterpret_cast<const int8_t*>(group.tiles[tile]) + kScaleBytes + 2 * column;
        const uint8_t* ahead = group.ahead[tile];
#pragma GCC unroll 2
        for (int token = 0; token < kTileTokens; token += 2, values += 2 * kQuantGroup, ahead += 2 * kQuantGroup) {
            __builtin_prefetch(ahead);
            add_products(
                sum, [&](int r) { return Pairs::all(weights + r * kSplit + tile * kTileTokens + token); },
                [&](int v) { return Pairs::load_i8(values + v * 2 * Vec::lanes); });
        }
        __builtin_prefetch(ahead);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        const Vec unit = Vec::all(units[r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) (sum[r][v].floats() * unit).store(sums + r * sums_stride + column + v * Vec::lanes);
    }
}

template <int kRows>
static void add_bytes(const ValueGroup& group, int n_tiles, const int16_t* weights, const float* units, float* sums,
                      int sums_stride) {
    constexpr int kVecs = vectors_per_row(kRows, kQuantGroup / Vec::lanes);
    for (int column = 0; column < kQuantGroup; column += kVecs * Vec::lanes) {
        add_byte_columns<kRows, kVecs>(group, n_tiles, column, weights, units, sums, sums_stride);
    }
}

using ScoreBytes = void (*)(const Chunk&, int, int, const int16_t*, const float*, float*);
using AddBytes = void (*)(const ValueGroup&, int, const int16_t*, const float*, float*, int);

template <bool in_arena, int... kRows>
static ScoreBytes score_bytes_for(int rows, std::integer_sequence<int, kRows...>) {
    static constexpr ScoreBytes table[] = {score_bytes<in_arena, kRows + 1>...};
    return table[rows - 1];
}

template <int... kRows>
static AddBytes add_bytes_for(int rows, std::integer_sequence<int, kRows...>) {
    static constexpr AddBytes table[] = {add_bytes<kRows + 1>...};
    return table[rows - 1];
}

}  // namespace CLLM_NS
}  // namespace cllm

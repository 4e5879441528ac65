// The two inner loops of attention, for every number of rows up to kRowBlock.
//
//   scores   a lane is a key:        score[row][key] = sum over d of q[row][d] * k[d][key]
//   values   a lane is a dimension:  sums[row][d] = sum over positions of weight[row][position] * v[position][d]
//
// Both sums are one chain of `fma` in ascending order from zero for each (row, key) and (row, d), whatever the number
// of rows, tiles and chunks around it: that makes results independent of the batch. Blocking only shares loads.
#pragma once

#include <utility>

#include "attention_sizes.h"
#include "kv_tiles.inl"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

// kRowBlock      rows computed together
// kAccumulators  vectors of running sums that fit in the registers, beside what they are computed from
// kDirectRows    up to so many rows, converting halves anew for each block of rows beats storing them as floats
#if defined(CLLM_AVX512)
constexpr int kRowBlock = 6, kAccumulators = 24, kDirectRows = 12;
#elif defined(CLLM_AVX2)
constexpr int kRowBlock = 6, kAccumulators = 12, kDirectRows = 12;
#else
constexpr int kRowBlock = 2, kAccumulators = 4, kDirectRows = 2;
#endif

// The largest power of two up to `most` of which `rows` fit.
constexpr int vectors_per_row(int rows, int most) {
    while (most > 1 && rows * most > kAccumulators) most /= 2;
    return most;
}

// What the kernels read: tiles in the arena, or a chunk that was turned into floats.
struct Halves {
    using Value = uint16_t;
    static constexpr bool in_arena = true;
    static CLLM_INLINE Vec load(const Value* p) { return Vec::load_f16(p); }
};
struct Floats {
    using Value = float;
    static constexpr bool in_arena = false;
    static CLLM_INLINE Vec load(const Value* p) { return Vec::load(p); }
};

// Positions of one chunk, counted from the split's first; its tiles, and those to fetch from memory meanwhile.
struct Chunk {
    int begin, end;
    const uint8_t* const* tiles;
    const uint8_t* const* ahead;
};

// Scores of kRows rows and kTiles tiles.
template <class Source, int kRows, int kTiles>
static CLLM_INLINE void score_tiles(const uint8_t* const* tiles, const uint8_t* const* ahead, int head_dim,
                                    const float* const* q, float* scores) {
    using Value = typename Source::Value;
    constexpr int kVecs = kTiles * kVecsPerTile;
    const Value* keys[kTiles];
    for (int t = 0; t < kTiles; ++t) keys[t] = reinterpret_cast<const Value*>(tiles[t]);
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sums[r][v] = Vec::zero();
    }
#pragma GCC unroll 2
    for (int d = 0; d < head_dim; ++d) {
        // A cache line of halves holds two dimensions.
        if (Source::in_arena && d % 2 == 0) {
#pragma GCC unroll 8
            for (int t = 0; t < kTiles; ++t) __builtin_prefetch(ahead[t] + d * int(kTileTokens * sizeof(Value)));
        }
        Vec k[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
            k[v] = Source::load(keys[v / kVecsPerTile] + d * kTileTokens + v % kVecsPerTile * Vec::lanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Vec query = Vec::all(q[r][d]);
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) sums[r][v] = fma(query, k[v], sums[r][v]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sums[r][v].store(scores + r * kScoreStride + v * Vec::lanes);
    }
}

// Scores of a block of rows with the chunk's first `n_tiles` tiles.
template <class Source, int kRows>
static void score_block(const Chunk& chunk, int n_tiles, int head_dim, const float* const* q, float* scores) {
    constexpr int kTogether = vectors_per_row(kRows * kVecsPerTile, kChunkTiles);
    int tile = 0;
    for (; tile + kTogether <= n_tiles; tile += kTogether) {
        score_tiles<Source, kRows, kTogether>(chunk.tiles + tile, chunk.ahead + tile, head_dim, q,
                                              scores + tile * kTileTokens);
    }
    for (; tile < n_tiles; ++tile) {
        score_tiles<Source, kRows, 1>(chunk.tiles + tile, chunk.ahead + tile, head_dim, q, scores + tile * kTileTokens);
    }
}

// Adds tokens [first, last) of the chunk to kVecs vectors of each row's sums, from dimension `column` on.
template <class Source, int kRows, int kVecs>
static CLLM_INLINE void add_columns(const Chunk& chunk, int first, int last, int head_dim, int column,
                                    const float* weights, float* sums, int sums_stride) {
    using Value = typename Source::Value;
    Vec sum[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sum[r][v] = Vec::load(sums + r * sums_stride + column + v * Vec::lanes);
    }
    for (int token = first; token < last;) {
        const int tile = token / kTileTokens, offset = token % kTileTokens * head_dim + column;
        const Value* row = reinterpret_cast<const Value*>(chunk.tiles[tile]) + offset;
        const uint8_t* ahead = chunk.ahead[tile] + offset * int(sizeof(Value));
        const int stop = (tile + 1) * kTileTokens < last ? (tile + 1) * kTileTokens : last;
        for (; token < stop; ++token, row += head_dim, ahead += head_dim * int(sizeof(Value))) {
            if (Source::in_arena) {
                for (int at = 0; at < kVecs * Vec::lanes * int(sizeof(Value)); at += 64) __builtin_prefetch(ahead + at);
            }
            Vec value[kVecs];
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) value[v] = Source::load(row + v * Vec::lanes);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const Vec weight = Vec::all(weights[r * kScoreStride + token]);
#pragma GCC unroll 8
                for (int v = 0; v < kVecs; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sum[r][v].store(sums + r * sums_stride + column + v * Vec::lanes);
    }
}

template <class Source, int kRows>
static void add_values(const Chunk& chunk, int first, int last, int head_dim, const float* weights, float* sums,
                       int sums_stride) {
    constexpr int kVecs = vectors_per_row(kRows, 4);
    int column = 0;
    for (; column + kVecs * Vec::lanes <= sums_stride; column += kVecs * Vec::lanes) {
        add_columns<Source, kRows, kVecs>(chunk, first, last, head_dim, column, weights, sums, sums_stride);
    }
    for (; column < sums_stride; column += Vec::lanes) {
        add_columns<Source, kRows, 1>(chunk, first, last, head_dim, column, weights, sums, sums_stride);
    }
}

using ScoreBlock = void (*)(const Chunk&, int, int, const float* const*, float*);
using AddValues = void (*)(const Chunk&, int, int, int, const float*, float*, int);

// The function for a number of rows, 1 to kRowBlock.
template <class Source, int... kRows>
static ScoreBlock score_block_for(int rows, std::integer_sequence<int, kRows...>) {
    static constexpr ScoreBlock table[] = {score_block<Source, kRows + 1>...};
    return table[rows - 1];
}

template <class Source, int... kRows>
static AddValues add_values_for(int rows, std::integer_sequence<int, kRows...>) {
    static constexpr AddValues table[] = {add_values<Source, kRows + 1>...};
    return table[rows - 1];
}

using RowCounts = std::make_integer_sequence<int, kRowBlock>;

}  // namespace CLLM_NS
}  // namespace cllm

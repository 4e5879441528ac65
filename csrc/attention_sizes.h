// How attention is cut into pieces, and the thread-owned memory one call of `attend` needs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace cllm {

constexpr int kTileQueryRows = 48;  // (token, head) pairs that share one pass over K and V
constexpr int kChunkTiles = 4;      // tiles of K or V that are worked on together: they fit in the first-level cache
constexpr int kChunkTokens = kChunkTiles * kTileTokens;
constexpr int kScoreStride = kSplit + 16;  // floats; no power of two, so that rows do not compete for cache sets
constexpr int kMostRowBlock = 8;
constexpr int kScratchAlign = 64;
static_assert(kSplit % kChunkTokens == 0, "a split is a whole number of chunks");

// Offsets into the scratch memory, in floats from its first aligned byte.
struct AttendScratch {
    size_t sums;    // [rows][head_dim rounded up]
    size_t scores;  // [rows][kScoreStride]
    size_t chunk;   // [kChunkTokens][head_dim] of K or V as floats; the last vector read may reach beyond it
    // In the place of `chunk`, for quantised types:
    size_t unpacked;      // a chunk of K, or 32 dimensions of a split's V, with 16-bit scales and a byte for each value
    size_t weights;       // [kMostRowBlock][kSplit] 16-bit integers
    size_t value_scales;  // [kSplit]
    size_t queries;       // [rows][head_dim] 16-bit integers
    size_t query_units;   // [rows]
    size_t end;

    CLLM_INLINE AttendScratch(int head_dim, int rows) {
        sums = 0;
        scores = sums + size_t(rows) * align(size_t(head_dim));
        chunk = scores + size_t(rows) * kScoreStride;
        const int groups = (head_dim + 31) / 32, most = kChunkTiles * groups;
        const size_t opened = size_t(most > kSplit / kTileTokens ? most : kSplit / kTileTokens) * kTileTokens * (32 + 2);
        unpacked = chunk;
        weights = unpacked + align(opened / sizeof(float));
        value_scales = weights + align(size_t(kMostRowBlock) * kSplit / 2);
        queries = value_scales + kSplit;
        query_units = queries + align(size_t(rows) * head_dim / 2);
        const size_t floats = chunk + align(size_t(kChunkTokens) * head_dim), quants = query_units + align(size_t(rows));
        end = (floats > quants ? floats : quants) + 16;
    }
    static CLLM_INLINE size_t align(size_t floats) { return (floats + 15) / 16 * 16; }
};

// How many query tokens to take together, given the query heads per kv head; a job may have fewer, not more.
int attention_tile_tokens(int heads);
// Bytes of scratch memory that such a job needs for its thread.
size_t attend_scratch_bytes(int head_dim, int heads);

}  // namespace cllm

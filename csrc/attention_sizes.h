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
constexpr int kScratchAlign = 64;
static_assert(kSplit % kChunkTokens == 0, "a split is a whole number of chunks");

// Offsets into the scratch memory, in floats from its first aligned byte.
struct AttendScratch {
    size_t sums;    // [rows][head_dim rounded up]
    size_t scores;  // [rows][kScoreStride]
    size_t chunk;   // [kChunkTokens][head_dim] of K or V as floats; the last vector read may reach beyond it
    size_t end;

    CLLM_INLINE AttendScratch(int head_dim, int rows) {
        sums = 0;
        scores = sums + size_t(rows) * align(size_t(head_dim));
        chunk = scores + size_t(rows) * kScoreStride;
        end = chunk + align(size_t(kChunkTokens) * head_dim) + 16;
    }
    static CLLM_INLINE size_t align(size_t floats) { return (floats + 15) / 16 * 16; }
};

// Query tokens to take together for a model with this many query heads per kv head; a job may have fewer, not more.
int attention_tile_tokens(int heads);
// Bytes of scratch memory, of the calling thread's own, for such a job.
size_t attend_scratch_bytes(int head_dim, int heads);

}  // namespace cllm

// Where K and V of a token lie in the arena.
//
// The arena is an array of equal cells. Layers with equal needs form a group; a sequence has a table for each group. A block
// holds `block_size` tokens (a multiple of 16) of a group's layers, in one or more cells, which need not be adjacent. Layers fill a block's cells in their order; each lies wholly
// within one cell:
//
//   cell -> layer -> [ K: kv head -> tile of 16 tokens | V: kv head -> tile of 16 tokens ]
//
// so moving a cell is one copy, and a layer's part of a block is contiguous. Inside a tile:
//
//   K  f16   [head_dim][16 tokens]: a lane is a token, and a dot product with many keys needs no sum over lanes
//   V  f16   [16 tokens][head_dim]
//   q8_0, q4_0: two dimensions of a key, or the same of two values, beside each other, so that they can be multiplied and
//   added by one instruction; one f16 scale per token and 32 dimensions; see kv_tiles.inl
//
// A token takes exactly the bytes that cllm.kv.memory computes: 2, 34/32 or 18/32 a value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "half.h"

namespace cllm {

constexpr int kTileTokens = 16;

enum class KVType : uint8_t { f16, q8_0, q4_0 };

CLLM_INLINE size_t kv_bytes(KVType type, int64_t values) {
    switch (type) {
        case KVType::f16: return size_t(values) * 2;
        case KVType::q8_0: return size_t(values) / 32 * 34;
        case KVType::q4_0: return size_t(values) / 32 * 18;
    }
    return 0;
}

// A sequence's blocks of a group, from block `first` on: entry (b - first) * cells + c is the cell with part c of block b.
struct KVTable {
    const int32_t* entries;
    int first;
};

// One layer's part.
struct KVLayout {
    int n_kv_heads = 0;
    int head_dim = 0;
    int block_size = 16;
    KVType k_type = KVType::f16;
    KVType v_type = KVType::f16;
    size_t cell_bytes = 0;
    int group = 0;
    int cells = 1;      // of a block of its group
    int cell = 0;       // which of them holds this layer
    size_t offset = 0;  // of the layer, within the cell

    CLLM_INLINE size_t k_tile_bytes() const { return kv_bytes(k_type, int64_t(head_dim) * kTileTokens); }
    CLLM_INLINE size_t v_tile_bytes() const { return kv_bytes(v_type, int64_t(head_dim) * kTileTokens); }
    CLLM_INLINE int tiles_per_block() const { return block_size / kTileTokens; }
    CLLM_INLINE size_t k_bytes() const { return size_t(n_kv_heads) * tiles_per_block() * k_tile_bytes(); }
    CLLM_INLINE size_t v_bytes() const { return size_t(n_kv_heads) * tiles_per_block() * v_tile_bytes(); }
    CLLM_INLINE size_t bytes() const { return k_bytes() + v_bytes(); }

    // The layer's entry for a block, of its group's table.
    CLLM_INLINE const int32_t* entry(const KVTable& table, int block) const {
        return table.entries + int64_t(block - table.first) * cells + cell;
    }

    // Offsets within a cell.
    CLLM_INLINE size_t k_tile(int kv_head, int tile) const {
        return offset + (size_t(kv_head) * tiles_per_block() + tile) * k_tile_bytes();
    }
    CLLM_INLINE size_t v_tile(int kv_head, int tile) const {
        return offset + k_bytes() + (size_t(kv_head) * tiles_per_block() + tile) * v_tile_bytes();
    }
};

}  // namespace cllm

// K and V in the arena: writing a token, and unpacking tiles. kv_layout.h has the order of tiles; inside one:
//
//   K f16    [head_dim][16 tokens]
//   V f16    [16 tokens][head_dim]
//
// q8_0 and q4_0: per 32 dimensions a group of 16 f16 scales, one for each token, and then
//
//   K q8_0   [16 pairs of dimensions][16 tokens][2] signed bytes
//   V q8_0   [8 pairs of tokens][32 dimensions][2] signed bytes
//   K q4_0   [8][16 tokens][2] bytes
//   V q4_0   [8 pairs of tokens][16][2] bytes
//
// so that what one load brings are pairs whose products are summed. A byte of q4_0 holds the numbers of two levels: 32
// bytes are 64 of q8_0's, those in the low nibbles first. Both belong to one token, as others may be written meanwhile.
#pragma once

#include "kv_quants.inl"
#include "pairs.h"

namespace cllm {
namespace CLLM_NS {

constexpr int kVecsPerTile = kTileTokens / Vec::lanes;
constexpr int kScaleBytes = 2 * kTileTokens;
constexpr int kNibbleRow = 32;

CLLM_INLINE constexpr int group_bytes(KVType type) {
    return kScaleBytes + (type == KVType::q8_0 ? kQuantGroup : kQuantGroup / 2) * kTileTokens;
}
constexpr int kByteGroup = group_bytes(KVType::q8_0);

static CLLM_INLINE void to_halves(const float* x, int n, uint16_t* out) {
    int i = 0;
    for (; i + Vec::lanes <= n; i += Vec::lanes) Vec::load(x + i).store_f16(out + i);
    for (; i < n; ++i) out[i] = f32_to_f16(x[i]);
}

static void write_k(KVType type, int head_dim, const float* k, uint8_t* tile, int slot) {
    if (type == KVType::f16) {
        uint16_t* column = reinterpret_cast<uint16_t*>(tile) + slot;
        for (int d = 0; d < head_dim; d += Vec::lanes) {
            const int n = head_dim - d < Vec::lanes ? head_dim - d : Vec::lanes;
            uint16_t halves[Vec::lanes];
            to_halves(k + d, n, halves);
            for (int i = 0; i < n; ++i) column[(d + i) * kTileTokens] = halves[i];
        }
        return;
    }
    for (int d = 0; d < head_dim; d += kQuantGroup, tile += group_bytes(type)) {
        uint8_t codes[kQuantGroup];
        reinterpret_cast<uint16_t*>(tile)[slot] = quantise_group(type, k + d, codes);
        uint8_t* column = tile + kScaleBytes + 2 * slot;
        if (type == KVType::q8_0) {
            for (int i = 0; i < kQuantGroup; ++i) column[i / 2 * 2 * kTileTokens + i % 2] = codes[i];
        } else {
            for (int i = 0; i < kQuantGroup / 2; ++i) {
                const int low = i / 2 * 4 + i % 2;
                column[i / 2 * kNibbleRow + i % 2] = uint8_t(codes[low] | codes[low + 2] << 4);
            }
        }
    }
}

static void write_v(KVType type, int head_dim, const float* v, uint8_t* tile, int slot) {
    if (type == KVType::f16) {
        to_halves(v, head_dim, reinterpret_cast<uint16_t*>(tile) + slot * head_dim);
        return;
    }
    for (int d = 0; d < head_dim; d += kQuantGroup, tile += group_bytes(type)) {
        uint8_t codes[kQuantGroup];
        reinterpret_cast<uint16_t*>(tile)[slot] = quantise_group(type, v + d, codes);
        uint8_t* row = tile + kScaleBytes + slot % 2;
        if (type == KVType::q8_0) {
            row += slot / 2 * 2 * kQuantGroup;
            for (int i = 0; i < kQuantGroup; ++i) row[2 * i] = codes[i];
        } else {
            row += slot / 2 * kNibbleRow;
            for (int i = 0; i < kQuantGroup / 2; ++i) row[2 * i] = uint8_t(codes[i] | codes[kQuantGroup / 2 + i] << 4);
        }
    }
}

static void write_kv(const KVLayout& layout, uint8_t* cell, int head, int slot, const float* k, const float* v) {
    const int tile = slot / kTileTokens, column = slot % kTileTokens;
    write_k(layout.k_type, layout.head_dim, k, cell + layout.k_tile(head, tile), column);
    write_v(layout.v_type, layout.head_dim, v, cell + layout.v_tile(head, tile), column);
}

// Reading. While one tile is read, its counterpart further on, `ahead`, is fetched from memory.

// A tile of f16 as floats.
static void widen_halves(const uint8_t* tile, const uint8_t* ahead, int head_dim, float* out) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile);
    for (int i = 0; i < head_dim * kTileTokens; i += 32) {
        __builtin_prefetch(ahead + 2 * i);
        for (int j = i; j < i + 32; j += Vec::lanes) Vec::load_f16(halves + j).store(out + j);
    }
}

// A group of q4_0 as one of q8_0, with its scales as they are: they count in units of kLevelUnit.
static CLLM_INLINE void unpack_group(const uint8_t* group, const uint8_t* ahead, uint8_t* out) {
    std::memcpy(out, group, kScaleBytes);
    for (int i = 0; i < kQuantGroup / 2 * kTileTokens; i += kNibbleRow) {
        if (i % 64 == 0) __builtin_prefetch(ahead + i);
        look_up_bytes(group + kScaleBytes + i, kLevels, reinterpret_cast<int8_t*>(out) + kScaleBytes + 2 * i);
    }
    __builtin_prefetch(ahead + group_bytes(KVType::q4_0) - 1);
}

}  // namespace CLLM_NS
}  // namespace cllm

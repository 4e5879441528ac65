// K and V in the arena: writing a token, and turning tiles into floats. kv_layout.h has the order of tiles; inside one:
//
//   K f16    [head_dim][16 tokens]
//   K q8_0   per 32 dimensions: 16 f16 scales, then [32][16 tokens] signed bytes
//   K q4_0   per 32 dimensions: 16 f16 scales, then [16][16 tokens] bytes
//   V f16    [16 tokens][head_dim]
//   V q8_0   [16 tokens][head_dim / 32] f16 scales, then [16 tokens][head_dim] signed bytes
//   V q4_0   [16 tokens][head_dim / 32] f16 scales, then [16 tokens][head_dim / 32][16] bytes
//
// Byte j of q4_0 holds dimension j of the 32 in its low nibble and 16 + j in its high one: the number of a level. A
// value is scale * number or scale * level, rounded once to float: every reader does it that way, so every reader sees
// the same value.
#pragma once

#include "kv_quants.inl"

namespace cllm {
namespace CLLM_NS {

constexpr int kVecsPerTile = kTileTokens / Vec::lanes;

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
    const int bytes = group_data_bytes(type);
    for (int d = 0; d < head_dim; d += kQuantGroup) {
        uint8_t data[kQuantGroup];
        reinterpret_cast<uint16_t*>(tile)[slot] = quantise_group(type, k + d, data);
        uint8_t* column = tile + 2 * kTileTokens + slot;
        for (int i = 0; i < bytes; ++i) column[i * kTileTokens] = data[i];
        tile += (2 + bytes) * kTileTokens;
    }
}

static void write_v(KVType type, int head_dim, const float* v, uint8_t* tile, int slot) {
    if (type == KVType::f16) {
        to_halves(v, head_dim, reinterpret_cast<uint16_t*>(tile) + slot * head_dim);
        return;
    }
    const int bytes = group_data_bytes(type), groups = head_dim / kQuantGroup;
    uint16_t* scales = reinterpret_cast<uint16_t*>(tile) + slot * groups;
    uint8_t* data = tile + (2 * kTileTokens + slot * bytes) * groups;
    for (int g = 0; g < groups; ++g) scales[g] = quantise_group(type, v + g * kQuantGroup, data + g * bytes);
}

static void write_kv(const KVLayout& layout, uint8_t* block, int layer, int head, int slot, const float* k, const float* v) {
    const int tile = slot / kTileTokens, column = slot % kTileTokens;
    write_k(layout.k_type, layout.head_dim, k, block + layout.k_tile(layer, head, tile), column);
    write_v(layout.v_type, layout.head_dim, v, block + layout.v_tile(layer, head, tile), column);
}

// Tiles as floats. While one is read, its counterpart of the next chunk, `ahead`, is fetched from memory.

static void widen_halves(const uint8_t* tile, const uint8_t* ahead, int head_dim, float* out) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile);
    for (int i = 0; i < head_dim * kTileTokens; i += 32) {
        __builtin_prefetch(ahead + 2 * i);
        for (int j = i; j < i + 32; j += Vec::lanes) Vec::load_f16(halves + j).store(out + j);
    }
}

static void widen_k_q8(const uint8_t* tile, const uint8_t* ahead, int head_dim, float* out) {
    for (int d = 0; d < head_dim; d += kQuantGroup) {
        Vec scales[kVecsPerTile];
        for (int v = 0; v < kVecsPerTile; ++v) {
            scales[v] = Vec::load_f16(reinterpret_cast<const uint16_t*>(tile) + v * Vec::lanes);
        }
        tile += 2 * kTileTokens;
        for (int i = 0; i < kQuantGroup * kTileTokens; i += 4 * kTileTokens) {
            __builtin_prefetch(ahead + i);
            for (int j = 0; j < 4 * kVecsPerTile; ++j) {
                const int at = i + j * Vec::lanes;
                (Vec::load_i8(reinterpret_cast<const int8_t*>(tile) + at) * scales[j % kVecsPerTile]).store(out + at);
            }
        }
        tile += kQuantGroup * kTileTokens;
        ahead += (2 + kQuantGroup) * kTileTokens;
        out += kQuantGroup * kTileTokens;
    }
}

static void widen_k_q4(const uint8_t* tile, const uint8_t* ahead, int head_dim, float* out) {
    constexpr int half = kQuantGroup / 2 * kTileTokens;
    for (int d = 0; d < head_dim; d += kQuantGroup) {
        Vec sizes[kVecsPerTile];
        for (int v = 0; v < kVecsPerTile; ++v) {
            sizes[v] = Vec::load_f16(reinterpret_cast<const uint16_t*>(tile) + v * Vec::lanes) * Vec::all(kLevelUnit);
        }
        tile += 2 * kTileTokens;
        for (int i = 0; i < half; i += 4 * kTileTokens) {
            __builtin_prefetch(ahead + i);
            for (int j = 0; j < 4 * kVecsPerTile; ++j) {
                const int at = i + j * Vec::lanes;
                Vec low, high;
                look_up_nibbles(tile + at, kLevels, low, high);
                (low * sizes[j % kVecsPerTile]).store(out + at);
                (high * sizes[j % kVecsPerTile]).store(out + half + at);
            }
        }
        tile += half;
        ahead += 2 * kTileTokens + half;
        out += 2 * half;
    }
}

// V of a quantised type is a flat list of groups, as its scales are.
template <KVType type>
static void widen_v(const uint8_t* tile, const uint8_t* ahead, int head_dim, float* out) {
    constexpr int bytes = group_data_bytes(type);
    const Vec unit = Vec::all(type == KVType::q4_0 ? kLevelUnit : 1.0f);
    const int groups = kTileTokens * (head_dim / kQuantGroup);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(tile);
    const uint8_t* data = tile + 2 * groups;
    for (int first = 0; first < groups; first += kTileTokens) {
        float scale[kTileTokens];
        for (int v = 0; v < kTileTokens; v += Vec::lanes) (Vec::load_f16(scales + first + v) * unit).store(scale + v);
        for (int i = 0; i < kTileTokens; ++i, data += bytes, ahead += bytes + 2, out += kQuantGroup) {
            __builtin_prefetch(ahead);
            const Vec s = Vec::all(scale[i]);
            for (int j = 0; j < bytes; j += Vec::lanes) {
                if constexpr (type == KVType::q8_0) {
                    (Vec::load_i8(reinterpret_cast<const int8_t*>(data) + j) * s).store(out + j);
                } else {
                    Vec low, high;
                    look_up_nibbles(data + j, kLevels, low, high);
                    (low * s).store(out + j);
                    (high * s).store(out + bytes + j);
                }
            }
        }
    }
}

static void widen_k_tile(KVType type, const uint8_t* tile, const uint8_t* ahead, int head_dim, float* out) {
    switch (type) {
        case KVType::f16: return widen_halves(tile, ahead, head_dim, out);
        case KVType::q8_0: return widen_k_q8(tile, ahead, head_dim, out);
        case KVType::q4_0: return widen_k_q4(tile, ahead, head_dim, out);
    }
}

static void widen_v_tile(KVType type, const uint8_t* tile, const uint8_t* ahead, int head_dim, float* out) {
    switch (type) {
        case KVType::f16: return widen_halves(tile, ahead, head_dim, out);
        case KVType::q8_0: return widen_v<KVType::q8_0>(tile, ahead, head_dim, out);
        case KVType::q4_0: return widen_v<KVType::q4_0>(tile, ahead, head_dim, out);
    }
}

}  // namespace CLLM_NS
}  // namespace cllm

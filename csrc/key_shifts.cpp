#include "key_shifts.h"

#include <algorithm>
#include <cmath>

#include "memory.h"

namespace cllm {
namespace {

constexpr int kSample = 256;  // tokens: a tenth of a second for a small model, and the mean is good to a sixteenth

// One value of each K tile of a head, over the sample.
float mean_over_tokens(const uint16_t* tiles, int head_dim, int d) {
    float sum = 0.0f;
    for (int token = 0; token < kSample; ++token) {
        const int tile = token / kTileTokens, column = token % kTileTokens;
        sum += f16_to_f32(tiles[(tile * head_dim + d) * kTileTokens + column]);
    }
    return sum / kSample;
}

}  // namespace

void learn_key_shifts(Model& model, Forward& forward) {
    // K and V in the first cell, the state in the second.
    auto [states, state_bytes] = one_cell_states(model.shape);
    const size_t kv_bytes = one_cell_kv_bytes(model.shape, kSample, KVType::f16, KVType::f16);
    const size_t cell_bytes = (std::max(kv_bytes, state_bytes) + 63) / 64 * 64;
    const KVMap map = map_kv(model.shape, kSample, KVType::f16, KVType::f16, cell_bytes, {}, std::move(states));
    const Region arena(2 * map.cell_bytes);
    std::vector<int32_t> tokens(kSample);
    for (int i = 0; i < kSample; ++i) tokens[size_t(i)] = int32_t(int64_t(i) * model.shape.n_vocab / kSample);
    const int32_t block = 0, state = 1;
    const KVTable table{&block, 0};
    Chunk chunk{kSample, 0, 0, &table};
    chunk.state = {nullptr, &state};
    forward.step(tokens.data(), {chunk}, map, arena.data(), {});
    for (int index = 0; index < model.shape.n_layers(); ++index) {
        const LayerShape& s = model.shape.layers[size_t(index)];
        if (!s.stores()) continue;
        const KVLayout& layout = map.layers[size_t(index)];
        Vector& shift = model.layers[size_t(index)].key_shift;
        shift.resize(size_t(s.kv_size()));
        for (int i = 0; i < s.kv_size(); ++i) {
            const uint8_t* tiles = arena.data() + layout.k_tile(i / s.head_dim, 0);
            const float mean = mean_over_tokens(reinterpret_cast<const uint16_t*>(tiles), s.head_dim, i % s.head_dim);
            shift[size_t(i)] = std::isfinite(mean) ? -mean : 0.0f;
        }
        model.kernels.spread(shift.data(), s.n_kv_heads, s.head_dim);
    }
    for (int index = 0; index < model.shape.n_layers(); ++index) {
        const LayerShape& s = model.shape.layers[size_t(index)];
        if (!s.attends()) continue;
        Vector& shift = model.layers[size_t(s.stores() ? index : s.kv_from)].key_shift;
        if (s.softcap != 0.0f) std::fill(shift.begin(), shift.end(), 0.0f);
    }
    model.keys_are_shifted = true;
}

}  // namespace cllm

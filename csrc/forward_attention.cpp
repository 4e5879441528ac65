// Attention of a step: rotating, storing K and V, and every row's walk over its sequence's blocks.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "forward.h"

namespace cllm {

namespace {

constexpr int64_t kTasksPerThread = 8;

// Rows that one thread takes when storing K and V. Tokens in one tile of K share its cache lines, so with many rows a thread
// takes a whole tile.
int64_t rows_to_store(int64_t rows) { return rows < 4 * kTileTokens ? 4 : kTileTokens; }

}  // namespace

void Forward::plan_attention(bool wanted_rows_only) {
    for (Walk& walk : walks_) plan_walk(walk, wanted_rows_only);
}

// Tiles of the rows that attend: all rows, or the wanted ones, which then lie one after another.
void Forward::plan_walk(Walk& walk, bool wanted_rows_only) {
    const int most = attention_tile_tokens(walk.group);
    walk.tiles.clear();
    size_t states = 0;
    int row = 0, longest = 1;
    for (const Chunk& chunk : chunks_) {
        // Where windows are computed again, nothing is before their first block.
        const bool again = walk.window != kNoWindow && chunk.first_position < chunk.known;
        const int from = again ? chunk.tables[map_->groups.size() - 1].first * map_->block_size : 0;
        const int skipped = wanted_rows_only ? chunk.tokens - chunk.needed_rows() : 0;
        for (int done = skipped; done < chunk.tokens;) {
            const int tokens = std::min(most, chunk.tokens - done), first = chunk.first_position + done;
            const int sinks = chunk.dropped > 0 ? chunk.kept : 0;
            const int begin = std::max({sinks, from, (first - walk.window + 1) / kTileTokens * kTileTokens});
            const int splits = count_splits(sinks, begin, first + tokens);
            walk.tiles.push_back({row, tokens, first, chunk.tables, sinks, begin, splits, states});
            states += size_t(walk.n_kv_heads) * splits * tokens * walk.group * walk.state_size();
            longest = std::max(longest, splits);
            done += tokens;
            row += tokens;
        }
    }
    // The longest contexts first, so that the threads end together.
    std::reverse(walk.tiles.begin(), walk.tiles.end());
    const int64_t tasks = int64_t(walk.tiles.size()) * walk.n_kv_heads;
    walk.splits_apart = longest > 1 && tasks < kTasksPerThread * team_.size();
    if (!walk.splits_apart) return;
    work_.states.ensure(states);
    if (walk.open_splits.size() < size_t(tasks)) walk.open_splits = std::vector<std::atomic<int>>(size_t(tasks));
    for (size_t i = 0; i < size_t(tasks); ++i) walk.open_splits[i] = walk.tiles[i / size_t(walk.n_kv_heads)].splits;
}

// Positions are cut at multiples of kSplit, and where the sinks end. So where a sequence is cut depends on positions alone.
// With a window, the first split lacks what no row of the tile sees, which changes no bit: whole tiles of keys are left out.
int Forward::count_splits(int sinks, int begin, int end) {
    return (sinks + kSplit - 1) / kSplit + (end + kSplit - 1) / kSplit - begin / kSplit;
}

Forward::Split Forward::split_of(const Tile& tile, int index) {
    const int of_sinks = (tile.sinks + kSplit - 1) / kSplit;
    if (index < of_sinks) return {index * kSplit, std::min((index + 1) * kSplit, tile.sinks), true};
    const int number = tile.begin / kSplit + index - of_sinks;
    return {std::max(number * kSplit, tile.begin), std::min((number + 1) * kSplit, tile.first_position + tile.tokens), false};
}

// Whether no row attends to another of the step: each chunk is one token and writes into blocks of its own.
bool Forward::rows_are_apart() {
    if (positions_.size() != chunks_.size()) return false;
    for (size_t group = 0; group < map_->groups.size(); ++group) {
        if (map_->groups[group].layers.empty()) continue;
        written_.clear();
        for (const Chunk& chunk : chunks_) {
            const KVTable& table = chunk.tables[group];
            const int64_t block = chunk.first_position / map_->block_size - table.first;
            written_.push_back(table.entries[block * map_->groups[group].cells]);
        }
        std::sort(written_.begin(), written_.end());
        if (std::adjacent_find(written_.begin(), written_.end()) != written_.end()) return false;
    }
    return true;
}

float Forward::query_scale(const LayerShape& s, int64_t row) const {
    if (s.temperature == 0.0f) return s.scale;
    const int position = positions_[size_t(row)] + dropped_[size_t(row)];
    return s.scale * float(1.0 + double(s.temperature) * std::log(1.0 + position / s.temperature_context));
}

void Forward::normalise_heads(const LayerShape& s, const Vector& norm, int count, float* heads) const {
    for (float* head = heads; count > 0; --count, head += s.head_dim)
        kernels_.rms_norm(head, norm.data(), s.head_dim, model_.shape.rms_eps, head);
}

void Forward::turn(const Layer& layer, const std::vector<Rotations>& by, int64_t row, float* heads, int count, float scale) const {
    const int dim = layer.shape.head_dim;
    if (layer.rotation < 0) return kernels_.cap(heads, int64_t(count) * dim, scale, 0.0f);
    const RotationShape& shape = *layer.shape.rotation;
    const Rotations& turns = by[size_t(layer.rotation)];
    const int64_t pairs = shape.dims / 2;
    kernels_.rope(heads, count, dim, shape.dims, turns.cosines.data() + row * pairs, turns.sines.data() + row * pairs, shape.neox,
                  scale);
}

// The queries of one kv head, in place or in a copy `to`.
//
// A key keeps the rotation of its position in the text, and a score depends on the difference of two rotations, so dropping
// tokens changes no key. But the distance to the first, kept tokens would grow beyond what the model was trained on. Queries
// that attend to them are rotated by their place in the block table instead: the distance inside the window.
void Forward::rotate_queries(const Layer& layer, int64_t row, int kv_head, bool for_sinks, float* to) {
    const LayerShape& s = layer.shape;
    const int heads = s.group(), first = kv_head * heads * s.head_dim, size = heads * s.head_dim;
    float* q = work_.q.data() + row * s.q_size() + first;
    if (s.gated) {
        const float* both = work_.gated_q.data() + (row * s.q_size() + first) * 2;
        if (to) q = to;
        for (int head = 0; head < heads; ++head)
            std::memcpy(q + head * s.head_dim, both + head * 2 * s.head_dim, size_t(s.head_dim) * sizeof(float));
    } else if (to) {
        q = static_cast<float*>(std::memcpy(to, q, size_t(size) * sizeof(float)));
    }
    const bool whole = s.qk_norm == QKNorm::row;  // then bias and norm were applied before
    if (!layer.q_bias.empty() && !whole) kernels_.add(layer.q_bias.data() + first, size, q);
    if (s.qk_norm == QKNorm::head && !s.norm_last) normalise_heads(s, layer.q_norm, heads, q);
    const float scale = query_scale(s, row);
    turn(layer, for_sinks ? work_.sink_rotations : work_.rotations, row, q, heads, s.norm_last ? 1.0f : scale);
    if (s.norm_last) {
        normalise_heads(s, layer.q_norm, heads, q);
        kernels_.cap(q, size, scale, 0.0f);
    }
    if (map_->k_type != KVType::f16) kernels_.spread(q, heads, s.head_dim);
}

void Forward::rotate_in_place(const Layer& layer, int64_t row, int kv_head) {
    const LayerShape& s = layer.shape;
    if (dropped_[size_t(row)] > 0)
        rotate_queries(layer, row, kv_head, true,
                       work_.sink_q.data() + row * s.q_size() + int64_t(kv_head) * s.group() * s.head_dim);
    rotate_queries(layer, row, kv_head, false, nullptr);
}

void Forward::store_keys(const Layer& layer, int index, int64_t row, int kv_head) {
    const LayerShape& s = layer.shape;
    if (s.window == kNoWindow && positions_[size_t(row)] < known_[size_t(row)]) return;
    const int dim = s.head_dim, at = kv_head * dim;
    float *k = work_.k.data() + row * s.kv_size() + at, *v = work_.v.data() + row * s.kv_size() + at;
    const bool whole = s.qk_norm == QKNorm::row;
    if (!layer.k_bias.empty() && !whole) kernels_.add(layer.k_bias.data() + at, dim, k);
    if (s.v_is_k) std::memcpy(v, k, size_t(dim) * sizeof(float));
    if (!layer.v_bias.empty()) kernels_.add(layer.v_bias.data() + at, dim, v);
    if (s.qk_norm == QKNorm::head && !s.norm_last) normalise_heads(s, layer.k_norm, 1, k);
    if (s.v_norm) normalise_heads(s, model_.ones, 1, v);
    if (layer.rotation >= 0) turn(layer, work_.rotations, row, k, 1, 1.0f);
    if (s.norm_last) normalise_heads(s, layer.k_norm, 1, k);
    // Queries are spread as keys are, and attended values back again, so nothing but the rounding changes.
    const KVLayout& layout = map_->layers[size_t(index)];
    if (layout.k_type != KVType::f16) kernels_.spread(k, 1, dim);
    if (layout.k_type == KVType::q4_0) kernels_.add(layer.key_shift.data() + at, dim, k);
    if (layout.v_type != KVType::f16) kernels_.spread(v, 1, dim);
    const int position = positions_[size_t(row)], size = layout.block_size;
    const int32_t* cell = layout.entry(tables_[size_t(row)][layout.group], position / size);
    kernels_.write_kv(layout, arena_ + size_t(*cell) * layout.cell_bytes, kv_head, position % size, k, v);
}

// Before rows attend to each other, K and V of all of them must be there.
void Forward::rotate_and_store(const Layer& layer, int index, bool queries, bool keys) {
    const int64_t run = rows_to_store(rows_);
    timed(Phase::rope, [&] {
        team_.queue((rows_ + run - 1) / run, [&](int, int64_t task) {
            for (int64_t row = task * run; row < std::min(rows_, (task + 1) * run); ++row)
                for (int head = 0; head < layer.shape.n_kv_heads; ++head) {
                    if (queries) rotate_in_place(layer, row, head);
                    if (keys) store_keys(layer, index, row, head);
                }
        });
    });
}

AttendJob Forward::job_of(const Tile& tile, int layer, int kv_head, const float* q) const {
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    const KVLayout& layout = map_->layers[size_t(layer)];
    return {&layout, arena_, tile.tables[layout.group], kv_head, s.group(), tile.tokens, tile.first_position, s.window, s.softcap,
            q, s.q_size()};
}

// The rotated queries of a tile. If rows are independent, they are rotated here, and the thread that attends to the last
// positions first stores the token's K and V: that saves a phase.
const float* Forward::queries_of(const Tile& tile, int layer, int kv_head, bool sinks, bool stores, int thread) {
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    if (!rotates_later_) {
        const float* all = sinks ? work_.sink_q.data() : work_.q.data();
        return all + int64_t(tile.row) * s.q_size() + int64_t(kv_head) * s.group() * s.head_dim;
    }
    const Layer& weights = model_.layers[size_t(layer)];
    float* q = work_.threads[size_t(thread)].q.data();
    rotate_queries(weights, tile.row, kv_head, sinks, q);
    if (stores && s.stores()) store_keys(weights, layer, tile.row, kv_head);
    return q;
}

// A shift of all keys adds the same number to all scores of a query, which the softmax cancels (key_shifts.h), unless some
// of the scores come from a differently rotated query, or are none of a key: then each subtracts its own share from the peaks
// of its states.
void Forward::take_key_shift_back(const Tile& tile, int layer, int kv_head, const float* q, float* states) const {
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    if ((tile.sinks == 0 && !s.sinks) || map_->k_type != KVType::q4_0) return;
    const Layer& source = model_.layers[size_t(s.stores() ? layer : s.kv_from)];
    const float* shift = source.key_shift.data() + kv_head * s.head_dim;
    for (int token = 0; token < tile.tokens; ++token, q += s.q_size())
        for (int head = 0; head < s.group(); ++head, states += s.head_dim + 2) {
            float product = 0.0f;
            for (int d = 0; d < s.head_dim; ++d) product += q[head * s.head_dim + d] * shift[d];
            states[s.head_dim + 1] -= product;
        }
}

void Forward::attend(int layer) {
    Walk& walk = walks_[size_t(walk_of_[size_t(layer)])];
    const int64_t heads = walk.n_kv_heads;
    timed(Phase::attention, [&] {
        if (walk.splits_apart) return attend_splits(layer, walk);
        team_.queue(int64_t(walk.tiles.size()) * heads, [&](int thread, int64_t task) {
            attend_tile(walk.tiles[size_t(task / heads)], layer, int(task % heads), thread);
        });
    });
}

void Forward::attend_tile(const Tile& tile, int layer, int kv_head, int thread) {
    ThreadSpace& own = work_.threads[size_t(thread)];
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    const float* q = nullptr;
    for (int index = 0; index < tile.splits; ++index) {
        const Split split = split_of(tile, index);
        const bool others_begin = split.begin == tile.begin;
        if (index == 0 || others_begin) q = queries_of(tile, layer, kv_head, split.sinks, others_begin, thread);
        float* states = index == 0 ? own.merged.data() : own.states.data();
        kernels_.attend(job_of(tile, layer, kv_head, q), split.begin, split.end, states, own.attend.data());
        take_key_shift_back(tile, layer, kv_head, q, states);
        if (index > 0) kernels_.merge_states(own.merged.data(), states, int64_t(tile.tokens) * s.group(), s.head_dim);
    }
    finish(tile, layer, kv_head, own.merged.data());
}

// Few rows with long contexts: threads share the splits of a row. The thread that finishes last merges them, in the same
// order and by the same operations as a single thread would.
void Forward::attend_splits(int layer, Walk& walk) {
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    const int64_t heads = s.n_kv_heads;
    int64_t tasks = 0;
    const std::vector<Tile>& tiles = walk.tiles;
    for (const Tile& tile : tiles) tasks += tile.splits * heads;
    const auto attend_task = [&](int thread, int64_t task) {
        size_t i = 0;
        while (task >= tiles[i].splits * heads) task -= tiles[i++].splits * heads;
        const Tile& tile = tiles[i];
        const int head = int(task / tile.splits), index = int(task % tile.splits);
        const Split split = split_of(tile, index);
        const float* q = queries_of(tile, layer, head, split.sinks, index == tile.splits - 1, thread);
        float* states = states_of(walk, tile, head, index);
        kernels_.attend(job_of(tile, layer, head, q), split.begin, split.end, states,
                        work_.threads[size_t(thread)].attend.data());
        take_key_shift_back(tile, layer, head, q, states);
        std::atomic<int>& open = walk.open_splits[i * size_t(heads) + size_t(head)];
        if (open.fetch_sub(1) > 1) return;
        open = tile.splits;  // for the next layer
        float* total = states_of(walk, tile, head, 0);
        for (int later = 1; later < tile.splits; ++later)
            kernels_.merge_states(total, states_of(walk, tile, head, later), int64_t(tile.tokens) * s.group(), s.head_dim);
        finish(tile, layer, head, total);
    };
    if (tasks > team_.size()) return team_.queue(tasks, attend_task);
    team_.share(tasks, 1, [&](int thread, int64_t first, int64_t last) {
        for (; first < last; ++first) attend_task(thread, first);
    });
}

float* Forward::states_of(const Walk& walk, const Tile& tile, int64_t kv_head, int64_t split) const {
    const size_t size = size_t(tile.tokens) * walk.group * walk.state_size();
    return work_.states.data() + tile.states + size_t(kv_head * tile.splits + split) * size;
}

// The attended values of a tile, from the states of its queries.
void Forward::finish(const Tile& tile, int layer, int kv_head, float* states) {
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    const Vector& sinks = model_.layers[size_t(layer)].sinks;
    for (int token = 0; token < tile.tokens; ++token) {
        const int64_t place = int64_t(tile.row + token) * s.q_size() + int64_t(kv_head) * s.group() * s.head_dim;
        float* out = work_.attended.data() + place;
        const float* gate = work_.gated_q.data() + 2 * place + s.head_dim;
        for (int head = 0; head < s.group(); ++head, states += s.head_dim + 2, out += s.head_dim) {
            if (s.sinks) states[s.head_dim] += std::exp(sinks[size_t(kv_head * s.group() + head)] - states[s.head_dim + 1]);
            kernels_.finish_state(states, s.head_dim, out);
            if (map_->v_type != KVType::f16) kernels_.spread(out, 1, s.head_dim);
            if (s.gated) kernels_.sigmoid_mul(gate + head * 2 * s.head_dim, out, s.head_dim, out);
        }
    }
}

}  // namespace cllm

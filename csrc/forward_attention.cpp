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

// Tiles of the rows that attend: all rows, or the wanted ones, which then lie one after another.
void Forward::plan_attention(bool wanted_rows_only) {
    const LayerShape& s = model_.shape.layer();
    const int group = s.group(), most = attention_tile_tokens(group);
    tiles_.clear();
    size_t states = 0;
    int row = 0, longest = 1;
    for (const Chunk& chunk : chunks_) {
        const int skipped = wanted_rows_only ? chunk.tokens - chunk.needed_rows() : 0;
        for (int done = skipped; done < chunk.tokens;) {
            const int tokens = std::min(most, chunk.tokens - done), first = chunk.first_position + done;
            const int sinks = chunk.dropped > 0 ? chunk.kept : 0, splits = count_splits(first + tokens, sinks);
            tiles_.push_back({row, tokens, first, chunk.blocks, sinks, splits, states});
            states += size_t(s.n_kv_heads) * splits * tokens * group * (s.head_dim + 2);
            longest = std::max(longest, splits);
            done += tokens;
            row += tokens;
        }
    }
    // The longest contexts first, so that the threads end together.
    std::reverse(tiles_.begin(), tiles_.end());
    const int64_t tasks = int64_t(tiles_.size()) * s.n_kv_heads;
    splits_apart_ = longest > 1 && tasks < kTasksPerThread * team_.size();
    if (!splits_apart_) return;
    work_.states.ensure(states);
    if (open_splits_.size() < size_t(tasks)) open_splits_ = std::vector<std::atomic<int>>(size_t(tasks));
    for (size_t i = 0; i < size_t(tasks); ++i) open_splits_[i] = tiles_[i / size_t(s.n_kv_heads)].splits;
}

// Positions are cut at multiples of kSplit, and where the sinks end. So where a sequence is cut depends on positions alone.
int Forward::count_splits(int end, int sinks) {
    return (sinks + kSplit - 1) / kSplit + (end + kSplit - 1) / kSplit - sinks / kSplit;
}

Forward::Split Forward::split_of(const Tile& tile, int index) {
    const int of_sinks = (tile.sinks + kSplit - 1) / kSplit;
    if (index < of_sinks) return {index * kSplit, std::min((index + 1) * kSplit, tile.sinks), true};
    const int number = tile.sinks / kSplit + index - of_sinks;
    return {std::max(number * kSplit, tile.sinks), std::min((number + 1) * kSplit, tile.first_position + tile.tokens), false};
}

// Whether no row attends to another of the step: each chunk is one token and writes into a block of its own.
bool Forward::rows_are_apart() {
    if (positions_.size() != chunks_.size()) return false;
    written_.clear();
    for (const Chunk& chunk : chunks_) written_.push_back(chunk.blocks[chunk.first_position / layout_->block_size]);
    std::sort(written_.begin(), written_.end());
    return std::adjacent_find(written_.begin(), written_.end()) == written_.end();
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
    if (to) q = static_cast<float*>(std::memcpy(to, q, size_t(size) * sizeof(float)));
    if (!layer.q_bias.empty()) kernels_.add(layer.q_bias.data() + first, size, q);
    if (!layer.q_norm.empty())
        for (int head = 0; head < heads; ++head)
            kernels_.rms_norm(q + head * s.head_dim, layer.q_norm.data(), s.head_dim, model_.shape.rms_eps, q + head * s.head_dim);
    const int64_t pairs = s.rotation.dims / 2;
    const Rotations& turns = for_sinks ? work_.sink_rotations : work_.rotations;
    kernels_.rope(q, heads, s.head_dim, s.rotation.dims, turns.cosines.data() + row * pairs, turns.sines.data() + row * pairs,
                  s.rotation.neox, float(1.0 / std::sqrt(double(s.head_dim))));
    if (layout_->k_type != KVType::f16) kernels_.spread(q, heads, s.head_dim);
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
    const int dim = s.head_dim, at = kv_head * dim;
    float *k = work_.k.data() + row * s.kv_size() + at, *v = work_.v.data() + row * s.kv_size() + at;
    if (!layer.k_bias.empty()) kernels_.add(layer.k_bias.data() + at, dim, k);
    if (!layer.v_bias.empty()) kernels_.add(layer.v_bias.data() + at, dim, v);
    if (!layer.k_norm.empty()) kernels_.rms_norm(k, layer.k_norm.data(), dim, model_.shape.rms_eps, k);
    const int64_t pairs = s.rotation.dims / 2;
    kernels_.rope(k, 1, dim, s.rotation.dims, work_.rotations.cosines.data() + row * pairs,
                  work_.rotations.sines.data() + row * pairs, s.rotation.neox, 1.0f);
    // Queries are spread as keys are, and attended values back again, so nothing but the rounding changes.
    if (layout_->k_type != KVType::f16) kernels_.spread(k, 1, dim);
    if (layout_->k_type == KVType::q4_0) kernels_.add(layer.key_shift.data() + at, dim, k);
    if (layout_->v_type != KVType::f16) kernels_.spread(v, 1, dim);
    const int position = positions_[size_t(row)], size = layout_->block_size;
    uint8_t* block = arena_ + size_t(tables_[size_t(row)][position / size]) * layout_->block_bytes();
    kernels_.write_kv(*layout_, block, index, kv_head, position % size, k, v);
}

// Before rows attend to each other, K and V of all of them must be there.
void Forward::rotate_and_store(const Layer& layer, int index, bool queries) {
    const int64_t run = rows_to_store(rows_);
    timed(Phase::rope, [&] {
        team_.queue((rows_ + run - 1) / run, [&](int, int64_t task) {
            for (int64_t row = task * run; row < std::min(rows_, (task + 1) * run); ++row)
                for (int head = 0; head < layer.shape.n_kv_heads; ++head) {
                    if (queries) rotate_in_place(layer, row, head);
                    store_keys(layer, index, row, head);
                }
        });
    });
}

AttendJob Forward::job_of(const Tile& tile, int layer, int kv_head, const float* q) const {
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    return {layout_, arena_, tile.blocks, layer, kv_head, s.group(), tile.tokens, tile.first_position, q, s.q_size()};
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
    if (stores) store_keys(weights, layer, tile.row, kv_head);
    return q;
}

// A shift of all keys adds the same number to all scores of a query, which the softmax cancels (key_shifts.h), unless some
// of the scores come from a differently rotated query. Then each subtracts its own share from the peaks of its states.
void Forward::take_key_shift_back(const Tile& tile, int layer, int kv_head, const float* q, float* states) const {
    if (tile.sinks == 0 || layout_->k_type != KVType::q4_0) return;
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    const float* shift = model_.layers[size_t(layer)].key_shift.data() + kv_head * s.head_dim;
    for (int token = 0; token < tile.tokens; ++token, q += s.q_size())
        for (int head = 0; head < s.group(); ++head, states += s.head_dim + 2) {
            float product = 0.0f;
            for (int d = 0; d < s.head_dim; ++d) product += q[head * s.head_dim + d] * shift[d];
            states[s.head_dim + 1] -= product;
        }
}

void Forward::attend(int layer) {
    const int64_t heads = model_.layers[size_t(layer)].shape.n_kv_heads;
    timed(Phase::attention, [&] {
        if (splits_apart_) return attend_splits(layer);
        team_.queue(int64_t(tiles_.size()) * heads, [&](int thread, int64_t task) {
            attend_tile(tiles_[size_t(task / heads)], layer, int(task % heads), thread);
        });
    });
}

void Forward::attend_tile(const Tile& tile, int layer, int kv_head, int thread) {
    ThreadSpace& own = work_.threads[size_t(thread)];
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    const float* q = nullptr;
    for (int index = 0; index < tile.splits; ++index) {
        const Split split = split_of(tile, index);
        const bool others_begin = split.begin == tile.sinks;
        if (index == 0 || others_begin) q = queries_of(tile, layer, kv_head, split.sinks, others_begin, thread);
        float* states = index == 0 ? own.merged.data() : own.states.data();
        kernels_.attend(job_of(tile, layer, kv_head, q), split.begin, split.end, states, own.attend.data());
        take_key_shift_back(tile, layer, kv_head, q, states);
        if (index > 0) kernels_.merge_states(own.merged.data(), states, int64_t(tile.tokens) * s.group(), s.head_dim);
    }
    finish(tile, kv_head, own.merged.data());
}

// Few rows with long contexts: threads share the splits of a row. The thread that finishes last merges them, in the same
// order and by the same operations as a single thread would.
void Forward::attend_splits(int layer) {
    const LayerShape& s = model_.layers[size_t(layer)].shape;
    const int64_t heads = s.n_kv_heads;
    int64_t tasks = 0;
    for (const Tile& tile : tiles_) tasks += tile.splits * heads;
    const auto attend_task = [&](int thread, int64_t task) {
        size_t i = 0;
        while (task >= tiles_[i].splits * heads) task -= tiles_[i++].splits * heads;
        const Tile& tile = tiles_[i];
        const int head = int(task / tile.splits), index = int(task % tile.splits);
        const Split split = split_of(tile, index);
        const float* q = queries_of(tile, layer, head, split.sinks, index == tile.splits - 1, thread);
        kernels_.attend(job_of(tile, layer, head, q), split.begin, split.end, states_of(tile, head, index),
                        work_.threads[size_t(thread)].attend.data());
        take_key_shift_back(tile, layer, head, q, states_of(tile, head, index));
        std::atomic<int>& open = open_splits_[i * size_t(heads) + size_t(head)];
        if (open.fetch_sub(1) > 1) return;
        open = tile.splits;  // for the next layer
        float* total = states_of(tile, head, 0);
        for (int later = 1; later < tile.splits; ++later)
            kernels_.merge_states(total, states_of(tile, head, later), int64_t(tile.tokens) * s.group(), s.head_dim);
        finish(tile, head, total);
    };
    if (tasks > team_.size()) return team_.queue(tasks, attend_task);
    team_.share(tasks, 1, [&](int thread, int64_t first, int64_t last) {
        for (; first < last; ++first) attend_task(thread, first);
    });
}

float* Forward::states_of(const Tile& tile, int64_t kv_head, int64_t split) const {
    const size_t size = size_t(tile.tokens) * model_.shape.layer().group() * (model_.shape.layer().head_dim + 2);
    return work_.states.data() + tile.states + size_t(kv_head * tile.splits + split) * size;
}

// The attended values of a tile, from the states of its queries.
void Forward::finish(const Tile& tile, int kv_head, const float* states) {
    const LayerShape& s = model_.shape.layer();
    for (int token = 0; token < tile.tokens; ++token) {
        float* out = work_.attended.data() + int64_t(tile.row + token) * s.q_size() + int64_t(kv_head) * s.group() * s.head_dim;
        for (int head = 0; head < s.group(); ++head, states += s.head_dim + 2, out += s.head_dim) {
            kernels_.finish_state(states, s.head_dim, out);
            if (layout_->v_type != KVType::f16) kernels_.spread(out, 1, s.head_dim);
        }
    }
}

}  // namespace cllm

#include "forward.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace cllm {

const char* const kPhaseNames[int(Phase::count)] = {
    "norm", "qkv", "rope", "attention", "merge", "quantise", "output", "gate_up", "down", "head",
};

namespace {

constexpr int64_t kTasksPerThread = 8;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Rows that one thread takes when K and V are stored: tokens that share a tile of K share its cache lines, so where there
// are many rows a thread takes as many as a tile has.
int64_t rows_to_store(int64_t rows) { return rows < 4 * kTileTokens ? 4 : kTileTokens; }

}  // namespace

// Counted as time of the phase, if somebody wants to know.
template <class Run>
void Forward::timed(Phase which, int thread, Run&& run) {
    if (!profiling_ || thread != 0) return run();
    const double start = now();
    run();
    profile_[size_t(which)] += now() - start;
}

template <class Work>
void Forward::phase(Phase which, int thread, int64_t tasks, Work&& work) {
    timed(which, thread, [&] { pool_.phase(tasks, work); });
}

// Each row once; a panel of quantised rows is written by one thread, since its rows share cache lines.
template <class Work>
void Forward::each_panel(Phase which, int thread, Work&& work) {
    const int64_t size = kernels_.panel_rows;
    phase(which, thread, (rows_ + size - 1) / size, [&](int64_t panel) {
        for (int64_t row = panel * size; row < std::min(rows_, (panel + 1) * size); ++row) work(row);
    });
}

std::array<double, size_t(Phase::count)> Forward::take_profile() {
    const auto taken = profile_;
    profile_.fill(0.0);
    return taken;
}

bool Forward::step(const int32_t* tokens, const std::vector<Chunk>& chunks, const KVLayout& layout, uint8_t* arena,
                   float* logits) {
    tokens_ = tokens;
    layout_ = &layout;
    arena_ = arena;
    logits_ = logits;
    stopping_ = false;
    abort_.store(false);
    plan_rows(chunks);
    if (rows_ == 0) return true;
    work_.ensure(model_, rows_, pool_.size());
    plan_attention(false);
    pool_.run(enter, this);
    return !stopping_;
}

void Forward::plan_rows(const std::vector<Chunk>& chunks) {
    chunks_ = chunks;
    positions_.clear();
    tables_.clear();
    wanted_.clear();
    for (const Chunk& chunk : chunks) {
        for (int i = 0; i < chunk.tokens; ++i) {
            positions_.push_back(chunk.first_position + i);
            tables_.push_back(chunk.blocks);
        }
        if (chunk.wants_logits) wanted_.push_back(int(positions_.size()) - 1);
    }
    rows_ = int64_t(positions_.size());
}

// Tiles of the rows that attend: all of them, or those whose logits are wanted, which then lie one after another.
void Forward::plan_attention(bool last_rows_only) {
    const int group = model_.shape.group(), most = attention_tile_tokens(group);
    tiles_.clear();
    size_t states = 0;
    int row = 0, longest = 1;
    for (const Chunk& chunk : chunks_) {
        if (last_rows_only && !chunk.wants_logits) continue;
        const int skipped = last_rows_only ? chunk.tokens - 1 : 0;
        for (int done = skipped; done < chunk.tokens;) {
            const int tokens = std::min(most, chunk.tokens - done), first = chunk.first_position + done;
            const int splits = (first + tokens + kSplit - 1) / kSplit;
            tiles_.push_back({row, tokens, first, chunk.blocks, splits, states});
            states += size_t(model_.shape.n_kv_heads) * splits * tokens * group * (model_.shape.head_dim + 2);
            longest = std::max(longest, splits);
            done += tokens;
            row += tokens;
        }
    }
    // The longest contexts first, so that the threads end together.
    std::reverse(tiles_.begin(), tiles_.end());
    const int64_t tasks = int64_t(tiles_.size()) * model_.shape.n_kv_heads;
    splits_apart_ = longest > 1 && tasks < kTasksPerThread * pool_.size();
    if (splits_apart_) work_.states.ensure(states);
}

void Forward::run(int thread) {
    embed(thread);
    for (int layer = 0; layer < model_.shape.n_layers; ++layer)
        if (!run_layer(layer, thread)) return;
    compute_logits(thread);
}

void Forward::embed(int thread) {
    const Shape& s = model_.shape;
    const int pairs = s.rope_dims / 2;
    each_panel(Phase::norm, thread, [&](int64_t row) {
        unpack_row(model_.token_embd, tokens_[row], work_.x.data() + row * s.n_embd);
        for (int i = 0; i < pairs; ++i) {
            const double angle = positions_[size_t(row)] * model_.rope_frequencies[size_t(i)];
            work_.cosines.data()[row * pairs + i] = float(std::cos(angle));
            work_.sines.data()[row * pairs + i] = float(std::sin(angle));
        }
    });
}

// False if the step ends here: it was aborted, or nothing else is wanted.
bool Forward::run_layer(int index, int thread) {
    const Layer& layer = model_.layers[size_t(index)];
    const bool last = index == model_.shape.n_layers - 1;
    const bool fewer = last && int64_t(wanted_.size()) < rows_;
    const int64_t run = rows_to_store(rows_), store_tasks = (rows_ + run - 1) / run;
    // Decided by one thread before a barrier, read by all behind it.
    if (thread == 0) stopping_ = abort_.load(std::memory_order_relaxed);
    normalise(layer.attn_norm.data(), thread);
    if (stopping_) return false;
    if (fewer) {
        // Only K and V of the other rows are of use.
        multiply({{&layer.k, work_.k.data()}, {&layer.v, work_.v.data()}}, work_.embd, false, thread, Phase::qkv);
        phase(Phase::rope, thread, store_tasks, [&](int64_t task) {
            for (int64_t row = task * run; row < std::min(rows_, (task + 1) * run); ++row) store_keys(layer, index, row);
        });
        if (wanted_.empty()) return false;
        keep_wanted_rows(thread);
        normalise(layer.attn_norm.data(), thread);
        multiply({{&layer.q, work_.q.data()}}, work_.embd, false, thread, Phase::qkv);
        phase(Phase::rope, thread, rows_, [&](int64_t row) { rotate_queries(layer, row); });
    } else {
        multiply({{&layer.q, work_.q.data()}, {&layer.k, work_.k.data()}, {&layer.v, work_.v.data()}}, work_.embd,
                 false, thread, Phase::qkv);
        phase(Phase::rope, thread, store_tasks, [&](int64_t task) {
            for (int64_t row = task * run; row < std::min(rows_, (task + 1) * run); ++row) {
                rotate_queries(layer, row);
                store_keys(layer, index, row);
            }
        });
    }
    attend(index, thread);
    const int64_t size = model_.shape.q_size();
    each_panel(Phase::quantise, thread,
               [&](int64_t row) { quantise(work_.attended.data() + row * size, size, row, work_.heads); });
    multiply({{&layer.output, work_.x.data()}}, work_.heads, true, thread, Phase::output);
    feed_forward(index, thread);
    return true;
}

void Forward::feed_forward(int index, int thread) {
    const Layer& layer = model_.layers[size_t(index)];
    normalise(layer.ffn_norm.data(), thread);
    const int64_t at_once = std::max<int64_t>(1, kActivatedFloats / 32 / rows_);
    timed(Phase::gate_up, thread, [&] {
        pool_.spans((model_.shape.n_ff + 31) / 32, [&](int64_t first, int64_t last) {
            for (; first < last; first += at_once) activate(layer, first, std::min(at_once, last - first), thread);
        });
    });
    multiply({{&layer.down, work_.x.data()}}, work_.ff, true, thread, Phase::down);
}

// Some groups of 32 columns of silu(gate) * up, as inputs of the last product: whole rows of them never exist as floats, so
// what does stays in the cache.
void Forward::activate(const Layer& layer, int64_t first_group, int64_t groups, int thread) {
    constexpr int64_t tiles = 32 / kTileRows;
    const int64_t ff = model_.shape.n_ff, first = first_group * 32, width = groups * 32;
    ThreadSpace& own = work_.threads[size_t(thread)];
    const auto multiply_into = [&](const PackedMatrix& whole, float* out) {
        const PackedMatrix w = whole.part(first_group * tiles, groups * tiles);
        kernels_.matmul(w, work_.embd.quants, work_.embd.floats.data(), rows_, 0, w.tiles(), out, width, false,
                        own.matmul.data());
    };
    float* gate = own.gate.data();
    multiply_into(layer.gate, gate);
    multiply_into(layer.up, own.up.data());
    kernels_.silu_mul(gate, own.up.data(), rows_ * width, gate);
    if (ff % 32 == 0) kernels_.quantise_columns(gate, rows_, first_group, groups, work_.ff.quants);
    if (!model_.any_float) return;
    const size_t bytes = size_t(std::min(width, ff - first)) * sizeof(float);
    for (int64_t row = 0; row < rows_; ++row)
        std::memcpy(work_.ff.floats.data() + row * ff + first, gate + row * width, bytes);
}

// The rest of the step is about the wanted rows alone: move them to the front.
void Forward::keep_wanted_rows(int thread) {
    if (thread == 0) {
        const size_t embd = size_t(model_.shape.n_embd), pairs = size_t(model_.shape.rope_dims / 2);
        for (size_t i = 0; i < wanted_.size(); ++i) {
            const size_t from = size_t(wanted_[i]);  // never before i, so nothing that is still needed is overwritten
            std::memmove(work_.x.data() + i * embd, work_.x.data() + from * embd, embd * sizeof(float));
            std::memmove(work_.cosines.data() + i * pairs, work_.cosines.data() + from * pairs, pairs * sizeof(float));
            std::memmove(work_.sines.data() + i * pairs, work_.sines.data() + from * pairs, pairs * sizeof(float));
            wanted_[i] = int(i);
        }
        rows_ = int64_t(wanted_.size());
        plan_attention(true);
    }
    pool_.barrier();
}

void Forward::compute_logits(int thread) {
    normalise(model_.output_norm.data(), thread);
    multiply({{&model_.output, logits_}}, work_.embd, false, thread, Phase::head);
}

void Forward::normalise(const float* weight, int thread) {
    const int64_t embd = model_.shape.n_embd;
    float* normed = work_.threads[size_t(thread)].row.data();
    each_panel(Phase::norm, thread, [&](int64_t row) {
        kernels_.rms_norm(work_.x.data() + row * embd, weight, embd, model_.shape.rms_eps, normed);
        quantise(normed, embd, row, work_.embd);
    });
}

void Forward::quantise(const float* row, int64_t cols, int64_t at, InputBuffer& to) {
    if (cols % 32 == 0) kernels_.quantise_row(row, at, to.quants);
    if (model_.any_float) std::memcpy(to.floats.data() + at * cols, row, size_t(cols) * sizeof(float));
}

void Forward::multiply(std::initializer_list<Product> products, const InputBuffer& inputs, bool add, int thread, Phase which) {
    uint8_t* scratch = work_.threads[size_t(thread)].matmul.data();
    int64_t pairs = 0;  // of tiles, since kernels like to compute two together
    for (const Product& product : products) pairs += product.pairs();
    timed(which, thread, [&] {
        pool_.spans(pairs, [&](int64_t first, int64_t last) {
            for (const Product& product : products) {
                const PackedMatrix& w = *product.weights;
                const int64_t begin = std::max<int64_t>(0, first), end = std::min(product.pairs(), last);
                if (begin < end)
                    kernels_.matmul(w, inputs.quants, inputs.floats.data(), rows_, 2 * begin, std::min(w.tiles(), 2 * end),
                                    product.out, w.rows, add, scratch);
                first -= product.pairs();
                last -= product.pairs();
            }
        });
    });
}

void Forward::rotate_queries(const Layer& layer, int64_t row) {
    const Shape& s = model_.shape;
    float* q = work_.q.data() + row * s.q_size();
    if (!layer.q_bias.empty()) kernels_.add(layer.q_bias.data(), s.q_size(), q);
    if (!layer.q_norm.empty())
        for (int head = 0; head < s.n_heads; ++head)
            kernels_.rms_norm(q + head * s.head_dim, layer.q_norm.data(), s.head_dim, s.rms_eps, q + head * s.head_dim);
    const int64_t pairs = s.rope_dims / 2;
    kernels_.rope(q, s.n_heads, s.head_dim, s.rope_dims, work_.cosines.data() + row * pairs, work_.sines.data() + row * pairs,
                  s.rope_neox, float(1.0 / std::sqrt(double(s.head_dim))));
    if (layout_->k_type != KVType::f16) kernels_.spread(q, s.n_heads, s.head_dim);
}

void Forward::store_keys(const Layer& layer, int index, int64_t row) {
    const Shape& s = model_.shape;
    float *k = work_.k.data() + row * s.kv_size(), *v = work_.v.data() + row * s.kv_size();
    if (!layer.k_bias.empty()) kernels_.add(layer.k_bias.data(), s.kv_size(), k);
    if (!layer.v_bias.empty()) kernels_.add(layer.v_bias.data(), s.kv_size(), v);
    if (!layer.k_norm.empty())
        for (int head = 0; head < s.n_kv_heads; ++head)
            kernels_.rms_norm(k + head * s.head_dim, layer.k_norm.data(), s.head_dim, s.rms_eps, k + head * s.head_dim);
    const int64_t pairs = s.rope_dims / 2;
    kernels_.rope(k, s.n_kv_heads, s.head_dim, s.rope_dims, work_.cosines.data() + row * pairs,
                  work_.sines.data() + row * pairs, s.rope_neox, 1.0f);
    // Queries are spread as keys are, and attended values back again, so nothing but the rounding changes.
    if (layout_->k_type != KVType::f16) kernels_.spread(k, s.n_kv_heads, s.head_dim);
    if (layout_->k_type == KVType::q4_0) kernels_.add(layer.key_shift.data(), s.kv_size(), k);
    if (layout_->v_type != KVType::f16) kernels_.spread(v, s.n_kv_heads, s.head_dim);
    const int position = positions_[size_t(row)], size = layout_->block_size;
    uint8_t* block = arena_ + size_t(tables_[size_t(row)][position / size]) * layout_->block_bytes();
    kernels_.write_kv(*layout_, block, index, position % size, k, v);
}

AttendJob Forward::job_of(const Tile& tile, int layer, int kv_head) const {
    const Shape& s = model_.shape;
    const float* q = work_.q.data() + int64_t(tile.row) * s.q_size() + int64_t(kv_head) * s.group() * s.head_dim;
    return {layout_, arena_, tile.blocks, layer, kv_head, s.group(), tile.tokens, tile.first_position, q, s.q_size()};
}

void Forward::attend(int layer, int thread) {
    const Shape& s = model_.shape;
    const int64_t tiles = int64_t(tiles_.size()), heads = s.n_kv_heads;
    if (!splits_apart_) {
        phase(Phase::attention, thread, tiles * heads, [&](int64_t task) {
            attend_tile(tiles_[size_t(task / heads)], layer, int(task % heads), thread);
        });
        return;
    }
    // Few rows with long contexts: the splits of one row are shared among the threads, and put together afterwards in
    // the same order, by the same operations, as one thread would.
    int64_t tasks = 0;
    for (const Tile& tile : tiles_) tasks += tile.splits * heads;
    const auto states_of = [&](const Tile& tile, int64_t head, int64_t split) {
        const size_t size = size_t(tile.tokens) * s.group() * (s.head_dim + 2);
        return work_.states.data() + tile.states + size_t(head * tile.splits + split) * size;
    };
    phase(Phase::attention, thread, tasks, [&](int64_t task) {
        size_t i = 0;
        while (task >= tiles_[i].splits * heads) task -= tiles_[i++].splits * heads;
        const Tile& tile = tiles_[i];
        const int head = int(task / tile.splits), split = int(task % tile.splits);
        const int end = std::min((split + 1) * kSplit, tile.first_position + tile.tokens);
        kernels_.attend(job_of(tile, layer, head), split * kSplit, end, states_of(tile, head, split),
                        work_.threads[size_t(thread)].attend.data());
    });
    phase(Phase::merge, thread, tiles * heads, [&](int64_t task) {
        const Tile& tile = tiles_[size_t(task / heads)];
        const int64_t head = task % heads;
        float* total = states_of(tile, head, 0);
        for (int split = 1; split < tile.splits; ++split)
            kernels_.merge_states(total, states_of(tile, head, split), int64_t(tile.tokens) * s.group(), s.head_dim);
        put_states(tile, int(head), total);
    });
}

void Forward::attend_tile(const Tile& tile, int layer, int kv_head, int thread) {
    ThreadSpace& own = work_.threads[size_t(thread)];
    const AttendJob job = job_of(tile, layer, kv_head);
    const int end = tile.first_position + tile.tokens;
    kernels_.attend(job, 0, std::min(kSplit, end), own.merged.data(), own.attend.data());
    for (int begin = kSplit; begin < end; begin += kSplit) {
        kernels_.attend(job, begin, std::min(begin + kSplit, end), own.states.data(), own.attend.data());
        kernels_.merge_states(own.merged.data(), own.states.data(), int64_t(tile.tokens) * job.heads,
                              model_.shape.head_dim);
    }
    put_states(tile, kv_head, own.merged.data());
}

void Forward::put_states(const Tile& tile, int kv_head, const float* states) {
    const Shape& s = model_.shape;
    for (int token = 0; token < tile.tokens; ++token)
        for (int head = 0; head < s.group(); ++head) {
            float* out = work_.attended.data() + int64_t(tile.row + token) * s.q_size() +
                         (int64_t(kv_head) * s.group() + head) * s.head_dim;
            kernels_.finish_state(states, s.head_dim, out);
            if (layout_->v_type != KVType::f16) kernels_.spread(out, 1, s.head_dim);
            states += s.head_dim + 2;
        }
}

}  // namespace cllm

#include "forward.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace cllm {

const char* const kPhaseNames[int(Phase::count)] = {
    "norm", "qkv", "rope", "attention", "convolution", "state", "quantise", "output", "gate_up", "down", "head",
};

namespace {

// A product is cut into this many parts per thread, also by rows if there are too few tiles. A part keeps enough rows to be
// worth unpacking its weights.
constexpr int64_t kPartsPerThread = 6;
constexpr int64_t kRowsPerPart = 96;

const Vector kNone;

}  // namespace

double Forward::now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// work(thread, row) for each row; quantised rows that share cache lines are written by one thread.
template <class Work>
void Forward::each_panel(Phase which, Work&& work) {
    const int64_t size = kernels_.own_rows, parts = (rows_ + size - 1) / size;
    timed(which, [&] {
        team_.share(parts, 1, [&](int thread, int64_t first, int64_t last) {
            for (int64_t row = first * size; row < std::min(rows_, last * size); ++row) work(thread, row);
        });
    });
}

std::array<double, size_t(Phase::count)> Forward::take_profile() {
    const auto taken = profile_;
    profile_.fill(0.0);
    return taken;
}

Forward::Forward(const Model& model, Team& team) : model_(model), team_(team), kernels_(model.kernels), work_(model.shape) {
    for (const LayerShape& s : model.shape.layers) {
        if (!s.attends()) {
            walk_of_.push_back(-1);
            continue;
        }
        const auto fits = [&](const Walk& walk) { return walk.fits(s); };
        const auto found = std::find_if(walks_.begin(), walks_.end(), fits);
        walk_of_.push_back(int(found - walks_.begin()));
        if (found == walks_.end()) walks_.push_back({s.group(), s.n_kv_heads, s.head_dim, s.window, {}, {}, false});
    }
}

bool Forward::step(const int32_t* tokens, const std::vector<Chunk>& chunks, const KVMap& map, uint8_t* arena,
                   const StepOutputs& outputs) {
    tokens_ = tokens;
    map_ = &map;
    arena_ = arena;
    abort_.store(false);
    plan_rows(chunks);
    if (rows_ == 0) return true;
    const bool any_dropped = std::any_of(dropped_.begin(), dropped_.end(), [](int dropped) { return dropped > 0; });
    work_.ensure(model_, rows_, team_.size(), any_dropped);
    plan_attention(false);
    rotates_later_ = rows_are_apart();
    const Turn turn(team_);
    embed();
    if (model_.shape.layer_input_size) embed_for_layers();
    for (int layer = 0; layer < model_.shape.n_layers(); ++layer) {
        if (abort_.load(std::memory_order_relaxed)) return false;
        if (!run_layer(layer)) return true;
    }
    if (!logit_rows_.empty()) multiply_head(logit_rows_.data(), int64_t(logit_rows_.size()), outputs.logits);
    if (!pooled_.empty()) pool_rows(outputs.hidden);
    return scored_rows_.empty() || score_rows(outputs);
}

void Forward::plan_rows(const std::vector<Chunk>& chunks) {
    chunks_ = chunks;
    first_rows_.clear();
    positions_.clear();
    dropped_.clear();
    known_.clear();
    tables_.clear();
    wanted_.clear();
    logit_rows_.clear();
    scored_rows_.clear();
    pooled_.clear();
    for (const Chunk& chunk : chunks) {
        first_rows_.push_back(int64_t(positions_.size()));
        for (int i = 0; i < chunk.tokens; ++i) {
            positions_.push_back(chunk.first_position + i);
            dropped_.push_back(chunk.dropped);
            known_.push_back(chunk.known);
            tables_.push_back(chunk.tables);
        }
        const int end = int(positions_.size()), needed = chunk.needed_rows(), first = int(wanted_.size());
        for (int row = end - needed; row < end; ++row) wanted_.push_back(row);
        for (int i = needed - chunk.wanted_logits; i < needed; ++i) logit_rows_.push_back(first + i);
        for (int i = 0; i < chunk.scored; ++i) scored_rows_.push_back(first + i);
        if (chunk.pooling == Pooling::sum) pooled_.push_back({first, first + needed});
        if (chunk.pooling == Pooling::last) pooled_.push_back({first + needed - 1, first + needed});
        // A later chunk adds nothing.
        if (chunk.pooling == Pooling::first) pooled_.push_back({first, first + (chunk.first_position == 0)});
    }
    rows_ = int64_t(positions_.size());
}

void Forward::embed() {
    const int64_t embd = model_.shape.n_embd;
    const float scale = model_.shape.embedding_scale;
    const auto turn = [&](int64_t row, int position, std::vector<Rotations>& to) {
        for (size_t r = 0; r < model_.rotations.size(); ++r) {
            const Turning& turning = model_.rotations[r];
            const size_t pairs = turning.frequencies.size();
            float *cosines = to[r].cosines.data() + size_t(row) * pairs, *sines = to[r].sines.data() + size_t(row) * pairs;
            for (size_t i = 0; i < pairs; ++i) {
                const double angle = position * turning.frequencies[i];
                cosines[i] = float(std::cos(angle) * turning.shape.magnitude);
                sines[i] = float(std::sin(angle) * turning.shape.magnitude);
            }
        }
    };
    each_panel(Phase::norm, [&](int, int64_t row) {
        float* x = work_.x.data() + row * embd;
        unpack_row(model_.token_embd, tokens_[row], x);
        if (scale != 1.0f) kernels_.cap(x, embd, scale, 0.0f);
        const int position = positions_[size_t(row)], dropped = dropped_[size_t(row)];
        turn(row, position + dropped, work_.rotations);
        if (dropped > 0) turn(row, position, work_.sink_rotations);
    });
}

// What each layer gets of each token by itself: an embedding of its own, and a part of the first embedding, projected.
void Forward::embed_for_layers() {
    const int64_t own = model_.shape.layer_input_size, layers = model_.shape.n_layers();
    const float project = float(1.0 / std::sqrt(double(model_.shape.n_embd))), embed = float(std::sqrt(double(own)));
    const float both = float(std::sqrt(0.5));
    multiply({{&model_.layer_proj, work_.layer_inputs.data()}}, normalised({}), false, Phase::norm, Phase::qkv);
    each_panel(Phase::norm, [&](int thread, int64_t row) {
        float* found = work_.threads[size_t(thread)].layer_inputs.data();
        unpack_row(model_.layer_embd, tokens_[row], found);
        float* to = work_.layer_inputs.data() + row * layers * own;
        kernels_.cap(to, layers * own, project, 0.0f);
        for (int64_t layer = 0; layer < layers; ++layer, to += own, found += own) {
            kernels_.rms_norm(to, model_.layer_proj_norm.data(), own, model_.shape.rms_eps, to);
            kernels_.add_scaled(found, own, embed, both, to);
        }
    });
}

// False if the step has no other outputs.
bool Forward::run_layer(int index) {
    const Layer& layer = model_.layers[size_t(index)];
    const LayerShape& s = layer.shape;
    const bool attends = s.attends(), stores = s.stores(), recurs = s.recurrence.has_value();
    if (index == model_.last_stored && int64_t(wanted_.size()) < rows_) {
        // The other rows are needed for K, V and the state only.
        project(layer, {false, stores, recurs});
        if (stores) rotate_and_store(layer, index, false, true);
        if (recurs) recur(index);
        if (wanted_.empty()) return false;
        rotates_later_ = false;
        keep_wanted_rows(layer);
        if (attends) {
            project(layer, {true, false, false});
            rotate_and_store(layer, index, true, false);
        }
    } else {
        if (s.mixes()) project(layer, {attends, stores, recurs});
        if (attends && !rotates_later_) rotate_and_store(layer, index, true, stores);
        if (recurs) recur(index);
    }
    const Shape& shape = model_.shape;
    const float scale = shape.residual_scale;
    if (attends) {
        attend(index);
        join(layer.output, attended(layer), {&layer.output_bias, &layer.post_attn_norm, scale, 1.0f}, Phase::output);
    }
    if (recurs) join(layer.state_out, recurred(layer), {&kNone, &layer.post_attn_norm, scale, 1.0f}, Phase::output);
    if (s.n_ff) feed_forward(layer);
    if (shape.layer_input_size) add_layer_input(layer, index);
    return true;
}

// Queries, keys and values, which are not rotated yet, and what a state is made from. A norm over all heads is applied here:
// later, heads go apart.
void Forward::project(const Layer& layer, Wanted wanted) {
    const LayerShape& s = layer.shape;
    const auto product = [](bool made, const PackedMatrix& weights, const Buffer<float>& to) {
        return Product{made && weights.data ? &weights : nullptr, to.data()};
    };
    multiply({product(wanted.queries, layer.q, s.gated ? work_.gated_q : work_.q), product(wanted.keys, layer.k, work_.k),
              product(wanted.keys, layer.v, work_.v), product(wanted.state, layer.state_in, work_.mixed),
              product(wanted.state, layer.state_gate, work_.state_gate), product(wanted.state, layer.state_alpha, work_.decays),
              product(wanted.state, layer.state_beta, work_.factors)},
             normalised(layer.attn_norm), false, Phase::norm, Phase::qkv);
    if (s.qk_norm != QKNorm::row) return;
    const auto normalise = [&](float* row, int size, const Vector& bias, const Vector& norm) {
        if (!bias.empty()) kernels_.add(bias.data(), size, row);
        kernels_.rms_norm(row, norm.data(), size, model_.shape.rms_eps, row);
    };
    each_panel(Phase::rope, [&](int, int64_t row) {
        if (wanted.queries) normalise(work_.q.data() + row * s.q_size(), s.q_size(), layer.q_bias, layer.q_norm);
        if (wanted.keys) normalise(work_.k.data() + row * s.kv_size(), s.kv_size(), layer.k_bias, layer.k_norm);
    });
}

void Forward::feed_forward(const Layer& layer) {
    const Inputs inputs = normalised(layer.ffn_norm);
    make_shared(inputs, Phase::norm);
    const int64_t groups = (layer.shape.n_ff + 31) / 32, parts = row_parts(groups);
    work_.ff.use_for(layer.shape.n_ff);
    timed(Phase::gate_up, [&] {
        team_.share(
            groups * parts, 1, [&](int thread) { make_own(inputs, thread); },
            [&](int thread, int64_t first, int64_t last) {
                each_part(first, last, parts, [&](int64_t group, int64_t end, Rows rows) {
                    const int64_t at_once = std::max<int64_t>(1, kActivatedFloats / 32 / (rows.last - rows.first));
                    for (; group < end; group += at_once)
                        activate(layer, made(inputs, thread), group, std::min(at_once, end - group), rows, thread);
                });
            });
    });
    const float total = model_.shape.layer_input_size ? 1.0f : layer.total_scale();
    join(layer.down, {nullptr, &Workspace::ff, nullptr}, {&kNone, &layer.post_ffn_norm, model_.shape.residual_scale, total},
         Phase::down);
}

// What the layer gets of each token by itself, gated by what it has computed.
void Forward::add_layer_input(const Layer& layer, int index) {
    multiply({{&layer.input_gate, work_.input_gates.data()}}, normalised({}), false, Phase::norm, Phase::gate_up);
    const auto make = [this, index](int64_t row, ThreadSpace& own, InputBuffer& to) {
        const int64_t width = model_.shape.layer_input_size, place = row * model_.shape.n_layers() + index;
        kernels_.gelu_mul(work_.input_gates.data() + row * width, work_.layer_inputs.data() + place * width, width,
                          own.row.data());
        quantise(own.row.data(), width, row, to);
    };
    join(layer.input_proj, {make, &Workspace::inputs, &ThreadSpace::inputs}, {&kNone, &layer.input_norm, 1.0f, layer.total_scale()},
         Phase::down);
}

void Forward::join(const PackedMatrix& weights, const Inputs& inputs, const Joining& how, Phase which) {
    if (how.plain()) return multiply({{&weights, work_.x.data()}}, inputs, true, Phase::quantise, which);
    const int64_t embd = model_.shape.n_embd;
    multiply({{&weights, work_.branch.data()}}, inputs, false, Phase::quantise, which);
    each_panel(Phase::norm, [&](int, int64_t row) {
        float* given = work_.branch.data() + row * embd;
        if (!how.bias->empty()) kernels_.add(how.bias->data(), embd, given);
        if (!how.norm->empty()) kernels_.rms_norm(given, how.norm->data(), embd, model_.shape.rms_eps, given);
        kernels_.add_scaled(given, embd, how.scale, how.total, work_.x.data() + row * embd);
    });
}

// Some groups of 32 columns of activation(gate) * up, as inputs of the last product. Whole rows never exist as floats, so what
// does exist stays in the cache.
void Forward::activate(const Layer& layer, const InputBuffer& inputs, int64_t first_group, int64_t groups, Rows rows,
                       int thread) {
    constexpr int64_t tiles = 32 / kTileRows;
    const int64_t ff = layer.shape.n_ff, embd = model_.shape.n_embd, first = first_group * 32, width = groups * 32;
    const int64_t n = rows.last - rows.first;
    ThreadSpace& own = work_.threads[size_t(thread)];
    const auto multiply_into = [&](const PackedMatrix& whole, float* out) {
        const PackedMatrix w = whole.part(first_group * tiles, groups * tiles);
        kernels_.matmul(w, inputs.quants.from(rows.first), inputs.floats_from(rows.first, embd), n, 0, w.tiles(), out,
                        width, false, own.matmul.data());
    };
    float* gate = own.gate.data();
    if (layer.shape.activation == Activation::relu2) {
        multiply_into(layer.up, gate);
        kernels_.relu2(gate, n * width, gate);
    } else {
        multiply_into(layer.gate, gate);
        multiply_into(layer.up, own.up.data());
        const bool gelu = layer.shape.activation == Activation::gelu;
        (gelu ? kernels_.gelu_mul : kernels_.silu_mul)(gate, own.up.data(), n * width, gate);
    }
    if (ff % 32 == 0) kernels_.quantise_columns(gate, n, first_group, groups, work_.ff.quants.from(rows.first));
    if (!model_.any_float) return;
    const size_t bytes = size_t(std::min(width, ff - first)) * sizeof(float);
    for (int64_t row = 0; row < n; ++row)
        std::memcpy(work_.ff.floats.data() + (rows.first + row) * ff + first, gate + row * width, bytes);
}

// The rest of the step computes wanted rows only: move them to the front.
void Forward::keep_wanted_rows(const Layer& last_stored) {
    const size_t own = size_t(model_.shape.layer_input_size) * size_t(model_.shape.n_layers());
    const auto move = [](Buffer<float>& rows, size_t from, size_t to, size_t width) {
        std::memmove(rows.data() + to * width, rows.data() + from * width, width * sizeof(float));
    };
    const auto move_recurred = [&](const RecurrenceShape& s, size_t from, size_t to) {
        const size_t values = size_t(s.values());
        move(work_.recurred, from, to, values);
        if (s.kind == RecurrenceShape::Kind::delta_net) move(work_.state_gate, from, to, values);
        if (s.kind == RecurrenceShape::Kind::mamba2) move(work_.mixed, from, to, size_t(s.input_size()));
    };
    const auto move_rotations = [&](std::vector<Rotations>& all, size_t from, size_t to) {
        for (size_t r = 0; r < all.size(); ++r) {
            const size_t pairs = model_.rotations[r].frequencies.size();
            move(all[r].cosines, from, to, pairs);
            move(all[r].sines, from, to, pairs);
        }
    };
    for (size_t i = 0; i < wanted_.size(); ++i) {
        const size_t from = size_t(wanted_[i]);  // never before i, so nothing that is still needed is overwritten
        move(work_.x, from, i, size_t(model_.shape.n_embd));
        if (own) move(work_.layer_inputs, from, i, own);
        if (last_stored.shape.recurrence) move_recurred(*last_stored.shape.recurrence, from, i);
        move_rotations(work_.rotations, from, i);
        if (dropped_[from] > 0) move_rotations(work_.sink_rotations, from, i);
        dropped_[i] = dropped_[from];
        positions_[i] = positions_[from];
        wanted_[i] = int(i);
    }
    rows_ = int64_t(wanted_.size());
    plan_attention(true);
}

// --- products and their inputs ---

// For all rows, or for the listed ones. Without weights, they are taken as they are.
Forward::Inputs Forward::normalised(const Vector& weight, const int* rows) {
    const float* factors = weight.empty() ? nullptr : weight.data();
    listed_ = rows;  // a third capture would be memory from the heap in every layer
    const auto make = [this, factors](int64_t row, ThreadSpace& own, InputBuffer& to) {
        const int64_t embd = model_.shape.n_embd, from = listed_ ? listed_[row] : row;
        const float* x = work_.x.data() + from * embd;
        if (!factors) return quantise(x, embd, row, to);
        kernels_.rms_norm(x, factors, embd, model_.shape.rms_eps, own.row.data());
        quantise(own.row.data(), embd, row, to);
    };
    return {make, &Workspace::embd, &ThreadSpace::embd};
}

Forward::Inputs Forward::attended(const Layer& layer) {
    const int64_t size = layer.shape.q_size();
    work_.use_heads_for(size);
    const auto make = [this, size](int64_t row, ThreadSpace&, InputBuffer& to) {
        quantise(work_.attended.data() + row * size, size, row, to);
    };
    return {make, &Workspace::heads, &ThreadSpace::heads};
}

void Forward::quantise(const float* row, int64_t cols, int64_t at, InputBuffer& to) {
    if (cols % 32 == 0) kernels_.quantise_row(row, at, to.quants);
    if (model_.any_float) std::memcpy(to.floats.data() + at * cols, row, size_t(cols) * sizeof(float));
}

void Forward::make_shared(const Inputs& inputs, Phase which) {
    if (few() || !inputs.make) return;
    each_panel(which, [&](int thread, int64_t row) {
        inputs.make(row, work_.threads[size_t(thread)], work_.*inputs.shared);
    });
}

void Forward::make_own(const Inputs& inputs, int thread) {
    if (!few() || !inputs.make) return;
    ThreadSpace& own = work_.threads[size_t(thread)];
    for (int64_t row = 0; row < rows_; ++row) inputs.make(row, own, own.*inputs.own);
}

const InputBuffer& Forward::made(const Inputs& inputs, int thread) const {
    return few() && inputs.make ? work_.threads[size_t(thread)].*inputs.own : work_.*inputs.shared;
}

// Into how many parts the rows are cut, where there are `units` of tiles.
int64_t Forward::row_parts(int64_t units) const {
    const int64_t wanted = (kPartsPerThread * team_.size() + units - 1) / units;
    return std::max<int64_t>(1, std::min(wanted, rows_ / kRowsPerPart));
}

// The items [first, last) of units x row parts: work(first unit, last unit, rows).
template <class Work>
void Forward::each_part(int64_t first, int64_t last, int64_t parts, Work&& work) const {
    if (parts == 1) return work(first, last, Rows{0, rows_});
    const int64_t panel = kernels_.panel_rows, size = (rows_ + parts * panel - 1) / (parts * panel) * panel;
    while (first < last) {
        const int64_t unit = first / parts, part = first % parts, next = std::min(last, (unit + 1) * parts);
        const Rows rows{std::min(rows_, part * size), std::min(rows_, (part + next - first) * size)};
        if (rows.first < rows.last) work(unit, unit + 1, rows);
        first = next;
    }
}

void Forward::multiply(std::initializer_list<Product> products, const Inputs& inputs, bool add, Phase making, Phase which) {
    make_shared(inputs, making);
    // Kernels are fastest with several tiles at a time: two, or four with few rows.
    const int64_t unit = few() ? 1 : 2, grain = few() ? 4 : 1;
    const auto units_of = [&](const Product& product) {
        return product.weights ? (product.weights->tiles() + unit - 1) / unit : 0;
    };
    int64_t units = 0;
    for (const Product& product : products) units += units_of(product);
    const int64_t parts = row_parts(units);
    const auto work = [&](int thread, int64_t begin, int64_t end) {
        each_part(begin, end, parts, [&](int64_t first, int64_t last, Rows rows) {
            for (const Product& product : products) {
                const int64_t own = units_of(product), from = std::max<int64_t>(0, first), to = std::min(own, last);
                if (from < to) multiply_tiles(product, made(inputs, thread), unit * from, unit * to, rows, add, thread);
                first -= own;
                last -= own;
            }
        });
    };
    timed(which, [&] { team_.share(units * parts, grain, [&](int thread) { make_own(inputs, thread); }, work); });
}

void Forward::multiply_tiles(const Product& product, const InputBuffer& inputs, int64_t first_tile, int64_t last_tile,
                             Rows rows, bool add, int thread) {
    const PackedMatrix& w = *product.weights;
    kernels_.matmul(w, inputs.quants.from(rows.first), inputs.floats_from(rows.first, w.cols), rows.last - rows.first,
                    first_tile, std::min(w.tiles(), last_tile), product.out + rows.first * w.rows, w.rows, add,
                    work_.threads[size_t(thread)].matmul.data());
}

}  // namespace cllm

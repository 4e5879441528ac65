// The engine as Python sees it; src/cllm/_native.pyi says what each call does.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "block_moves.h"
#include "bus_error.h"
#include "dispatch.h"
#include "forward.h"
#include "key_shifts.h"
#include "kv_map.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cllm {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NewInts = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewIntTable = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DoubleTable = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Of some layers: in which cell, and from which byte on, each part of the layer's state lies.
using Places = std::vector<std::pair<int, std::vector<std::pair<int, int64_t>>>>;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

std::string number(int64_t value) { return std::to_string(value); }

KVType kv_type(const std::string& name) {
    if (name == "f16") return KVType::f16;
    if (name == "q8_0") return KVType::q8_0;
    if (name == "q4_0") return KVType::q4_0;
    refuse("there is no K/V type " + name);
}

template <class T>
T field(const nb::handle& record, const char* name) {
    return nb::cast<T>(record.attr(name));
}

std::optional<RotationShape> read_rotation(const nb::handle& rotation) {
    if (rotation.is_none()) return std::nullopt;
    const auto divisors = field<std::optional<std::vector<double>>>(rotation, "divisors");
    return RotationShape{field<double>(rotation, "base"),  field<int>(rotation, "dims"),
                         field<bool>(rotation, "neox"),    field<double>(rotation, "scale"),
                         divisors.value_or(std::vector<double>()), field<double>(rotation, "magnitude")};
}

void read_attention(const nb::handle& attention, LayerShape& layer) {
    layer.n_heads = field<int>(attention, "n_heads");
    layer.n_kv_heads = field<int>(attention, "n_kv_heads");
    layer.head_dim = field<int>(attention, "head_dim_k");
    const int head_dim_v = field<int>(attention, "head_dim_v");
    if (head_dim_v != layer.head_dim)
        refuse("values of " + number(head_dim_v) + " dimensions beside keys of " + number(layer.head_dim) + " are not supported");
    layer.rotation = read_rotation(attention.attr("rotation"));
    const auto norm = field<std::string>(attention, "qk_norm");
    if (norm == "head") layer.qk_norm = QKNorm::head;
    else if (norm == "row") layer.qk_norm = QKNorm::row;
    else if (!norm.empty()) refuse("there is no qk_norm " + norm);
    layer.norm_last = field<bool>(attention, "qk_norm_last");
    if (layer.norm_last && layer.qk_norm != QKNorm::head) refuse("qk_norm_last is not supported with qk_norm " + norm);
    layer.v_norm = field<bool>(attention, "v_norm");
    layer.v_is_k = field<bool>(attention, "v_is_k");
    if (layer.v_is_k && (layer.qk_norm == QKNorm::row || field<bool>(attention, "qkv_bias")))
        refuse("v_is_k is not supported with biases, or with a norm over all heads");
    layer.output_bias = field<bool>(attention, "output_bias");
    layer.sinks = field<bool>(attention, "sinks");
    layer.gated = field<bool>(attention, "gated");
    if (layer.gated && field<bool>(attention, "qkv_bias")) refuse("gated attention is not supported with biases");
    layer.scale = float(field<std::optional<double>>(attention, "scale").value_or(1.0 / std::sqrt(double(layer.head_dim))));
    const int window = field<int>(attention, "window");
    layer.window = window ? window : kNoWindow;
    layer.softcap = float(field<double>(attention, "softcap"));
    const auto kv_from = field<std::optional<int>>(attention, "kv_from");
    if (kv_from && *kv_from < 0) refuse("kv_from is " + number(*kv_from));
    layer.kv_from = kv_from.value_or(-1);
    const nb::object temperature = attention.attr("temperature");
    if (temperature.is_none()) return;
    layer.temperature = float(field<double>(temperature, "beta"));
    layer.temperature_context = field<int>(temperature, "context");
}

// A cllm.models.spec.RecurrenceSpec.
std::optional<RecurrenceShape> read_recurrence(const nb::handle& recurrence) {
    if (recurrence.is_none()) return std::nullopt;
    const auto kind = field<std::string>(recurrence.type(), "__name__");
    RecurrenceShape found;
    found.kernel = field<int>(recurrence, "kernel");
    if (kind == "ShortConvSpec") {
        found.value_dim = field<int>(recurrence, "size");
    } else if (kind == "DeltaNetSpec") {
        found.kind = RecurrenceShape::Kind::delta_net;
        found.n_heads = field<int>(recurrence, "n_v_heads");
        found.value_dim = field<int>(recurrence, "head_dim_v");
        found.n_groups = field<int>(recurrence, "n_k_heads");
        found.key_dim = field<int>(recurrence, "head_dim_k");
        found.tiled = field<bool>(recurrence, "tiled");
    } else if (kind == "Mamba2Spec") {
        found.kind = RecurrenceShape::Kind::mamba2;
        found.n_heads = field<int>(recurrence, "n_heads");
        found.value_dim = field<int>(recurrence, "head_dim");
        found.n_groups = field<int>(recurrence, "n_groups");
        found.key_dim = field<int>(recurrence, "state_size");
        found.norm = field<bool>(recurrence, "norm");
    } else {
        refuse("there is no recurrence " + kind);
    }
    return found;
}

void read_feed_forward(const nb::handle& feed_forward, LayerShape& layer) {
    layer.n_ff = field<int>(feed_forward, "size");
    if (layer.n_ff < 1) refuse("n_ff is " + number(layer.n_ff));
    const auto activation = field<std::string>(feed_forward, "activation");
    if (activation == "gelu") layer.activation = Activation::gelu;
    else if (activation == "relu2") layer.activation = Activation::relu2;
    else if (activation != "silu") refuse("there is no activation " + activation);
    if (field<bool>(feed_forward, "gated") == (activation == "relu2"))
        refuse("a feed-forward with " + activation + " is supported only with" + (activation == "relu2" ? "out" : "") + " a gate");
}

LayerShape read_layer(const nb::handle& layer) {
    LayerShape found;
    const nb::object attention = layer.attr("attention"), feed_forward = layer.attr("feed_forward");
    if (!attention.is_none()) {
        read_attention(attention, found);
        if (!found.attends()) refuse("n_heads is " + number(found.n_heads));
    }
    found.recurrence = read_recurrence(layer.attr("recurrence"));
    if (!feed_forward.is_none()) read_feed_forward(feed_forward, found);
    const auto norms = field<std::string>(layer, "norms");
    if (norms != "before" && norms != "after" && norms != "both") refuse("there are no norms " + norms);
    found.norm_before = norms != "after";
    found.norm_after = norms != "before";
    found.output_scale = field<bool>(layer, "output_scale");
    return found;
}

// A cllm.models.spec.ModelSpec.
Shape read_shape(const nb::handle& spec) {
    Shape shape{field<int>(spec, "n_embd"), field<int>(spec, "n_vocab"), float(field<double>(spec, "rms_eps")), {}};
    for (const nb::handle layer : spec.attr("layers")) shape.layers.push_back(read_layer(layer));
    shape.embedding_scale = float(field<double>(spec, "embedding_scale"));
    shape.residual_scale = float(field<double>(spec, "residual_scale"));
    shape.logit_scale = float(field<double>(spec, "logit_scale"));
    shape.logit_softcap = float(field<double>(spec, "logit_softcap"));
    shape.layer_input_size = field<int>(spec, "layer_input_size");
    return shape;
}

class Engine {
public:
    Engine(const std::string& instruction_set, int threads, const Shape& shape)
        : team_(threads), model_(shape, select_kernels(instruction_set), team_), forward_(model_, team_) {}

    std::string instruction_set() const { return model_.kernels.name; }
    int threads() const { return team_.size(); }
    size_t weight_bytes() const { return model_.weight_bytes(); }
    size_t kv_bytes() const { return arena_->size(); }

    void load(int layer, const std::string& role, int type, int64_t rows, int64_t cols, const Bytes& data,
              std::optional<int64_t> first_row) {
        if (first_row && *first_row < 0) refuse("first_row is " + number(*first_row));
        model_.load(layer, role, GgmlType(type), rows, cols, data.data(), data.size(), first_row.value_or(Model::kWhole));
    }
    void seal() { model_.seal(); }

    void allocate(int64_t cells, int block_size, const std::string& type_k, const std::string& type_v, int64_t cell_bytes,
                  const std::vector<std::pair<std::vector<int>, int>>& groups, int state_cells, const Places& states,
                  bool large_pages) {
        if (cells < 1 || cells > INT32_MAX) refuse("cells is " + number(cells));
        if (cell_bytes < 0) refuse("cell_bytes is " + number(cell_bytes));
        std::vector<KVGroup> wanted;
        for (const auto& [layers, of_block] : groups) wanted.push_back({layers, of_block, 0});
        KVMap map = map_kv(model_.shape, block_size, kv_type(type_k), kv_type(type_v), size_t(cell_bytes), std::move(wanted),
                           read_places(state_cells, states));
        if (map.k_type == KVType::q4_0 && !model_.keys_are_shifted) {
            require_sealed();
            learn_key_shifts(model_, forward_);
        }
        if (size_t(cells) > (size_t(1) << 46) / map.cell_bytes) throw std::bad_alloc();
        arena_ = std::make_shared<Region>();
        arena_ = std::make_shared<Region>(size_t(cells) * map.cell_bytes, large_pages ? Pages::large : Pages::usual);
        map_ = std::move(map);
        cells_ = cells;
        written_in_.assign(map_.states.cells ? size_t(cells) : 0, 0);
        step_ = 0;
    }

    bool step(const Ints& tokens, const IntTable& chunks, const Ints& blocks, const FloatTable& logits) {
        require_ready();
        read_chunks(tokens, chunks, blocks, logits);
        return forward_.step(tokens.data(), chunks_, map_, arena_->data(), {logits.data()});
    }

    bool read_prompts(const Ints& tokens, const IntTable& chunks, const Ints& blocks, const FloatTable& logits,
                      const IntTable& wants, const Ints& targets, const Doubles& logprobs, const NewInts& ranks,
                      const NewIntTable& top_ids, const DoubleTable& top_logprobs, const DoubleTable& hidden) {
        require_ready();
        read_chunks(tokens, chunks, blocks, logits);
        read_wants(wants, targets, hidden);
        const size_t scored = targets.size(), top = top_ids.shape(1);
        if (logprobs.size() != scored || ranks.size() != scored || top_ids.shape(0) != scored ||
            top_logprobs.shape(0) != scored || top_logprobs.shape(1) != top)
            refuse("there are " + number(scored) + " targets, and room for another number of scores");
        const StepOutputs outputs{logits.data(), targets.data(), int(top),          logprobs.data(),
                                  ranks.data(),  top_ids.data(), top_logprobs.data(), hidden.data()};
        return forward_.step(tokens.data(), chunks_, map_, arena_->data(), outputs);
    }
    void abort() { forward_.abort(); }

    void copy_blocks(const IntTable& pairs) {
        require_ready();
        if (pairs.shape(1) != 2) refuse("pairs has rows of " + number(pairs.shape(1)) + ", not 2");
        std::vector<BlockMove> copies;
        copies.reserve(pairs.shape(0));
        for (size_t i = 0; i < pairs.shape(0) * 2; ++i) check_block(pairs.data()[i]);
        for (size_t i = 0; i < pairs.shape(0); ++i) copies.push_back({pairs.data()[i * 2], pairs.data()[i * 2 + 1], 1});
        mover_.move(copies.data(), copies.size(), arena_->data(), map_.cell_bytes, cells_, team_);
    }

    void move_blocks(const IntTable& moves) {
        require_ready();
        if (moves.shape(1) != 3) refuse("moves has rows of " + number(moves.shape(1)) + ", not 3");
        std::vector<BlockMove> checked;
        checked.reserve(moves.shape(0));
        int64_t total = 0;
        for (size_t i = 0; i < moves.shape(0); ++i) {
            const int32_t* move = moves.data() + i * 3;
            check_run(move[0], move[2]);
            check_run(move[1], move[2]);
            total += move[2];
            checked.push_back({move[0], move[1], move[2]});
        }
        if (total > INT32_MAX) refuse("the moves have " + number(total) + " blocks together");
        mover_.move(checked.data(), checked.size(), arena_->data(), map_.cell_bytes, cells_, team_);
    }
    void release_pages(int64_t first, int64_t count) {
        require_ready();
        check_run(first, count);
        arena_->release(size_t(first) * map_.cell_bytes, size_t(count) * map_.cell_bytes);
    }
    void prepare_pages(int64_t first, int64_t count) {
        require_ready();
        check_run(first, count);
        arena_->prepare(size_t(first) * map_.cell_bytes, size_t(count) * map_.cell_bytes, team_);
    }
    size_t resident_bytes() const {
        require_ready();
        return arena_->resident();
    }

    // All blocks as bytes. The memory stays valid while this view exists, also after `allocate`.
    nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> memory() const {
        require_ready();
        nb::capsule owner(new std::shared_ptr<Region>(arena_),
                          [](void* p) noexcept { delete static_cast<std::shared_ptr<Region>*>(p); });
        return {arena_->data(), {size_t(cells_), map_.cell_bytes}, owner};
    }

    void set_profiling(bool on) { forward_.set_profiling(on); }
    std::map<std::string, double> profile() {
        const auto seconds = forward_.take_profile();
        std::map<std::string, double> named;
        for (int i = 0; i < int(Phase::count); ++i) named[kPhaseNames[i]] = seconds[size_t(i)];
        return named;
    }

private:
    StateMap read_places(int cells, const Places& states) const {
        StateMap found{cells, std::vector<std::vector<StatePlace>>(size_t(model_.shape.n_layers()))};
        for (const auto& [layer, places] : states) {
            if (layer < 0 || layer >= model_.shape.n_layers()) refuse("there is no layer " + number(layer));
            for (const auto& [cell, offset] : places) {
                if (offset < 0) refuse("a part of a state lies at byte " + number(offset));
                found.places[size_t(layer)].push_back({cell, size_t(offset)});
            }
        }
        return found;
    }

    void require_sealed() const {
        if (!model_.sealed()) refuse("the model is not sealed");
    }
    void require_ready() const {
        require_sealed();
        if (!arena_->data()) refuse("no K/V memory is allocated");
    }
    void check_block(int32_t block) const {
        if (block < 0 || block >= cells_) refuse("block " + number(block) + " is not one of " + number(cells_));
    }

    void check_run(int64_t first, int64_t count) const {
        if (first < 0 || count < 0 || count > cells_ - first)
            refuse(number(count) + " blocks from " + number(first) + " on are not among " + number(cells_));
    }

    void read_chunks(const Ints& tokens, const IntTable& table, const Ints& blocks, const FloatTable& logits) {
        const size_t groups = map_.groups.size(), columns = 4 + 2 * groups + (groups > 1) + (map_.states.cells ? 2 : 0);
        if (table.shape(1) != columns) refuse("chunks has rows of " + number(table.shape(1)) + ", not " + number(columns));
        chunks_.clear();
        tables_.resize(table.shape(0) * groups);
        int64_t n_tokens = 0, n_entries = 0, n_logits = 0;
        for (size_t i = 0; i < table.shape(0); ++i) {
            const int32_t* row = table.data() + i * columns;
            if (row[0] < 1 || row[1] < 0 || row[3] < 0 || row[4] < 0 || row[5] < 0) refuse("chunk " + number(i) + " has a negative number or no token");
            if (row[5] % kTileTokens || row[5] > row[1] || int64_t(row[4]) + row[1] + row[0] > INT32_MAX)
                refuse("chunk " + number(i) + " at position " + number(row[1]) + " cannot keep " + number(row[5]) +
                       " and drop " + number(row[4]) + " tokens before it");
            if (row[2] < 0 || row[2] > row[0])
                refuse("chunk " + number(i) + " of " + number(row[0]) + " tokens wants " + number(row[2]) + " rows of logits");
            if (row[4] > 0 && (model_.shape.any_window() || model_.shape.recurrent()))
                refuse("chunk " + number(i) + " drops tokens, which layers with a window or a state do not allow");
            KVTable* const tables = tables_.data() + i * groups;
            chunks_.push_back({row[0], row[1], row[2], tables, row[4], row[5]});
            if (groups > 1) chunks_.back().known = row[4 + 2 * groups];
            for (size_t group = 0; group < groups; ++group) {
                const int first = group ? row[4 + 2 * group] : 0, count = group ? row[5 + 2 * group] : row[3];
                n_entries = read_table(chunks_.back(), map_.groups[group], blocks, n_entries, first, count, tables[group]);
            }
            if (map_.states.cells) n_entries = read_state(chunks_.back(), row[columns - 2], row[columns - 1], blocks, n_entries);
            n_tokens += row[0];
            n_logits += row[2];
        }
        if (map_.states.cells) check_states();
        if (n_tokens != int64_t(tokens.size())) refuse("chunks have " + number(n_tokens) + " tokens, tokens " + number(tokens.size()));
        if (n_entries != int64_t(blocks.size())) refuse("chunks have " + number(n_entries) + " blocks, blocks " + number(blocks.size()));
        if (int64_t(logits.shape(0)) < n_logits || int64_t(logits.shape(1)) != model_.shape.n_vocab)
            refuse("logits is " + number(logits.shape(0)) + " x " + number(logits.shape(1)) + ", needed are " + number(n_logits) +
                   " x " + number(model_.shape.n_vocab));
        check_tokens(tokens);
    }

    // A chunk's table for one group, which begins at entry `begin` of `blocks`; returns where it ends. Entries of blocks that
    // no layer reads may hold anything.
    int64_t read_table(const Chunk& chunk, const KVGroup& group, const Ints& blocks, int64_t begin, int64_t first, int64_t count,
                       KVTable& table) const {
        const int64_t end_position = int64_t(chunk.first_position) + chunk.tokens;
        if (first < 0 || count < 0) refuse("a table begins at block " + number(first) + " and has " + number(count));
        if (!group.layers.empty() && (first + count) * map_.block_size < end_position)
            refuse("a chunk ends at position " + number(end_position) + ", its blocks " + number(first) + " to " +
                   number(first + count) + " end at " + number((first + count) * map_.block_size));
        int64_t needed = group.layers.empty() ? first : map_.first_block(group, chunk.first_position);
        // Windows that are computed again begin somewhere.
        if (group.window > 0 && chunk.first_position < chunk.known)
            needed = std::max(needed, std::min(first, int64_t(chunk.first_position / map_.block_size)));
        const int64_t end = begin + count * group.cells;
        if (first > needed) refuse("a table begins at block " + number(first) + ", behind block " + number(needed));
        if (end > int64_t(blocks.size())) refuse("blocks has only " + number(blocks.size()) + " numbers");
        table = {blocks.data() + begin, int(first)};
        for (int64_t i = begin + (needed - first) * group.cells; i < end; ++i) check_block(blocks.data()[i]);
        return end;
    }

    // The cells of a chunk's state, at entry `begin` of `blocks`; returns where they end.
    int64_t read_state(Chunk& chunk, int64_t read, int64_t write, const Ints& blocks, int64_t begin) const {
        const int64_t cells = map_.states.cells, end = begin + read + write;
        if (read != (chunk.first_position > 0 ? cells : 0) || write != cells)
            refuse("a chunk at position " + number(chunk.first_position) + " reads a state of " + number(read) + " cells and writes " +
                   number(write) + ", where a state has " + number(cells));
        if (end > int64_t(blocks.size())) refuse("blocks has only " + number(blocks.size()) + " numbers");
        for (int64_t i = begin; i < end; ++i) check_block(blocks.data()[i]);
        chunk.state = {read ? blocks.data() + begin : nullptr, blocks.data() + begin + read};
        return end;
    }

    // No cell that a chunk's state is written to is another's, or is read.
    void check_states() {
        ++step_;
        const auto each_cell = [&](const int32_t* cells, const auto& check) {
            for (int i = 0; cells && i < map_.states.cells; ++i)
                if (!check(written_in_[size_t(cells[i])])) refuse("cell " + number(cells[i]) + " is used by two states of a step");
        };
        for (const Chunk& chunk : chunks_)
            each_cell(chunk.state.write, [&](uint64_t& step) { return step != step_ && (step = step_); });
        for (const Chunk& chunk : chunks_)
            each_cell(chunk.state.read, [&](uint64_t& step) { return step != step_; });
    }

    // `wants` has a row per chunk: how many of its first tokens to score, and which hidden states to return.
    void read_wants(const IntTable& wants, const Ints& targets, const DoubleTable& hidden) {
        if (wants.shape(0) != chunks_.size() || wants.shape(1) != 2)
            refuse("wants is " + number(wants.shape(0)) + " x " + number(wants.shape(1)) + ", needed are " +
                   number(chunks_.size()) + " x 2");
        int64_t scored = 0, pooled = 0;
        for (size_t i = 0; i < chunks_.size(); ++i) {
            const int32_t* row = wants.data() + i * 2;
            if (row[0] < 0 || row[0] > chunks_[i].tokens)
                refuse("chunk " + number(i) + " of " + number(chunks_[i].tokens) + " tokens wants " + number(row[0]) + " scores");
            if (row[1] < int(Pooling::none) || row[1] > int(Pooling::first)) refuse("there is no pooling " + number(row[1]));
            chunks_[i].scored = row[0];
            chunks_[i].pooling = Pooling(row[1]);
            scored += row[0];
            pooled += row[1] != int(Pooling::none);
        }
        if (scored != int64_t(targets.size())) refuse(number(scored) + " scores are wanted, of " + number(targets.size()) + " targets");
        if (int64_t(hidden.shape(0)) != pooled || int64_t(hidden.shape(1)) != model_.shape.n_embd)
            refuse("hidden is " + number(hidden.shape(0)) + " x " + number(hidden.shape(1)) + ", needed are " + number(pooled) +
                   " x " + number(model_.shape.n_embd));
        check_tokens(targets);
    }

    void check_tokens(const Ints& tokens) const {
        for (size_t i = 0; i < tokens.size(); ++i)
            if (tokens.data()[i] < 0 || tokens.data()[i] >= model_.shape.n_vocab)
                refuse("token " + number(tokens.data()[i]) + " is not one of " + number(model_.shape.n_vocab));
    }

    Team team_;
    Model model_;
    Forward forward_;
    std::shared_ptr<Region> arena_ = std::make_shared<Region>();  // kept alive by every view
    BlockMover mover_;
    KVMap map_;
    int64_t cells_ = 0;
    std::vector<KVTable> tables_;  // of each chunk, of each group
    std::vector<uint64_t> written_in_;  // of each cell: the last step that wrote a state to it
    uint64_t step_ = 0;
    std::vector<Chunk> chunks_;
};

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
    return names;
}

using NewTable = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

NewTable new_table(int64_t rows, int64_t cols) {
    float* out = new float[size_t(rows * cols)];
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return {out, {size_t(rows), size_t(cols)}, owner};
}

PackedMatrix pack(int type, int64_t rows, int64_t cols, const Bytes& data, Buffer<uint8_t>& packed) {
    if (rows < 1 || cols < 1 || rows > (1 << 22) || cols > (1 << 22)) refuse("the matrix has an impossible size");
    PackedMatrix form = packed_form(GgmlType(type), rows, cols);
    if (data.size() != raw_row_bytes(GgmlType(type), cols) * size_t(rows)) refuse("data has another size than the matrix");
    packed.ensure(form.bytes());
    if (!pack_tiles(GgmlType(type), data.data(), form, packed.data(), 0, form.tiles())) refuse("values are not finite");
    form.data = packed.data();
    return form;
}

// A matrix packed and unpacked again: its weights as the kernels see them.
NewTable pack_roundtrip(int type, int64_t rows, int64_t cols, const Bytes& data) {
    Buffer<uint8_t> packed;
    const PackedMatrix matrix = pack(type, rows, cols, data, packed);
    NewTable out = new_table(rows, cols);
    for (int64_t row = 0; row < rows; ++row) unpack_row(matrix, row, out.data() + row * cols);
    return out;
}

NewTable product(const std::string& instruction_set, int type, int64_t rows, int64_t cols, const Bytes& data,
                 const FloatTable& inputs) {
    const Kernels& kernels = select_kernels(instruction_set);
    Buffer<uint8_t> packed, scratch;
    const PackedMatrix matrix = pack(type, rows, cols, data, packed);
    const int64_t n = int64_t(inputs.shape(0));
    if (int64_t(inputs.shape(1)) != cols) refuse("the inputs have another length than the matrix has columns");
    InputBuffer made;
    made.ensure(n, cols, kernels.panel_rows, false);
    for (int64_t row = 0; matrix.quantised() && row < n; ++row) kernels.quantise_row(inputs.data() + row * cols, row, made.quants);
    scratch.ensure(matmul_scratch_bytes(cols));
    NewTable out = new_table(n, rows);
    kernels.matmul(matrix, made.quants, inputs.data(), n, 0, matrix.tiles(), out.data(), rows, false, scratch.data());
    return out;
}

int64_t checked_length(size_t length) {
    if (length < 1 || length > (1 << 24)) refuse("a row has " + number(int64_t(length)) + " values");
    return int64_t(length);
}

double checked_peak(double peak) {
    if (!std::isfinite(peak)) refuse("the largest value is not finite");
    return peak;
}

int64_t argmax(const RowSampler& sampler, const Floats& values) {
    return sampler.argmax(values.data(), checked_length(values.size()));
}

nb::ndarray<nb::numpy, float, nb::ndim<1>> masked(const RowSampler& sampler, const Floats& values, const Ints& mask) {
    const int64_t length = checked_length(values.size());
    const int64_t words = int64_t(mask.size());
    if (words * 32 < length) refuse("a mask of " + number(words) + " words is too short for " + number(length) + " values");
    auto* out = new float[size_t(length)];
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    {
        nb::gil_scoped_release no_gil;
        sampler.apply_mask(values.data(), length, mask.data(), out);
    }
    return {out, {size_t(length)}, owner};
}

int64_t draw(const RowSampler& sampler, const Floats& values, double peak, double u, double temperature, int64_t top_k,
             double top_p, double min_p) {
    return sampler.draw(values.data(), checked_length(values.size()), checked_peak(peak), u, {temperature, top_k, top_p, min_p});
}

double log_total(const RowSampler& sampler, const Floats& values, double peak) {
    return sampler.log_total(values.data(), checked_length(values.size()), checked_peak(peak));
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> largest(const RowSampler& sampler, const Floats& values, int64_t count) {
    if (count < 1) refuse("count is " + number(count));
    auto* ids = new std::vector<int64_t>();
    nb::capsule owner(ids, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
    const int64_t length = checked_length(values.size());
    {
        nb::gil_scoped_release no_gil;
        *ids = sampler.largest(values.data(), length, count);
    }
    return {ids->data(), {ids->size()}, owner};
}

}  // namespace
}  // namespace cllm

NB_MODULE(_native, m) {
    using namespace cllm;
    // No leak warnings at exit: the OS frees everything.
    nb::set_leak_warnings(false);
    const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
    m.def("instruction_sets", &instruction_sets);
    m.def("end_on_bus_error", &end_on_bus_error, "line"_a, "exit_code"_a);
    m.def("pack_roundtrip", &pack_roundtrip, "ggml_type"_a, "rows"_a, "cols"_a, "data"_a);
    m.def("product", &product, "instruction_set"_a, "ggml_type"_a, "rows"_a, "cols"_a, "data"_a, "inputs"_a);
    nb::class_<RowSampler>(m, "RowSampler")
        .def(
            "__init__",
            [](RowSampler* self, const std::string& instruction_set) { new (self) RowSampler(select_kernels(instruction_set)); },
            "instruction_set"_a)
        .def("argmax", &argmax, "values"_a, no_gil)
        .def("masked", &masked, "values"_a, "mask"_a)
        .def("draw", &draw, "values"_a, "peak"_a, "u"_a, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, no_gil)
        .def("log_total", &log_total, "values"_a, "peak"_a, no_gil)
        .def("largest", &largest, "values"_a, "count"_a);
    nb::class_<Engine>(m, "Engine")
        .def(
            "__init__",
            [](Engine* self, const std::string& instruction_set, int threads, const nb::object& spec) {
                new (self) Engine(instruction_set, threads, read_shape(spec));
            },
            nb::kw_only(), "instruction_set"_a, "threads"_a, "spec"_a)
        .def_prop_ro("instruction_set", &Engine::instruction_set)
        .def_prop_ro("threads", &Engine::threads)
        .def_prop_ro("weight_bytes", &Engine::weight_bytes)
        .def_prop_ro("kv_bytes", &Engine::kv_bytes)
        .def("load", &Engine::load, "layer"_a, "role"_a, "ggml_type"_a, "rows"_a, "cols"_a, "data"_a,
             "first_row"_a = nb::none(), no_gil)
        .def("seal", &Engine::seal)
        .def("allocate", &Engine::allocate, nb::kw_only(), "cells"_a, "block_size"_a, "type_k"_a, "type_v"_a,
             "cell_bytes"_a = 0, "groups"_a = nb::list(), "state_cells"_a = 0, "states"_a = nb::list(), "large_pages"_a = true,
             no_gil)
        .def("step", &Engine::step, "tokens"_a, "chunks"_a, "blocks"_a, "logits"_a.noconvert(), no_gil)
        .def("read_prompts", &Engine::read_prompts, "tokens"_a, "chunks"_a, "blocks"_a, "logits"_a.noconvert(), "wants"_a,
             "targets"_a, "logprobs"_a.noconvert(), "ranks"_a.noconvert(), "top_ids"_a.noconvert(),
             "top_logprobs"_a.noconvert(), "hidden"_a.noconvert(), no_gil)
        .def("abort", &Engine::abort)
        .def("copy_blocks", &Engine::copy_blocks, "pairs"_a, no_gil)
        .def("move_blocks", &Engine::move_blocks, "moves"_a, no_gil)
        .def("release_pages", &Engine::release_pages, "first"_a, "count"_a, no_gil)
        .def("prepare_pages", &Engine::prepare_pages, "first"_a, "count"_a, no_gil)
        .def("resident_bytes", &Engine::resident_bytes, no_gil)
        .def("memory", &Engine::memory)
        .def("set_profiling", &Engine::set_profiling, "on"_a)
        .def("profile", &Engine::profile);
}

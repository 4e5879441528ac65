#include "model.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace cllm {

namespace {

constexpr int64_t kTurnBytes = 8 << 20;  // packed per turn: some milliseconds
constexpr size_t kTouchBytes = 4096;     // no page is smaller

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// What a role of a layer must be: a vector of `rows` numbers, or a matrix.
struct Slot {
    const char* role;
    Vector Layer::*vector;
    PackedMatrix Layer::*matrix;
    int64_t rows, cols;
    FusedRows fused;
    bool needed;
};

// The roles that a layer has.
class Slots {
public:
    Slots(const LayerShape& s, const Shape& shape) {
        const int64_t embd = shape.n_embd, q = s.q_size(), ff = s.n_ff, own = shape.layer_input_size;
        const int64_t k = s.stores() ? s.kv_size() : 0, v = s.v_is_k ? 0 : k;
        if (s.norm_before) vector("attn_norm", &Layer::attn_norm, embd), vector("ffn_norm", &Layer::ffn_norm, embd);
        if (s.norm_after) {
            vector("post_attention_norm", &Layer::post_attn_norm, embd);
            vector("post_ffw_norm", &Layer::post_ffn_norm, embd);
        }
        const bool rows = s.qk_norm == QKNorm::row;
        if (s.qk_norm != QKNorm::none) {
            vector("attn_q_norm", &Layer::q_norm, rows ? q : s.head_dim);
            if (k) vector("attn_k_norm", &Layer::k_norm, rows ? k : s.head_dim);
        }
        vector("attn_q.bias", &Layer::q_bias, q, false);
        if (k) vector("attn_k.bias", &Layer::k_bias, k, false);
        if (v) vector("attn_v.bias", &Layer::v_bias, v, false);
        if (s.output_bias) vector("attn_output.bias", &Layer::output_bias, embd, false);
        if (s.sinks) vector("attn_sinks", &Layer::sinks, s.n_heads);
        if (s.output_scale) vector("layer_output_scale", &Layer::output_scale, 1);
        matrix("attn_q", &Layer::q, q, embd, {0, k + v});
        if (k) matrix("attn_k", &Layer::k, k, embd, {q, v});
        if (v) matrix("attn_v", &Layer::v, v, embd, {q + k, 0});
        matrix("attn_output", &Layer::output, embd, q);
        matrix("ffn_gate", &Layer::gate, ff, embd);
        matrix("ffn_up", &Layer::up, ff, embd);
        matrix("ffn_down", &Layer::down, embd, ff);
        if (own == 0) return;
        matrix("inp_gate", &Layer::input_gate, own, embd);
        matrix("proj", &Layer::input_proj, embd, own);
        vector("post_norm", &Layer::input_norm, embd);
    }

    std::vector<Slot> all;

private:
    void vector(const char* role, Vector Layer::*to, int64_t size, bool needed = true) {
        all.push_back({role, to, nullptr, size, 0, {}, needed});
    }
    void matrix(const char* role, PackedMatrix Layer::*to, int64_t rows, int64_t cols, FusedRows fused = {}) {
        all.push_back({role, nullptr, to, rows, cols, fused, true});
    }
};

}  // namespace

Model::Model(const Shape& s, const Kernels& k, Team& team) : shape(s), kernels(k), team_(team) {
    shape.check();
    layers.reserve(shape.layers.size());
    for (const LayerShape& s : shape.layers) {
        Layer& layer = layers.emplace_back();
        layer.shape = s;
        if (s.stores()) last_stored = int(layers.size()) - 1;
        ones.resize(std::max(ones.size(), size_t(s.head_dim)), 1.0f);
        if (!s.rotation) continue;
        const auto same = [&](const Turning& other) { return other.shape == *s.rotation; };
        layer.rotation = int(std::find_if(rotations.begin(), rotations.end(), same) - rotations.begin());
        if (layer.rotation == int(rotations.size())) rotations.push_back({*s.rotation, s.rotation->frequencies()});
    }
}

void Model::load(int layer, const std::string& role, GgmlType type, int64_t rows, int64_t cols, const uint8_t* raw,
                 size_t bytes, int64_t first_row) {
    if (sealed_) refuse("the model is sealed");
    if (rows < 1 || cols < 1 || rows > (1 << 22) || cols > (1 << 22)) refuse(role + " has an impossible size");
    const size_t row_bytes = raw_row_bytes(type, cols), needed = row_bytes * size_t(rows);
    if (first_row == kWhole && bytes != needed)
        refuse(role + " has " + std::to_string(bytes) + " bytes, not the " + std::to_string(needed) + " its size needs");
    const int64_t first = first_row == kWhole ? 0 : first_row, last = first + int64_t(bytes / row_bytes);
    if (first < 0 || first % kTileRows || bytes % row_bytes || last <= first || last > rows || (last < rows && last % kTileRows))
        refuse(std::to_string(bytes) + " bytes from row " + std::to_string(first) + " on are no whole tiles of " + role);
    const Source source{type, rows, cols, raw, first, last};
    if (layer < 0) {
        if (role == "token_embd") return load_matrix(token_embd, role, source, shape.n_vocab, shape.n_embd);
        if (role == "output") return load_matrix(output, role, source, shape.n_vocab, shape.n_embd);
        if (role == "output_norm") return load_vector(output_norm, role, source, shape.n_embd);
        const int64_t own = shape.layer_input_size, all = own * shape.n_layers();
        if (own && role == "per_layer_token_embd") return load_matrix(layer_embd, role, source, shape.n_vocab, all);
        if (own && role == "per_layer_model_proj") return load_matrix(layer_proj, role, source, all, shape.n_embd);
        if (own && role == "per_layer_proj_norm") return load_vector(layer_proj_norm, role, source, own);
    } else if (layer < shape.n_layers()) {
        Layer& to = layers[size_t(layer)];
        for (const Slot& slot : Slots(to.shape, shape).all) {
            if (role != slot.role) continue;
            const std::string what = "layer " + std::to_string(layer) + " " + role;
            if (slot.vector) return load_vector(to.*slot.vector, what, source, slot.rows);
            return load_matrix(to.*slot.matrix, what, source, slot.rows, slot.cols, slot.fused);
        }
    }
    refuse("there is no tensor " + role + " in layer " + std::to_string(layer));
}

void Model::load_vector(Vector& to, const std::string& what, const Source& source, int64_t expected) {
    if (source.rows != 1 || source.cols != expected)
        refuse(what + " has " + std::to_string(source.rows * source.cols) + " values, not " + std::to_string(expected));
    Vector values(size_t(source.cols), 0.0f);
    if (!read_raw_row(source.type, source.raw, source.cols, values.data())) refuse(what + " holds values that are not finite");
    to = std::move(values);
}

void Model::load_matrix(PackedMatrix& to, const std::string& what, const Source& source, int64_t expected_rows,
                        int64_t expected_cols, FusedRows fused) {
    if (source.rows != expected_rows || source.cols != expected_cols)
        refuse(what + " is " + std::to_string(source.rows) + " x " + std::to_string(source.cols) + ", not " +
               std::to_string(expected_rows) + " x " + std::to_string(expected_cols));
    if (to.data) refuse(what + " was loaded before");
    if (source.first_row == 0) begin(to, what, source, fused);
    const Packing packing = packed_form(source.type, source.rows, source.cols).packing;
    if (filling_.to != &to || filling_.next_row != source.first_row || filling_.form.packing != packing)
        refuse(what + " does not go on at row " + std::to_string(source.first_row));
    if (!pack(source)) {
        filling_ = {};
        refuse(what + " holds values that are not finite");
    }
    filling_.next_row = source.last_row;
    if (source.last_row < source.rows) return;
    to = filling_.form;
    to.data = filling_.target;
    filling_ = {};
}

// Allocates the memory of a matrix. Each thread is the first to touch its share of the product, so that the system places
// that memory near it. A large matrix takes several turns, each for some tiles of every share, so that other engines can
// compute steps in between.
void Model::begin(PackedMatrix& to, const std::string& what, const Source& source, FusedRows fused) {
    if (filling_.to) refuse(filling_.what + " is incomplete: " + std::to_string(filling_.next_row) + " of its rows were loaded");
    const PackedMatrix form = packed_form(source.type, source.rows, source.cols);
    uint8_t* target = arena_.take(form.bytes());
    filling_ = {&to, form, target, 0, what};
    const int64_t before = fused.before / kTileRows, tiles = form.tiles(), after = fused.after / kTileRows;
    const int64_t turns = (int64_t(form.bytes()) + kTurnBytes - 1) / kTurnBytes;
    const int64_t items = (before + tiles + after + turns - 1) / turns;
    for (int64_t turn = 0; turn < turns; ++turn) {
        const Turn taken(team_);
        team_.share(items, 1, [&](int, int64_t first, int64_t last) {
            for (int64_t item = first; item < last; ++item) {
                const int64_t tile = item * turns + turn - before;
                if (tile < 0 || tile >= tiles) continue;
                uint8_t* const end = target + size_t(tile + 1) * form.tile_bytes();
                for (uint8_t* at = target + size_t(tile) * form.tile_bytes(); at < end; at += kTouchBytes) *at = 0;
            }
        });
    }
}

// Packs the tiles that were read, on all threads, in turns. False if a value is not finite.
bool Model::pack(const Source& source) {
    const PackedMatrix& form = filling_.form;
    const size_t tile_raw = raw_row_bytes(source.type, source.cols) * kTileRows;
    const int64_t first_tile = source.first_row / kTileRows, last_tile = (source.last_row + kTileRows - 1) / kTileRows;
    const int64_t in_turn = std::max<int64_t>(team_.size(), kTurnBytes / int64_t(form.tile_bytes()));
    std::atomic<bool> sound{true};
    for (int64_t begin = first_tile; begin < last_tile; begin += in_turn) {
        const Turn taken(team_);
        team_.share(std::min(in_turn, last_tile - begin), 1, [&](int, int64_t first, int64_t last) {
            const uint8_t* raw = source.raw + size_t(begin + first - first_tile) * tile_raw;
            if (!pack_tiles(source.type, raw, form, filling_.target, begin + first, begin + last)) sound = false;
        });
    }
    return sound;
}

// A matrix that is multiplied with must be there, and inputs must have a form that it takes.
void Model::require(const PackedMatrix& matrix, const std::string& what) {
    if (!matrix.data) refuse(what + " is missing");
    widest_input = std::max(widest_input, matrix.cols);
    any_float = any_float || !matrix.quantised();
}

void Model::seal() {
    if (filling_.to) refuse(filling_.what + " is incomplete");
    if (!token_embd.data) refuse("token_embd is missing");
    if (output_norm.empty()) refuse("output_norm is missing");
    if (!output.data) output = token_embd;
    require(output, "output");
    if (shape.layer_input_size) {
        if (!layer_embd.data) refuse("per_layer_token_embd is missing");
        if (layer_proj_norm.empty()) refuse("per_layer_proj_norm is missing");
        require(layer_proj, "per_layer_model_proj");
    }
    for (size_t i = 0; i < layers.size(); ++i)
        for (const Slot& slot : Slots(layers[i].shape, shape).all) {
            const std::string what = slot.role + (" of layer " + std::to_string(i));
            if (slot.matrix) require(layers[i].*slot.matrix, what);
            if (slot.vector && slot.needed && (layers[i].*slot.vector).empty()) refuse(what + " is missing");
        }
    sealed_ = true;
}

}  // namespace cllm

#include "model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

namespace cllm {

namespace {

constexpr int64_t kTurnBytes = 8 << 20;  // packed per turn: some milliseconds
constexpr size_t kTouchBytes = 4096;     // no page is smaller

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// What a role of a layer must be: a vector of `rows` numbers, a table of rows x cols of them, or a matrix.
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
        const int64_t embd = shape.n_embd, own = shape.layer_input_size;
        if (s.norm_before && s.mixes()) vector("attn_norm", &Layer::attn_norm, embd);
        if (s.norm_after && s.mixes()) vector("post_attention_norm", &Layer::post_attn_norm, embd);
        if (s.attends()) attention(s, embd);
        if (s.recurrence) recurrence(*s.recurrence, embd);
        fuse_all();
        if (s.attends()) matrix("attn_output", &Layer::output, embd, s.q_size());
        if (s.recurrence) {
            const bool short_conv = s.recurrence->kind == RecurrenceShape::Kind::short_conv;
            matrix(short_conv ? "shortconv.out_proj" : "ssm_out", &Layer::state_out, embd, s.recurrence->values());
        }
        if (s.n_ff) feed_forward(s, embd);
        if (s.output_scale) vector("layer_output_scale", &Layer::output_scale, 1);
        if (own == 0) return;
        matrix("inp_gate", &Layer::input_gate, own, embd);
        matrix("proj", &Layer::input_proj, embd, own);
        vector("post_norm", &Layer::input_norm, embd);
    }

    std::vector<Slot> all;

private:
    void attention(const LayerShape& s, int64_t embd) {
        const int64_t q = s.q_size(), k = s.stores() ? s.kv_size() : 0, v = s.v_is_k ? 0 : k;
        const bool rows = s.qk_norm == QKNorm::row;
        if (s.qk_norm != QKNorm::none) {
            vector("attn_q_norm", &Layer::q_norm, rows ? q : s.head_dim);
            if (k) vector("attn_k_norm", &Layer::k_norm, rows ? k : s.head_dim);
        }
        if (!s.gated) vector("attn_q.bias", &Layer::q_bias, q, false);
        if (k) vector("attn_k.bias", &Layer::k_bias, k, false);
        if (v) vector("attn_v.bias", &Layer::v_bias, v, false);
        if (s.output_bias) vector("attn_output.bias", &Layer::output_bias, embd, false);
        if (s.sinks) vector("attn_sinks", &Layer::sinks, s.n_heads);
        matrix("attn_q", &Layer::q, s.gated ? 2 * q : q, embd);
        if (k) matrix("attn_k", &Layer::k, k, embd);
        if (v) matrix("attn_v", &Layer::v, v, embd);
    }

    void recurrence(const RecurrenceShape& s, int64_t embd) {
        using Kind = RecurrenceShape::Kind;
        if (s.kind == Kind::short_conv) {
            matrix("shortconv.in_proj", &Layer::state_in, s.input_size(), embd);
            return table("shortconv.conv", &Layer::conv, s.channels(), s.kernel);
        }
        table("ssm_conv1d", &Layer::conv, s.channels(), s.kernel);
        vector("ssm_a", &Layer::decay, s.n_heads);
        vector("ssm_dt.bias", &Layer::step_bias, s.n_heads);
        if (s.kind == Kind::mamba2) {
            vector("ssm_conv1d.bias", &Layer::conv_bias, s.channels(), false);
            vector("ssm_d", &Layer::skip, s.n_heads);
            if (s.norm) vector("ssm_norm", &Layer::state_norm, s.values());
            return matrix("ssm_in", &Layer::state_in, s.input_size(), embd);
        }
        vector("ssm_norm", &Layer::state_norm, s.value_dim);
        matrix("attn_qkv", &Layer::state_in, s.input_size(), embd);
        matrix("attn_gate", &Layer::state_gate, s.values(), embd);
        matrix("ssm_alpha", &Layer::state_alpha, s.n_heads, embd);
        matrix("ssm_beta", &Layer::state_beta, s.n_heads, embd);
    }

    void feed_forward(const LayerShape& s, int64_t embd) {
        if (s.norm_before) vector("ffn_norm", &Layer::ffn_norm, embd);
        if (s.norm_after) vector("post_ffw_norm", &Layer::post_ffn_norm, embd);
        if (s.activation != Activation::relu2) matrix("ffn_gate", &Layer::gate, s.n_ff, embd);
        matrix("ffn_up", &Layer::up, s.n_ff, embd);
        matrix("ffn_down", &Layer::down, embd, s.n_ff);
    }

    // The matrices so far take the same input, and are multiplied in one phase.
    void fuse_all() {
        int64_t total = 0, before = 0;
        for (const Slot& slot : all) total += slot.matrix ? slot.rows : 0;
        for (Slot& slot : all) {
            if (!slot.matrix) continue;
            slot.fused = {before, total - before - slot.rows};
            before += slot.rows;
        }
    }

    void vector(const char* role, Vector Layer::*to, int64_t size, bool needed = true) {
        all.push_back({role, to, nullptr, size, 0, {}, needed});
    }
    void table(const char* role, Vector Layer::*to, int64_t rows, int64_t cols) {
        all.push_back({role, to, nullptr, rows, cols, {}, true});
    }
    void matrix(const char* role, PackedMatrix Layer::*to, int64_t rows, int64_t cols) {
        all.push_back({role, nullptr, to, rows, cols, {}, true});
    }
};

}  // namespace

Model::Model(const Shape& s, const Kernels& k, Team& team) : shape(s), kernels(k), team_(team) {
    shape.check();
    layers.reserve(shape.layers.size());
    for (const LayerShape& s : shape.layers) {
        Layer& layer = layers.emplace_back();
        layer.shape = s;
        if (s.stores() || s.recurrence) last_stored = int(layers.size()) - 1;
        if (s.recurrence && s.recurrence->kind == RecurrenceShape::Kind::delta_net) {
            const double dim = s.recurrence->key_dim;  // keys have a length of 1, and queries are scaled as scores are
            layer.key_lengths.assign(size_t(dim), float(1.0 / std::sqrt(dim)));
            layer.query_lengths.assign(size_t(dim), float(1.0 / dim));
        }
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
        if (role == "output_norm") return load_numbers(output_norm, role, source, shape.n_embd);
        const int64_t own = shape.layer_input_size, all = own * shape.n_layers();
        if (own && role == "per_layer_token_embd") return load_matrix(layer_embd, role, source, shape.n_vocab, all);
        if (own && role == "per_layer_model_proj") return load_matrix(layer_proj, role, source, all, shape.n_embd);
        if (own && role == "per_layer_proj_norm") return load_numbers(layer_proj_norm, role, source, own);
    } else if (layer < shape.n_layers()) {
        Layer& to = layers[size_t(layer)];
        for (const Slot& slot : Slots(to.shape, shape).all) {
            if (role != slot.role) continue;
            const std::string what = "layer " + std::to_string(layer) + " " + role;
            if (slot.vector) return load_numbers(to.*slot.vector, what, source, slot.rows, slot.cols);
            return load_matrix(to.*slot.matrix, what, source, slot.rows, slot.cols, slot.fused);
        }
    }
    refuse("there is no tensor " + role + " in layer " + std::to_string(layer));
}

// A vector, of which files make one row or several; or, with `cols`, a table, which is transposed.
void Model::load_numbers(Vector& to, const std::string& what, const Source& source, int64_t rows, int64_t cols) {
    const int64_t count = source.rows * source.cols;
    if (cols ? source.rows != rows || source.cols != cols : count != rows)
        refuse(what + " has " + (cols ? std::to_string(source.rows) + " x " + std::to_string(source.cols) : std::to_string(count)) +
               " values, not " + std::to_string(rows) + (cols ? " x " + std::to_string(cols) : ""));
    if (source.first_row != 0 || source.last_row != source.rows) refuse(what + " must come in one piece");
    Vector values(size_t(count), 0.0f), row(size_t(source.cols));
    const size_t row_bytes = raw_row_bytes(source.type, source.cols);
    for (int64_t r = 0; r < source.rows; ++r) {
        if (!read_raw_row(source.type, source.raw + size_t(r) * row_bytes, source.cols, row.data()))
            refuse(what + " holds values that are not finite");
        for (int64_t c = 0; c < source.cols; ++c) values[size_t(cols ? c * source.rows + r : r * source.cols + c)] = row[size_t(c)];
    }
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

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

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        refuse(std::string(name) + " is " + std::to_string(value) + ", not between " + std::to_string(low) + " and " +
               std::to_string(high));
}

// What each role of a layer must be: a vector of `rows` numbers (cols 0) or a matrix.
struct Slot {
    const char* role;
    Vector Layer::*vector;
    PackedMatrix Layer::*matrix;
    int64_t rows, cols;
    FusedRows fused = {};
};

std::vector<Slot> layer_slots(const LayerShape& s, int64_t embd) {
    const int64_t q = s.q_size(), kv = s.kv_size(), ff = s.n_ff, dim = s.head_dim;
    return {
        {"attn_norm", &Layer::attn_norm, nullptr, embd, 0}, {"ffn_norm", &Layer::ffn_norm, nullptr, embd, 0},
        {"attn_q.bias", &Layer::q_bias, nullptr, q, 0},     {"attn_k.bias", &Layer::k_bias, nullptr, kv, 0},
        {"attn_v.bias", &Layer::v_bias, nullptr, kv, 0},    {"attn_q_norm", &Layer::q_norm, nullptr, dim, 0},
        {"attn_k_norm", &Layer::k_norm, nullptr, dim, 0},   {"attn_q", nullptr, &Layer::q, q, embd, {0, 2 * kv}},
        {"attn_k", nullptr, &Layer::k, kv, embd, {q, kv}},  {"attn_v", nullptr, &Layer::v, kv, embd, {q + kv, 0}},
        {"attn_output", nullptr, &Layer::output, embd, q},  {"ffn_gate", nullptr, &Layer::gate, ff, embd},
        {"ffn_up", nullptr, &Layer::up, ff, embd},          {"ffn_down", nullptr, &Layer::down, embd, ff},
    };
}

}  // namespace

void RotationShape::check(int head_dim) const {
    check_range("rope_dims", dims, 2, head_dim);
    if (dims % 2) refuse("rope_dims is " + std::to_string(dims) + ", which is odd");
    if (!(base > 0 && std::isfinite(base))) refuse("rope_base is " + std::to_string(base));
    if (!(scale > 0 && std::isfinite(scale))) refuse("rope_scale is " + std::to_string(scale));
    if (!divisors.empty()) check_range("rope_divisors", int64_t(divisors.size()), dims / 2, dims / 2);
    for (const double divisor : divisors)
        if (!(divisor > 0 && std::isfinite(divisor))) refuse("a divisor of RoPE is " + std::to_string(divisor));
}

std::vector<double> RotationShape::frequencies() const {
    std::vector<double> found(size_t(dims / 2));
    for (size_t i = 0; i < found.size(); ++i)
        found[i] = std::pow(base, -2.0 * int(i) / dims) * (1.0 / scale) / (divisors.empty() ? 1.0 : divisors[i]);
    return found;
}

void LayerShape::check() const {
    check_range("n_kv_heads", n_kv_heads, 1, 1024);
    check_range("n_heads", n_heads, n_kv_heads, 1024);
    check_range("head_dim", head_dim, 8, 512);
    check_range("n_ff", n_ff, 1, 1 << 20);
    if (n_heads % n_kv_heads) refuse("n_heads is " + std::to_string(n_heads) + ", no multiple of n_kv_heads");
    if (head_dim % 8) refuse("head_dim is " + std::to_string(head_dim) + ", no multiple of 8");
    rotation.check(head_dim);
}

void Shape::check() const {
    check_range("n_layers", n_layers(), 1, 4096);
    check_range("n_embd", n_embd, 1, 1 << 17);
    check_range("n_vocab", n_vocab, 1, 1 << 22);
    if (!(rms_eps >= 0 && rms_eps < 1)) refuse("rms_eps is " + std::to_string(rms_eps));
    layer().check();
    for (const LayerShape& other : layers)
        if (!(other == layer())) refuse("its layers differ");
}

Model::Model(const Shape& s, const Kernels& k, Team& team) : shape(s), kernels(k), team_(team) {
    shape.check();
    layers.reserve(shape.layers.size());
    for (const LayerShape& layer : shape.layers) layers.emplace_back().shape = layer;
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
    } else if (layer < shape.n_layers()) {
        Layer& to = layers[size_t(layer)];
        for (const Slot& slot : layer_slots(to.shape, shape.n_embd)) {
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

void Model::seal() {
    if (filling_.to) refuse(filling_.what + " is incomplete");
    if (!token_embd.data) refuse("token_embd is missing");
    if (output_norm.empty()) refuse("output_norm is missing");
    if (!output.data) output = token_embd;
    widest_input = output.cols;
    any_float = !output.quantised();
    for (size_t i = 0; i < layers.size(); ++i) {
        const std::string where = " of layer " + std::to_string(i) + " is missing";
        if (layers[i].attn_norm.empty()) refuse("attn_norm" + where);
        if (layers[i].ffn_norm.empty()) refuse("ffn_norm" + where);
        for (const Slot& slot : layer_slots(layers[i].shape, shape.n_embd)) {
            if (!slot.matrix) continue;
            const PackedMatrix& matrix = layers[i].*slot.matrix;
            if (!matrix.data) refuse(slot.role + where);
            widest_input = std::max(widest_input, matrix.cols);
            any_float = any_float || !matrix.quantised();
        }
    }
    rope_frequencies = shape.layer().rotation.frequencies();
    sealed_ = true;
}

}  // namespace cllm

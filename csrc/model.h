// A model's weights, packed for the CPU at hand.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "team.h"

namespace cllm {

// How the first `dims` dimensions of a head are rotated by a token's position.
struct RotationShape {
    double base;
    int dims;
    bool neox;                     // whether dimension i turns with i + dims / 2, not 2i with 2i + 1
    double scale;                  // positions are divided by this
    std::vector<double> divisors;  // of each pair of dimensions, beside that; empty: none

    bool operator==(const RotationShape& other) const {
        return base == other.base && dims == other.dims && neox == other.neox && scale == other.scale && divisors == other.divisors;
    }
    void check(int head_dim) const;
    std::vector<double> frequencies() const;  // of each pair of dimensions
};

struct LayerShape {
    int n_heads, n_kv_heads, head_dim, n_ff;
    RotationShape rotation;

    int q_size() const { return n_heads * head_dim; }
    int kv_size() const { return n_kv_heads * head_dim; }
    int group() const { return n_heads / n_kv_heads; }
    bool operator==(const LayerShape& other) const {
        return n_heads == other.n_heads && n_kv_heads == other.n_kv_heads && head_dim == other.head_dim && n_ff == other.n_ff &&
               rotation == other.rotation;
    }
    void check() const;
};

// What cllm.models.spec.ModelSpec says of a model.
struct Shape {
    int n_embd, n_vocab;
    float rms_eps;
    std::vector<LayerShape> layers;  // equal ones, so far: buffers, tiles and rotations are those of the first

    int n_layers() const { return int(layers.size()); }
    const LayerShape& layer() const { return layers.front(); }
    void check() const;  // throws std::invalid_argument with the number that is wrong
};

using Vector = std::vector<float>;  // empty: the model has none

struct Layer {
    LayerShape shape;
    Vector attn_norm, ffn_norm, q_bias, k_bias, v_bias, q_norm, k_norm;
    Vector key_shift;  // added to spread keys of four bits
    PackedMatrix q, k, v, output, gate, up, down;
};

// How many rows other matrices, multiplied in the same phase, have before and after this one.
struct FusedRows {
    int64_t before = 0, after = 0;
};

class Model {
public:
    Model(const Shape& shape, const Kernels& kernels, Team& team);

    // Packs a tensor, or those rows of a matrix that `raw` holds, from `first_row` on: whole tiles, in order.
    void load(int layer, const std::string& role, GgmlType type, int64_t rows, int64_t cols, const uint8_t* raw, size_t bytes,
              int64_t first_row = kWhole);
    static constexpr int64_t kWhole = -1;
    void seal();
    bool sealed() const { return sealed_; }
    size_t weight_bytes() const { return arena_.taken(); }

    const Shape shape;
    const Kernels& kernels;
    std::vector<Layer> layers;
    Vector output_norm;
    PackedMatrix token_embd, output;
    std::vector<double> rope_frequencies;  // of each pair of dimensions, after scaling
    int64_t widest_input = 0;              // columns of the widest matrix
    bool any_float = false;                // whether some matrix takes its inputs as floats

private:
    // A tensor as the file has it, or some rows of it.
    struct Source {
        GgmlType type;
        int64_t rows, cols;
        const uint8_t* raw;
        int64_t first_row, last_row;  // the rows in `data`
    };
    // A matrix that is still being loaded.
    struct Filling {
        PackedMatrix* to = nullptr;
        PackedMatrix form;
        uint8_t* target = nullptr;
        int64_t next_row = 0;
        std::string what;
    };
    void load_vector(Vector& to, const std::string& what, const Source& source, int64_t expected);
    void load_matrix(PackedMatrix& to, const std::string& what, const Source& source, int64_t expected_rows,
                     int64_t expected_cols, FusedRows fused = {});
    void begin(PackedMatrix& to, const std::string& what, const Source& source, FusedRows fused);
    bool pack(const Source& source);

    Team& team_;
    WeightArena arena_;
    Filling filling_;
    bool sealed_ = false;
};

}  // namespace cllm

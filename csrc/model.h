// A model's weights, packed for the CPU at hand.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "team.h"

namespace cllm {

struct Shape {
    int n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_ff, n_vocab;
    float rms_eps;
    double rope_base;
    int rope_dims;
    bool rope_neox;
    double rope_frequency_scale;

    int q_size() const { return n_heads * head_dim; }
    int kv_size() const { return n_kv_heads * head_dim; }
    int group() const { return n_heads / n_kv_heads; }
    void check() const;  // throws std::invalid_argument with the number that is wrong
};

using Vector = std::vector<float>;  // empty: the model has none

struct Layer {
    Vector attn_norm, ffn_norm, q_bias, k_bias, v_bias, q_norm, k_norm;
    Vector key_shift;  // added to spread keys of four bits
    PackedMatrix q, k, v, output, gate, up, down;
};

// Rows of the matrices that are multiplied in one phase with one of them.
struct Beside {
    int64_t rows_before = 0, rows_after = 0;
};

class Model {
public:
    Model(const Shape& shape, const Kernels& kernels, Team& team);

    void load(int layer, const std::string& role, GgmlType type, int64_t rows, int64_t cols, const uint8_t* raw, size_t bytes);
    void seal();
    bool sealed() const { return sealed_; }
    size_t weight_bytes() const { return shelf_.taken(); }

    const Shape shape;
    const Kernels& kernels;
    std::vector<Layer> layers;
    Vector output_norm;
    PackedMatrix token_embd, output;
    std::vector<double> rope_frequencies;  // of each pair of dimensions, after scaling
    int64_t widest_input = 0;              // columns of the widest matrix
    bool any_float = false;                // whether some matrix takes its inputs as floats

private:
    void load_vector(Vector& to, const std::string& what, GgmlType type, int64_t rows, int64_t cols, int64_t expected,
                     const uint8_t* raw);
    void load_matrix(PackedMatrix& to, const std::string& what, GgmlType type, int64_t rows, int64_t cols,
                     int64_t expected_rows, int64_t expected_cols, const uint8_t* raw, Beside beside = {});

    Team& team_;
    Shelf shelf_;
    Vector rope_factors_;
    bool sealed_ = false;
};

}  // namespace cllm

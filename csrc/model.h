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
    Vector rope_factors_;
    bool sealed_ = false;
};

}  // namespace cllm

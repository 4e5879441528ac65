// A model's weights, packed for the CPU at hand.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "shape.h"
#include "team.h"

namespace cllm {

using Vector = std::vector<float>;  // empty: the model has none

struct Layer {
    LayerShape shape;
    int rotation = -1;  // in Model::rotations; -1: positions do not matter
    Vector attn_norm, ffn_norm, post_attn_norm, post_ffn_norm, q_norm, k_norm;
    Vector q_bias, k_bias, v_bias, output_bias;
    Vector sinks;         // of each head
    Vector output_scale;  // one number
    Vector input_norm;    // of what the layer's own embedding gives
    Vector key_shift;     // added to spread keys of four bits
    PackedMatrix q, k, v, output, gate, up, down;
    PackedMatrix input_gate, input_proj;
    // Of a recurrence: what it is made from, what gates its output, how much it forgets and how much it learns, and what
    // joins its heads.
    PackedMatrix state_in, state_gate, state_alpha, state_beta, state_out;
    Vector conv, conv_bias;  // [kernel][channel]
    Vector decay, step_bias, skip;  // of each head
    Vector state_norm;
    Vector query_lengths, key_lengths;  // of a delta net: what a root mean square of one is multiplied by

    float total_scale() const { return output_scale.empty() ? 1.0f : output_scale[0]; }
};

// Angles by which positions turn heads.
struct Turning {
    RotationShape shape;
    std::vector<double> frequencies;  // of each pair of dimensions, after scaling
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
    PackedMatrix layer_embd, layer_proj;  // what gives each layer an input of its own, and the norm of the second
    Vector layer_proj_norm;
    Vector ones;                      // a norm without weights, of a head
    std::vector<Turning> rotations;   // all different ones
    int last_stored = 0;              // the last layer with K and V of its own, or with a state
    bool keys_are_shifted = false;    // whether the layers' shifts were learned
    int64_t widest_input = 0;         // columns of the widest matrix
    bool any_float = false;           // whether some matrix takes its inputs as floats

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
    void load_numbers(Vector& to, const std::string& what, const Source& source, int64_t rows, int64_t cols = 0);
    void load_matrix(PackedMatrix& to, const std::string& what, const Source& source, int64_t expected_rows,
                     int64_t expected_cols, FusedRows fused = {});
    void begin(PackedMatrix& to, const std::string& what, const Source& source, FusedRows fused);
    bool pack(const Source& source);
    void require(const PackedMatrix& matrix, const std::string& what);

    Team& team_;
    WeightArena arena_;
    Filling filling_;
    bool sealed_ = false;
};

}  // namespace cllm

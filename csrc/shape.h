// What cllm.models.spec.ModelSpec says of a model, checked.
#pragma once

#include <optional>
#include <vector>

#include "kernels.h"

namespace cllm {

// How the first `dims` dimensions of a head are rotated by a token's position.
struct RotationShape {
    double base;
    int dims;
    bool neox;                     // whether dimension i turns with i + dims / 2, not 2i with 2i + 1
    double scale;                  // positions are divided by this
    std::vector<double> divisors;  // of each pair of dimensions, beside that; infinity: it does not turn; empty: none
    double magnitude;              // turned dimensions are multiplied by this

    bool operator==(const RotationShape& other) const {
        return base == other.base && dims == other.dims && neox == other.neox && scale == other.scale &&
               divisors == other.divisors && magnitude == other.magnitude;
    }
    void check(int head_dim) const;
    std::vector<double> frequencies() const;  // of each pair of dimensions
};

enum class QKNorm : uint8_t { none, head, row };

// What carries a state of constant size from token to token, and what it is made of: for every head a matrix of `value_dim`
// columns, each of which evolves by itself, and the last inputs of a convolution.
struct RecurrenceShape {
    enum class Kind : uint8_t { delta_net, mamba2, short_conv };

    Kind kind = Kind::short_conv;
    int n_heads = 1, value_dim = 0;   // of values; a short convolution's are all one head
    int n_groups = 0, key_dim = 0;    // of keys (B) and queries (C), which heads share
    bool tiled = false;               // whether head h goes with group h modulo their number; otherwise neighbours share one
    bool norm = true;                 // of what it gives
    int kernel = 0;                   // tokens that the convolution sees, the current one included

    bool has_heads() const { return kind != Kind::short_conv; }
    int values() const { return n_heads * value_dim; }
    int keys() const { return n_groups * key_dim; }
    int channels() const { return values() + 2 * keys(); }  // of the convolution
    int group_of(int head) const { return tiled ? head % n_groups : head / (n_heads / n_groups); }
    // Rows of the matrix that everything is made from but a delta net's gates.
    int input_size() const;
    // The state's parts: the matrices of all heads, then the convolution's inputs, the oldest first.
    int matrices() const { return has_heads() ? n_heads : 0; }
    int parts() const { return matrices() + kernel - 1; }
    size_t part_bytes(int part) const {
        return sizeof(float) * (part < matrices() ? size_t(value_dim) * size_t(key_dim) : size_t(channels()));
    }
    void check() const;
};

enum class Activation : uint8_t { silu, gelu, relu2 };

struct LayerShape {
    int n_heads = 0, n_kv_heads = 0, head_dim = 0;  // 0 heads: it does not attend
    int n_ff = 0;                                   // 0: it has no feed-forward
    std::optional<RecurrenceShape> recurrence;
    std::optional<RotationShape> rotation;
    QKNorm qk_norm = QKNorm::none;
    bool norm_last = false;  // of queries and keys: after they are rotated
    bool v_norm = false;
    bool v_is_k = false;
    bool output_bias = false;
    bool sinks = false;
    bool gated = false;  // attended values, by what stands behind each head's query
    Activation activation = Activation::silu;  // relu2 goes with no gate, the others with one
    bool norm_before = true, norm_after = false;
    bool output_scale = false;
    float scale = 0.0f;       // of scores
    int window = kNoWindow;
    float softcap = 0.0f;     // 0: none
    float temperature = 0.0f;  // queries are multiplied by 1 + temperature * log(1 + floor(position / temperature_context))
    int temperature_context = 1;
    int kv_from = -1;  // an earlier layer, whose K and V it attends to; -1: its own

    int q_size() const { return n_heads * head_dim; }
    int kv_size() const { return n_kv_heads * head_dim; }
    int group() const { return n_heads / n_kv_heads; }
    bool attends() const { return n_heads > 0; }
    bool mixes() const { return attends() || recurrence; }  // tokens
    bool stores() const { return attends() && kv_from < 0; }
    void check() const;

private:
    void check_attention() const;
};

struct Shape {
    int n_embd, n_vocab;
    float rms_eps;
    std::vector<LayerShape> layers;
    float embedding_scale = 1.0f, residual_scale = 1.0f;
    float logit_scale = 1.0f, logit_softcap = 0.0f;
    int layer_input_size = 0;  // values that an embedding of its own gives every layer of each token

    int n_layers() const { return int(layers.size()); }
    bool changes_logits() const { return logit_scale != 1.0f || logit_softcap != 0.0f; }
    bool any_window() const {
        for (const LayerShape& layer : layers)
            if (layer.window != kNoWindow) return true;
        return false;
    }
    bool recurrent() const {
        for (const LayerShape& layer : layers)
            if (layer.recurrence) return true;
        return false;
    }
    void check() const;  // throws std::invalid_argument with the number that is wrong
};

}  // namespace cllm

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
    std::vector<double> divisors;  // of each pair of dimensions, beside that; empty: none
    double magnitude;              // turned dimensions are multiplied by this

    bool operator==(const RotationShape& other) const {
        return base == other.base && dims == other.dims && neox == other.neox && scale == other.scale &&
               divisors == other.divisors && magnitude == other.magnitude;
    }
    void check(int head_dim) const;
    std::vector<double> frequencies() const;  // of each pair of dimensions
};

enum class QKNorm : uint8_t { none, head, row };

struct LayerShape {
    int n_heads = 0, n_kv_heads = 0, head_dim = 0, n_ff = 0;
    std::optional<RotationShape> rotation;
    QKNorm qk_norm = QKNorm::none;
    bool norm_last = false;  // of queries and keys: after they are rotated
    bool v_norm = false;
    bool v_is_k = false;
    bool output_bias = false;
    bool sinks = false;
    bool gelu = false;  // instead of silu
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
    bool stores() const { return kv_from < 0; }
    void check() const;
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
    void check() const;  // throws std::invalid_argument with the number that is wrong
};

}  // namespace cllm

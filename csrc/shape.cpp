#include "shape.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace cllm {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        refuse(std::string(name) + " is " + std::to_string(value) + ", not between " + std::to_string(low) + " and " +
               std::to_string(high));
}

void check_factor(const char* name, float value) {
    if (!std::isfinite(value) || value == 0.0f) refuse(std::string(name) + " is " + std::to_string(value));
}

void check_softcap(const char* name, float value) {
    if (!(value >= 0.0f && std::isfinite(value))) refuse(std::string(name) + " is " + std::to_string(value));
}

}  // namespace

void RotationShape::check(int head_dim) const {
    check_range("rope_dims", dims, 2, head_dim);
    if (dims % 2) refuse("rope_dims is " + std::to_string(dims) + ", which is odd");
    if (!(base > 0 && std::isfinite(base))) refuse("rope_base is " + std::to_string(base));
    if (!(scale > 0 && std::isfinite(scale))) refuse("rope_scale is " + std::to_string(scale));
    if (!(magnitude > 0 && std::isfinite(magnitude))) refuse("rope_magnitude is " + std::to_string(magnitude));
    if (!divisors.empty()) check_range("rope_divisors", int64_t(divisors.size()), dims / 2, dims / 2);
    for (const double divisor : divisors)
        if (!(divisor > 0)) refuse("a divisor of RoPE is " + std::to_string(divisor));
}

std::vector<double> RotationShape::frequencies() const {
    std::vector<double> found(size_t(dims / 2));
    for (size_t i = 0; i < found.size(); ++i)
        found[i] = std::pow(base, -2.0 * int(i) / dims) * (1.0 / scale) / (divisors.empty() ? 1.0 : divisors[i]);
    return found;
}

int RecurrenceShape::input_size() const {
    switch (kind) {
        case Kind::delta_net: return channels();
        case Kind::mamba2: return values() + channels() + n_heads;
        case Kind::short_conv: return 3 * values();
    }
    return 0;
}

void RecurrenceShape::check() const {
    check_range("the convolution's kernel", kernel, 2, kMostTaps);
    check_range("the recurrence's heads", n_heads, 1, 1024);
    check_range("the recurrence's head size", value_dim, 1, 1 << 17);
    if (!has_heads()) return;
    check_range("the recurrence's key heads", n_groups, 1, n_heads);
    check_range("the state's size", key_dim, 1, 512);
    check_range("the recurrence's head size", value_dim, kStateColumns, 512);
    if (value_dim % kStateColumns)
        refuse("the recurrence's head size is " + std::to_string(value_dim) + ", no multiple of " + std::to_string(kStateColumns));
    if (n_heads % n_groups) refuse("the recurrence's heads are " + std::to_string(n_heads) + ", no multiple of its key heads");
}

void LayerShape::check() const {
    if (attends()) check_attention();
    if (recurrence) recurrence->check();
    if (!mixes() && !n_ff) refuse("a layer does nothing");
    check_range("n_ff", n_ff, 0, 1 << 20);
    if (!norm_before && !norm_after) refuse("a layer has no norms");
    if (attends() && recurrence && norm_after) refuse("norms of outputs are not supported beside two kinds of them");
    if (output_scale && !n_ff) refuse("output_scale is not supported without a feed-forward");
}

void LayerShape::check_attention() const {
    check_range("n_kv_heads", n_kv_heads, 1, 1024);
    check_range("n_heads", n_heads, n_kv_heads, 1024);
    check_range("head_dim", head_dim, 8, 512);
    if (n_heads % n_kv_heads) refuse("n_heads is " + std::to_string(n_heads) + ", no multiple of n_kv_heads");
    if (head_dim % 8) refuse("head_dim is " + std::to_string(head_dim) + ", no multiple of 8");
    check_range("window", window, 1, kNoWindow);
    check_factor("the attention's scale", scale);
    check_softcap("the attention's softcap", softcap);
    if (!std::isfinite(temperature)) refuse("the temperature's beta is " + std::to_string(temperature));
    check_range("the temperature's context", temperature_context, 1, INT32_MAX);
    if (gated && qk_norm == QKNorm::row) refuse("gated attention is not supported with a norm over all heads");
    if (rotation) rotation->check(head_dim);
}

void Shape::check() const {
    check_range("n_layers", n_layers(), 1, 4096);
    check_range("n_embd", n_embd, 1, 1 << 17);
    check_range("n_vocab", n_vocab, 1, 1 << 22);
    if (!(rms_eps >= 0 && rms_eps < 1)) refuse("rms_eps is " + std::to_string(rms_eps));
    check_factor("embedding_scale", embedding_scale);
    check_factor("residual_scale", residual_scale);
    check_factor("logit_scale", logit_scale);
    check_softcap("logit_softcap", logit_softcap);
    check_range("layer_input_size", layer_input_size, 0, (1 << 22) / n_layers());
    for (int i = 0; i < n_layers(); ++i) {
        const LayerShape& layer = layers[size_t(i)];
        layer.check();
        if (!layer.attends() || layer.stores()) continue;
        check_range("kv_from", layer.kv_from, 0, i - 1);
        const LayerShape& source = layers[size_t(layer.kv_from)];
        if (!source.stores() || source.n_kv_heads != layer.n_kv_heads || source.head_dim != layer.head_dim)
            refuse("layer " + std::to_string(i) + " cannot attend to K and V of layer " + std::to_string(layer.kv_from));
    }
}

}  // namespace cllm

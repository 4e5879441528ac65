#include "workspace.h"

#include <algorithm>

namespace cllm {

namespace {

void add(std::vector<int64_t>& sizes, int64_t size) {
    if (std::find(sizes.begin(), sizes.end(), size) == sizes.end()) sizes.push_back(size);
}

}  // namespace

Extents::Extents(const Shape& shape) {
    for (const LayerShape& s : shape.layers) {
        if (s.attends()) add_attention(s);
        if (s.recurrence) add_recurrence(*s.recurrence);
        if (s.n_ff) add(ff_sizes, s.n_ff);
    }
}

void Extents::add_attention(const LayerShape& s) {
    const size_t heads = size_t(s.group()), tile_rows = heads * size_t(attention_tile_tokens(s.group()));
    q_size = std::max(q_size, size_t(s.q_size()));
    if (s.gated) gated_q_size = std::max(gated_q_size, 2 * size_t(s.q_size()));
    kv_size = std::max(kv_size, size_t(s.kv_size()));
    head_floats = std::max(head_floats, heads * size_t(s.head_dim));
    state_floats = std::max(state_floats, tile_rows * size_t(s.head_dim + 2));
    attend_bytes = std::max(attend_bytes, attend_scratch_bytes(s.head_dim, s.group()));
    add(head_sizes, s.q_size());
}

void Extents::add_recurrence(const RecurrenceShape& s) {
    const int width = s.has_heads() ? std::max(s.key_dim, s.value_dim) : kChannelsTogether;
    mixed_size = std::max(mixed_size, size_t(s.input_size()));
    recurred_size = std::max(recurred_size, size_t(s.values()));
    recurrent_heads = std::max(recurrent_heads, size_t(s.n_heads));
    tap_floats = std::max(tap_floats, size_t(s.kernel) * size_t(width));
    column_floats = std::max(column_floats, size_t(s.key_dim) * kStateColumns);
    add(head_sizes, s.values());
}

void Workspace::ensure(const Model& model, int64_t rows, int n_threads, bool any_dropped) {
    const int n_embd = model.shape.n_embd, panel_rows = model.kernels.panel_rows;
    const size_t n = size_t(rows), own_size = size_t(model.shape.layer_input_size);
    const size_t all_own = own_size * size_t(model.shape.n_layers());
    const bool floats = model.any_float;
    x.ensure(n * size_t(n_embd));
    branch.ensure(n * size_t(n_embd));  // memory that is never used is never taken
    q.ensure(n * extents.q_size);
    k.ensure(n * extents.kv_size);
    v.ensure(n * extents.kv_size);
    attended.ensure(n * extents.q_size);
    gated_q.ensure(n * extents.gated_q_size);
    mixed.ensure(n * extents.mixed_size);
    state_gate.ensure(n * extents.recurred_size);
    decays.ensure(n * extents.recurrent_heads);
    factors.ensure(n * extents.recurrent_heads);
    recurred.ensure(n * extents.recurred_size);
    layer_inputs.ensure(n * all_own);
    input_gates.ensure(n * own_size);
    rotations.resize(model.rotations.size());
    sink_rotations.resize(model.rotations.size());
    for (size_t r = 0; r < rotations.size(); ++r) {
        const size_t pairs = model.rotations[r].frequencies.size();
        rotations[r].ensure(n * pairs);
        if (any_dropped) sink_rotations[r].ensure(n * pairs);
    }
    if (any_dropped) sink_q.ensure(n * extents.q_size);
    embd.ensure(rows, n_embd, panel_rows, floats);
    for (const int64_t size : extents.head_sizes) heads.ensure(rows, size, panel_rows, floats);
    for (const int64_t size : extents.ff_sizes) ff.ensure(rows, size, panel_rows, floats);
    if (own_size) inputs.ensure(rows, int64_t(own_size), panel_rows, floats);
    threads.resize(size_t(n_threads));
    for (ThreadSpace& own : threads) {
        own.matmul.ensure(matmul_scratch_bytes(model.widest_input));
        own.attend.ensure(extents.attend_bytes);
        own.row.ensure(std::max({size_t(n_embd), extents.q_size, extents.recurred_size, own_size}));
        own.layer_inputs.ensure(all_own);
        own.q.ensure(extents.head_floats);
        own.embd.ensure(kFewRows, n_embd, panel_rows, floats);
        for (const int64_t size : extents.head_sizes) own.heads.ensure(kFewRows, size, panel_rows, floats);
        if (own_size) own.inputs.ensure(kFewRows, int64_t(own_size), panel_rows, floats);
        own.gate.ensure(std::max(size_t(kActivatedFloats), n * 32));
        own.up.ensure(std::max(size_t(kActivatedFloats), n * 32));
        own.states.ensure(extents.state_floats);
        own.merged.ensure(extents.state_floats);
        own.taps.ensure(extents.tap_floats);
        own.state.ensure(extents.column_floats);
    }
}

}  // namespace cllm

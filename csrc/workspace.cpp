#include "workspace.h"

#include <algorithm>

namespace cllm {

namespace {

// Quantised inputs exist only in whole groups; a model with other sizes has float weights there and needs none.
void ensure_quants(QuantBuffer& buffer, int64_t rows, int64_t cols, int panel_rows) {
    if (cols % 32 == 0) buffer.ensure(rows, cols, panel_rows);
}

}  // namespace

void Workspace::ensure(const Model& model, int64_t rows, int n_threads) {
    const Shape& s = model.shape;
    const size_t n = size_t(rows);
    const size_t widest = size_t(std::max<int64_t>({model.widest_input, s.n_embd, s.n_ff, s.q_size()}));
    x.ensure(n * size_t(s.n_embd));
    q.ensure(n * size_t(s.q_size()));
    k.ensure(n * size_t(s.kv_size()));
    v.ensure(n * size_t(s.kv_size()));
    attended.ensure(n * size_t(s.q_size()));
    gate.ensure(n * size_t(s.n_ff));
    up.ensure(n * size_t(s.n_ff));
    if (model.any_float) normed.ensure(n * widest);
    cosines.ensure(n * size_t(s.rope_dims / 2));
    sines.ensure(n * size_t(s.rope_dims / 2));
    ensure_quants(embd, rows, s.n_embd, model.kernels.panel_rows);
    ensure_quants(heads, rows, s.q_size(), model.kernels.panel_rows);
    ensure_quants(ff, rows, s.n_ff, model.kernels.panel_rows);
    threads.resize(size_t(n_threads));
    const int tile_tokens = attention_tile_tokens(s.group());
    for (ThreadSpace& own : threads) {
        own.matmul.ensure(matmul_scratch_bytes(int64_t(widest)));
        own.attend.ensure(attend_scratch_bytes(s.head_dim, s.group()));
        own.row.ensure(widest);
        own.states.ensure(size_t(tile_tokens) * s.group() * (s.head_dim + 2));
        own.merged.ensure(size_t(tile_tokens) * s.group() * (s.head_dim + 2));
    }
}

}  // namespace cllm

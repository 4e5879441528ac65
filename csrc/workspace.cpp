#include "workspace.h"

#include <algorithm>

namespace cllm {

void Workspace::ensure(const Model& model, int64_t rows, int n_threads, bool any_dropped) {
    const LayerShape& s = model.shape.layer();
    const int n_embd = model.shape.n_embd;
    const size_t n = size_t(rows), pairs = size_t(s.rotation.dims / 2);
    const size_t widest = size_t(std::max<int64_t>({model.widest_input, n_embd, s.n_ff, s.q_size()}));
    x.ensure(n * size_t(n_embd));
    q.ensure(n * size_t(s.q_size()));
    k.ensure(n * size_t(s.kv_size()));
    v.ensure(n * size_t(s.kv_size()));
    attended.ensure(n * size_t(s.q_size()));
    rotations.ensure(n * pairs);
    if (any_dropped) {
        sink_rotations.ensure(n * pairs);
        sink_q.ensure(n * size_t(s.q_size()));
    }
    embd.ensure(rows, n_embd, model.kernels.panel_rows, model.any_float);
    heads.ensure(rows, s.q_size(), model.kernels.panel_rows, model.any_float);
    ff.ensure(rows, s.n_ff, model.kernels.panel_rows, model.any_float);
    threads.resize(size_t(n_threads));
    const int tile_tokens = attention_tile_tokens(s.group());
    for (ThreadSpace& own : threads) {
        own.matmul.ensure(matmul_scratch_bytes(int64_t(widest)));
        own.attend.ensure(attend_scratch_bytes(s.head_dim, s.group()));
        own.row.ensure(size_t(std::max(n_embd, s.q_size())));
        own.q.ensure(size_t(s.group()) * s.head_dim);
        own.embd.ensure(kFewRows, n_embd, model.kernels.panel_rows, model.any_float);
        own.heads.ensure(kFewRows, s.q_size(), model.kernels.panel_rows, model.any_float);
        own.gate.ensure(std::max(size_t(kActivatedFloats), n * 32));
        own.up.ensure(std::max(size_t(kActivatedFloats), n * 32));
        own.states.ensure(size_t(tile_tokens) * s.group() * (s.head_dim + 2));
        own.merged.ensure(size_t(tile_tokens) * s.group() * (s.head_dim + 2));
    }
}

}  // namespace cllm

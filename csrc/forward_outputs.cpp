// Other outputs of a step than logits: how likely the tokens of a prompt are, and pooled hidden states.
#include <algorithm>

#include "forward.h"
#include "scoring.h"

namespace cllm {

namespace {

// Rows whose logits exist at the same time: as many as this memory holds, but enough to be worth unpacking the weights.
constexpr int64_t kScoredFloats = 4 << 20;
constexpr int64_t kLeastScoredRows = 16;

constexpr int64_t kCappedFloats = 4096;  // of logits, at a time

}  // namespace

// Logits of some of the step's rows.
void Forward::multiply_head(const int* rows, int64_t count, float* logits) {
    const Shape& shape = model_.shape;
    rows_ = count;
    multiply({{&model_.output, logits}}, normalised(model_.output_norm, rows), false, Phase::norm, Phase::head);
    if (!shape.changes_logits()) return;
    const int64_t values = count * shape.n_vocab;
    timed(Phase::head, [&] {
        team_.share((values + kCappedFloats - 1) / kCappedFloats, 1, [&](int, int64_t first, int64_t last) {
            const int64_t begin = first * kCappedFloats, end = std::min(values, last * kCappedFloats);
            kernels_.cap(logits + begin, end - begin, shape.logit_scale, shape.logit_softcap);
        });
    });
}

// False if `abort` ended it.
bool Forward::score_rows(const StepOutputs& outputs) {
    const int64_t vocab = model_.shape.n_vocab, panel = kernels_.panel_rows;
    const int64_t most = std::max(kLeastScoredRows, kScoredFloats / vocab) / panel * panel;
    const int64_t total = int64_t(scored_rows_.size()), at_once = std::min(total, std::max(panel, most));
    work_.scored.ensure(size_t(at_once * vocab));
    for (int64_t first = 0; first < total; first += at_once) {
        if (abort_.load(std::memory_order_relaxed)) return false;
        const int64_t count = std::min(at_once, total - first);
        multiply_head(scored_rows_.data() + first, count, work_.scored.data());
        timed(Phase::head, [&] {
            team_.queue(count, [&](int, int64_t row) {
                const int64_t to = first + row, tops = to * outputs.top;
                const Score score = score_row(kernels_, work_.scored.data() + row * vocab, vocab, outputs.targets[to],
                                              outputs.top, outputs.top_ids + tops, outputs.top_logprobs + tops);
                outputs.logprobs[to] = score.logprob;
                outputs.ranks[to] = score.rank;
            });
        });
    }
    return true;
}

// Adds a chunk's rows one by one, in float64, so that a sum does not depend on how a text is cut into chunks.
void Forward::pool_rows(double* hidden) {
    const int64_t embd = model_.shape.n_embd;
    timed(Phase::norm, [&] {
        team_.queue(int64_t(pooled_.size()), [&](int thread, int64_t index) {
            float* state = work_.threads[size_t(thread)].row.data();
            double* sum = hidden + index * embd;
            for (int64_t row = pooled_[size_t(index)].first; row < pooled_[size_t(index)].last; ++row) {
                kernels_.rms_norm(work_.x.data() + row * embd, model_.output_norm.data(), embd, model_.shape.rms_eps, state);
                for (int64_t i = 0; i < embd; ++i) sum[i] += double(state[i]);
            }
        });
    });
}

}  // namespace cllm

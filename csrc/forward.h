// One step through the model: any mix of prompt chunks and single tokens, each with its own block table.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

#include "kv_map.h"
#include "model.h"
#include "workspace.h"

namespace cllm {

// Which hidden states of a chunk, after the last norm, are wanted: its last token's, the sum of all, the text's first token's.
enum class Pooling : int { none, last, sum, first };

// The cells of a sequence's state: those to go on from (null: it begins), and those that the step writes, which are others.
struct StateCells {
    const int32_t* read = nullptr;
    const int32_t* write = nullptr;
};

// Consecutive tokens of one sequence. Positions are places in its block tables. With a rolling window, `dropped` tokens after
// the first `kept` are gone: memory position p >= kept holds text token p + dropped.
struct Chunk {
    int tokens;
    int first_position;
    int wanted_logits;  // number of last tokens whose logits are wanted
    const KVTable* tables;  // of each group
    int dropped = 0;
    int kept = 0;    // a whole number of tiles, all before first_position
    int scored = 0;  // number of first tokens whose successors are scored
    Pooling pooling = Pooling::none;
    StateCells state = {};
    int known = 0;  // K and V of positions before this one are there in layers without a window: they are not written again

    // How many of its last tokens go through all layers; of the others, only K and V, and the state, are needed.
    int needed_rows() const {
        if (scored > 0 || pooling == Pooling::sum || (pooling == Pooling::first && first_position == 0)) return tokens;
        return pooling == Pooling::last && wanted_logits == 0 ? 1 : wanted_logits;
    }
};

// Where a step writes its results.
struct StepOutputs {
    float* logits = nullptr;
    const int32_t* targets = nullptr;  // what follows each scored token
    int top = 0;
    double* logprobs = nullptr;      // of the targets; NaN where the model has no usable numbers
    int32_t* ranks = nullptr;        // of the targets, from 1 on
    int32_t* top_ids = nullptr;      // [scored][top], best first; -1: there are no more
    double* top_logprobs = nullptr;
    double* hidden = nullptr;        // [pooled chunks][n_embd]; sums are added to what is there
};

enum class Phase : int { norm, qkv, rope, attention, convolution, state, quantise, output, gate_up, down, head, count };
extern const char* const kPhaseNames[int(Phase::count)];

class Forward {
public:
    Forward(const Model& model, Team& team);

    // Writes what the chunks want, in their order. False if `abort` ended the step; part of the K/V may be written then.
    bool step(const int32_t* tokens, const std::vector<Chunk>& chunks, const KVMap& map, uint8_t* arena,
              const StepOutputs& outputs);

    void abort() { abort_.store(true); }

    void set_profiling(bool on) { profiling_ = on; }
    // Seconds per phase, waiting included, since the last call.
    std::array<double, size_t(Phase::count)> take_profile();

private:
    // Query rows that attend together: consecutive tokens of a chunk.
    struct Tile {
        int row;  // the first one, among the step's rows
        int tokens;
        int first_position;
        const KVTable* tables;
        int sinks;   // first positions, attended to with separately rotated queries, see rotate_queries
        int begin;   // of the other positions that are attended to: a whole tile
        int splits;
        size_t states;  // where its states begin, if splits are computed apart
    };
    // Positions of a tile that are attended to in one call.
    struct Split {
        int begin, end;
        bool sinks;
    };
    // How the step's rows attend in layers that are alike in this.
    struct Walk {
        int group, n_kv_heads, head_dim, window;
        std::vector<Tile> tiles;
        std::vector<std::atomic<int>> open_splits;  // of each tile and kv head, while splits are computed apart
        bool splits_apart = false;

        bool fits(const LayerShape& s) const {
            return s.attends() && group == s.group() && n_kv_heads == s.n_kv_heads && head_dim == s.head_dim && window == s.window;
        }
        size_t state_size() const { return size_t(head_dim) + 2; }
    };
    struct Product {
        const PackedMatrix* weights;  // null: not wanted
        float* out;
    };
    // What attention or feed-forward gives becomes part of the residual stream x: x = (x + scale * norm(it + bias)) * total.
    struct Joining {
        const Vector *bias, *norm;  // empty: none
        float scale, total;

        bool plain() const { return bias->empty() && norm->empty() && scale == 1.0f && total == 1.0f; }
    };
    struct Rows {
        int64_t first, last;
    };
    // What a recurrent layer is made from: numbers of the first row, and how far it is to the next one's.
    struct Mixture {
        float* channels;  // of the convolution
        const float* gate;
        const float* steps;  // how far each head goes, before its bias
        int64_t stride, gate_stride, step_stride;
    };
    // Some channels of a convolution that are queries, keys or values of one head, or just some.
    struct Unit {
        enum class Kind : uint8_t { query, key, value, other } kind;
        int head, first, width;
    };
    // Which of the layer's products are wanted.
    struct Wanted {
        bool queries, keys, state;
    };
    using MakeRow = std::function<void(int64_t row, ThreadSpace& own, InputBuffer& to)>;
    // Inputs of a product: made by all threads together beforehand, or, if there are few rows, by each thread for itself.
    struct Inputs {
        MakeRow make;
        InputBuffer Workspace::*shared;
        InputBuffer ThreadSpace::*own;
    };

    void plan_rows(const std::vector<Chunk>& chunks);
    void plan_attention(bool wanted_rows_only);
    void plan_walk(Walk& walk, bool wanted_rows_only);
    bool rows_are_apart();
    void embed();
    void embed_for_layers();
    bool run_layer(int index);
    void project(const Layer& layer, Wanted wanted);
    void feed_forward(const Layer& layer);
    void add_layer_input(const Layer& layer, int index);
    void join(const PackedMatrix& weights, const Inputs& inputs, const Joining& how, Phase which);
    void activate(const Layer& layer, const InputBuffer& inputs, int64_t first_group, int64_t groups, Rows rows, int thread);
    void keep_wanted_rows(const Layer& last_stored);
    void multiply_head(const int* rows, int64_t count, float* logits);
    bool score_rows(const StepOutputs& outputs);
    void pool_rows(double* hidden);

    bool few() const { return rows_ <= kFewRows; }
    Inputs normalised(const Vector& weight, const int* rows = nullptr);
    Inputs attended(const Layer& layer);
    Inputs recurred(const Layer& layer);
    void make_shared(const Inputs& inputs, Phase which);
    void make_own(const Inputs& inputs, int thread);
    const InputBuffer& made(const Inputs& inputs, int thread) const;
    void quantise(const float* row, int64_t cols, int64_t at, InputBuffer& to);
    void multiply(std::initializer_list<Product> products, const Inputs& inputs, bool add, Phase making, Phase which);
    void multiply_tiles(const Product& product, const InputBuffer& inputs, int64_t first_tile, int64_t last_tile, Rows rows,
                        bool add, int thread);
    int64_t row_parts(int64_t units) const;
    template <class Work>
    void each_part(int64_t first, int64_t last, int64_t parts, Work&& work) const;

    void rotate_queries(const Layer& layer, int64_t row, int kv_head, bool for_sinks, float* to);
    void rotate_in_place(const Layer& layer, int64_t row, int kv_head);
    void store_keys(const Layer& layer, int index, int64_t row, int kv_head);
    void rotate_and_store(const Layer& layer, int index, bool queries, bool keys);
    float query_scale(const LayerShape& s, int64_t row) const;
    void normalise_heads(const LayerShape& s, const Vector& norm, int count, float* heads) const;
    void turn(const Layer& layer, const std::vector<Rotations>& by, int64_t row, float* heads, int count, float scale) const;
    void attend(int layer);
    static int count_splits(int sinks, int begin, int end);
    static Split split_of(const Tile& tile, int index);
    const float* queries_of(const Tile& tile, int layer, int kv_head, bool sinks, bool stores, int thread);
    AttendJob job_of(const Tile& tile, int layer, int kv_head, const float* q) const;
    void take_key_shift_back(const Tile& tile, int layer, int kv_head, const float* q, float* states) const;
    void attend_tile(const Tile& tile, int layer, int kv_head, int thread);
    void attend_splits(int layer, Walk& walk);
    float* states_of(const Walk& walk, const Tile& tile, int64_t kv_head, int64_t split) const;
    void finish(const Tile& tile, int layer, int kv_head, float* states);

    void recur(int index);
    Mixture mixture_of(const RecurrenceShape& s) const;
    static int count_units(const RecurrenceShape& s);
    static Unit unit_of(const RecurrenceShape& s, int index);
    void convolve(int index, const Chunk& chunk, int64_t first_row, const Unit& unit, int thread);
    void convolve_short(int index, const Chunk& chunk, int64_t first_row, const Unit& unit, int thread);
    float* first_taps(int index, const Chunk& chunk, const Unit& unit, int thread);
    void store_taps(int index, const Chunk& chunk, const Unit& unit, const float* taps);
    void make_gates(const Layer& layer, const Chunk& chunk, int64_t first_row, int head);
    void advance(int index, const Chunk& chunk, int64_t first_row, int head, int tile, int thread);
    const float* state_part(const StateCells& cells, int layer, int part) const;
    float* new_state_part(const StateCells& cells, int layer, int part) const;

    // Adds to the time of the phase, if times are kept.
    template <class Run>
    void timed(Phase which, const Run& run) {
        if (!profiling_) return run();
        const double start = now();
        run();
        profile_[size_t(which)] += now() - start;
    }
    static double now();
    template <class Work>
    void each_panel(Phase which, Work&& work);

    const Model& model_;
    Team& team_;
    const Kernels& kernels_;
    Workspace work_;

    // The step in progress.
    const int32_t* tokens_ = nullptr;
    const KVMap* map_ = nullptr;
    uint8_t* arena_ = nullptr;
    int64_t rows_ = 0;                   // rows that are computed now; fewer from the last layer on that stores K and V, or a state
    std::vector<Chunk> chunks_;
    std::vector<int64_t> first_rows_;    // of each chunk
    std::vector<int> positions_;         // of each row, in its block tables
    std::vector<int> dropped_;           // of each row's sequence
    std::vector<int> known_;             // of each row's chunk
    std::vector<const KVTable*> tables_;  // of each row, of each group
    std::vector<int> wanted_;            // rows that go through all layers
    std::vector<int> logit_rows_;        // of those, the ones whose logits are wanted
    std::vector<int> scored_rows_;       // those that are scored
    std::vector<Rows> pooled_;           // for each chunk, those whose hidden states are wanted
    const int* listed_ = nullptr;        // rows that `normalised` is about; null: all
    std::vector<Walk> walks_;
    std::vector<int> walk_of_;           // each layer
    std::vector<int32_t> written_;       // cells
    bool rotates_later_ = false;         // attention rotates queries and stores K and V, see queries_of

    std::atomic<bool> abort_{false};
    bool profiling_ = false;
    std::array<double, size_t(Phase::count)> profile_{};
};

}  // namespace cllm

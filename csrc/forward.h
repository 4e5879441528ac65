// One step through the model: any mix of prompt chunks and single tokens, each with its own block table.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "model.h"
#include "workspace.h"

namespace cllm {

// Consecutive tokens of one sequence.
struct Chunk {
    int tokens;
    int first_position;
    bool wants_logits;  // of its last token
    const int32_t* blocks;
};

enum class Phase : int { norm, qkv, rope, attention, merge, quantise, output, gate_up, down, head, count };
extern const char* const kPhaseNames[int(Phase::count)];

class Forward {
public:
    Forward(const Model& model, ThreadPool& pool) : model_(model), pool_(pool), kernels_(model.kernels) {}

    // A row of logits for each chunk that wants one. False if `abort` ended the step; then part of the K/V was written.
    bool step(const int32_t* tokens, const std::vector<Chunk>& chunks, const KVLayout& layout, uint8_t* arena, float* logits);

    void abort() { abort_.store(true); }

    void set_profiling(bool on) { profiling_ = on; }
    // Seconds per phase on the first thread, waiting included, since the last call.
    std::array<double, size_t(Phase::count)> take_profile();

private:
    // Query rows that attend together: consecutive tokens of a chunk.
    struct Tile {
        int row;  // of the first one, among the step's rows
        int tokens;
        int first_position;
        const int32_t* blocks;
        int splits;
        size_t states;  // where its states begin, if splits are computed apart
    };
    struct Product {
        const PackedMatrix* weights;
        float* out;
        int64_t pairs() const { return (weights->tiles() + 1) / 2; }
    };

    static void enter(void* self, int thread) { static_cast<Forward*>(self)->run(thread); }
    void plan_rows(const std::vector<Chunk>& chunks);
    void plan_attention(bool last_rows_only);
    void run(int thread);
    void embed(int thread);
    bool run_layer(int layer, int thread);
    void feed_forward(int layer, int thread);
    void activate(const Layer& layer, int64_t first_group, int64_t groups, int thread);
    void compute_logits(int thread);
    void keep_wanted_rows(int thread);

    void normalise(const float* weight, int thread);
    void quantise(const float* row, int64_t cols, int64_t at, InputBuffer& to);
    void multiply(std::initializer_list<Product> products, const InputBuffer& inputs, bool add, int thread, Phase phase);
    void rotate_queries(const Layer& layer, int64_t row);
    void store_keys(const Layer& layer, int index, int64_t row);
    void attend(int layer, int thread);
    void attend_tile(const Tile& tile, int layer, int kv_head, int thread);
    AttendJob job_of(const Tile& tile, int layer, int kv_head) const;
    void put_states(const Tile& tile, int kv_head, const float* states);
    template <class Run>
    void timed(Phase which, int thread, Run&& run);
    template <class Work>
    void phase(Phase which, int thread, int64_t tasks, Work&& work);
    template <class Work>
    void each_panel(Phase which, int thread, Work&& work);

    const Model& model_;
    ThreadPool& pool_;
    const Kernels& kernels_;
    Workspace work_;

    // The step in progress.
    const int32_t* tokens_ = nullptr;
    const KVLayout* layout_ = nullptr;
    uint8_t* arena_ = nullptr;
    float* logits_ = nullptr;
    int64_t rows_ = 0;                   // rows that are computed now; fewer in the last layer
    std::vector<Chunk> chunks_;
    std::vector<int> positions_;         // of each row
    std::vector<const int32_t*> tables_;  // block table of each row
    std::vector<int> wanted_;            // rows whose logits are wanted
    std::vector<Tile> tiles_;
    bool splits_apart_ = false;
    bool stopping_ = false;

    std::atomic<bool> abort_{false};
    bool profiling_ = false;
    std::array<double, size_t(Phase::count)> profile_{};
};

}  // namespace cllm

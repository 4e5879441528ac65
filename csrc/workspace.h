// The buffers of a step. They grow to the largest step seen and are then reused: a step allocates nothing after warm-up.
#pragma once

#include <vector>

#include "memory.h"
#include "model.h"

namespace cllm {

// Inputs of matrices: quantised, and as floats if a matrix of the model needs those.
struct InputBuffer {
    QuantRows quants;
    Buffer<float> floats;  // [rows][cols]

    const float* floats_from(int64_t row, int64_t cols) const { return floats.size() ? floats.data() + row * cols : nullptr; }

    void ensure(int64_t n_rows, int64_t cols, int panel_rows, bool wants_floats) {
        if (wants_floats) floats.ensure(size_t(n_rows * cols));
        // Groups are whole; a model with other sizes has float weights there.
        if (cols % 32 == 0) ensure_quants(n_rows, cols, panel_rows);
    }

    // Layers differ in their sizes. `ensure` was called with this one, too.
    void use_for(int64_t cols) { quants.cols = cols; }

private:
    void ensure_quants(int64_t n_rows, int64_t cols, int panel_rows) {
        const size_t padded = size_t((n_rows + panel_rows - 1) / panel_rows * panel_rows);
        const size_t groups = padded * size_t(cols / 32);
        values_.ensure(padded * size_t(cols));
        scales_.ensure(groups);
        sums_.ensure(groups);
        offsets32_.ensure(groups);
        offsets16_.ensure(groups * 2);
        quants = {cols, values_.data(), scales_.data(), sums_.data(), offsets32_.data(), offsets16_.data()};
    }

    Buffer<int8_t> values_;
    Buffer<float> scales_, sums_;
    Buffer<int32_t> offsets32_, offsets16_;
};

// How many inner values of the feed-forward a thread holds as floats at a time (at least one group of columns of all rows).
constexpr int64_t kActivatedFloats = 1 << 12;

// Up to this many rows, each thread makes the inputs of a product for itself: faster than sharing the work and waiting.
constexpr int64_t kFewRows = 4;

// Channels that a thread convolves at a time, where they are no heads.
constexpr int kChannelsTogether = 64;

// Buffers of one thread.
struct ThreadSpace {
    Buffer<uint8_t> matmul, attend;
    Buffer<float> row;             // one normalised or attended row
    Buffer<float> layer_inputs;    // of one token, for all layers
    Buffer<float> q;               // of one kv head and token, rotated
    InputBuffer embd, heads, inputs;  // of few rows
    Buffer<float> gate, up;        // some columns of these, see kActivatedFloats
    Buffer<float> states, merged;  // of one attention tile
    Buffer<float> taps;            // of some channels of a convolution, [kernel][width]
    Buffer<float> state;           // some columns of one, kStateColumns x key_dim
};

// Angles of the rows' rotations, [rows][rotated dimensions / 2].
struct Rotations {
    Buffer<float> cosines, sines;

    void ensure(size_t size) {
        cosines.ensure(size);
        sines.ensure(size);
    }
};

// The largest sizes of a model's layers, and all that inputs of products have.
struct Extents {
    explicit Extents(const Shape& shape);

    size_t q_size = 0, gated_q_size = 0, kv_size = 0, head_floats = 0, state_floats = 0, attend_bytes = 0;
    size_t mixed_size = 0, recurred_size = 0, recurrent_heads = 0, tap_floats = 0, column_floats = 0;
    std::vector<int64_t> head_sizes, ff_sizes;

private:
    void add_attention(const LayerShape& s);
    void add_recurrence(const RecurrenceShape& s);
};

struct Workspace {
    explicit Workspace(const Shape& shape) : extents(shape) {}

    const Extents extents;
    Buffer<float> x;               // [rows][n_embd], the residual stream
    Buffer<float> branch;          // the same of what is not a part of it yet
    Buffer<float> q, k, v, attended;
    Buffer<float> gated_q;         // [rows][heads][query, gate], of gated attention
    Buffer<float> mixed;           // what a recurrence's values, keys and queries are made from
    Buffer<float> state_gate;      // of a recurrence's output
    Buffer<float> decays, factors;  // [rows][heads], of a recurrence
    Buffer<float> recurred;        // what the heads of a recurrence give
    Buffer<float> layer_inputs;    // [rows][layers][layer_input_size]
    Buffer<float> input_gates;     // [rows][layer_input_size]
    Buffer<float> sink_q;          // [rows][q_size], of steps with dropped tokens
    std::vector<Rotations> rotations;  // each of the model's, by positions in the text
    std::vector<Rotations> sink_rotations;  // by places in the block table, of rows whose sequences have dropped tokens
    Buffer<float> states;          // of attention tiles whose splits are computed apart
    Buffer<float> scored;          // logits of some rows at a time, of steps that score any
    InputBuffer embd, heads, ff, inputs;
    std::vector<ThreadSpace> threads;

    void ensure(const Model& model, int64_t rows, int n_threads, bool any_dropped);
    void use_heads_for(int64_t cols) {
        heads.use_for(cols);
        for (ThreadSpace& own : threads) own.heads.use_for(cols);
    }
};

}  // namespace cllm

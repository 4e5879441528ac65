// The functions that exist once per instruction set, behind a table that is chosen at the start.
#pragma once

#include <cstdint>

#include "kv_layout.h"
#include "packed.h"

namespace cllm {

// Rows of activations, quantised in groups of 32 columns, each row by itself.
//
// Rows lie in panels of P = Kernels::panel_rows, so that a kernel reads the same C columns of several rows, 4 or with AMX 32,
// from neighbouring bytes: value (row, col) is at values[(row / P * cols + col / C * C) * P + row % P * C + col % C], number
// (row, i) of the others at [(row / P * count + i) * P + row % P], where count is how many numbers a row has.
struct QuantRows {
    int64_t cols = 0;
    int8_t* values = nullptr;      // -127..127
    float* scales = nullptr;       // cols / 32 a row
    float* sums = nullptr;         // cols / 32 a row: scale * sum of the group's values, the factor of minima
    int32_t* offsets32 = nullptr;  // cols / 32 a row: -128 * sum of the group's values, which undoes a centre of 128
    int32_t* offsets16 = nullptr;  // cols / 16 a row: the same for groups of 16

    // A view of the rows from `row` on, which must be the first of a panel of `panel_rows`.
    QuantRows from(int64_t row) const {
        const int64_t groups = row * (cols / 32);
        return {cols, values + row * cols, scales + groups, sums + groups, offsets32 + groups, offsets16 + groups * 2};
    }
};

constexpr int kNoWindow = INT32_MAX;

// One job of attention: a query tile and a kv head. Query rows are consecutive tokens of one sequence.
struct AttendJob {
    const KVLayout* layout;
    const uint8_t* arena;
    KVTable table;         // of the sequence, for the layer's group
    int kv_head;
    int heads;             // query heads that share this kv head
    int tokens;            // query tokens in the tile
    int first_position;    // of the first of them; token i sees positions up to first_position + i
    int window;            // how many it sees at most; kNoWindow: all of them
    float softcap;         // scores s become softcap * tanh(s / softcap); 0: they stay
    const float* q;        // [tokens][heads][head_dim], rotated and scaled
    int64_t q_stride;      // floats from one token's queries to the next
};

// One job of a recurrence: some consecutive tokens of a sequence, and kStateColumns of the columns of a head's state.
//
// A head's state is float32, in tiles of kStateColumns columns: [value / kStateColumns][key][value % kStateColumns]. A column
// depends on no other one, and tokens come one after another, so results do not depend on how work is cut.
struct StateJob {
    const float* read;  // the tile before the first token; null: zeros
    float* write;       // the tile after the last token; another one, aligned to 64
    int64_t tokens;
    int key_dim;
    const float *queries, *keys, *values;  // of the first token
    int64_t stride;                        // floats from one token's to the next's
    const float *decays, *factors;         // of each token; factor: how much of it is learned
    int64_t gate_stride;
    float skip;                            // this much of the values is given as it is
    float* out;                            // kStateColumns numbers a token
    int64_t out_stride;
};
constexpr int kStateColumns = 16;
constexpr int kMostTaps = 16;

// A query's running softmax over some positions: sum of exp(score - peak) * v, sum of exp(score - peak), peak.
// Laid out as head_dim floats, then the sum, then the peak: head_dim + 2 floats.

struct Kernels {
    const char* name;  // "generic", "avx2", "avxvnni", "avx512", "amx"
    int panel_rows;    // of quantised activations
    int own_rows;      // rows of a panel that one thread should write, since they share no cache line with others

    // --- matrix products (matmul) ---
    // out[m][r] (+)= sum over columns, for input rows [0, m) and the tiles [first_tile, last_tile) of `w`.
    // Quantised weights take the quantised inputs, others `floats` ([m][cols]).
    // `scratch`: matmul_scratch_bytes(w.cols) bytes for this thread alone, aligned to 64.
    void (*matmul)(const PackedMatrix& w, const QuantRows& quants, const float* floats, int64_t m, int64_t first_tile,
                   int64_t last_tile, float* out, int64_t out_stride, bool add, uint8_t* scratch);

    // --- element-wise (elementwise) ---
    void (*quantise_row)(const float* x, int64_t row, const QuantRows& out);
    // Some groups of the rows [0, rows); x: [rows][groups * 32].
    void (*quantise_columns)(const float* x, int64_t rows, int64_t first_group, int64_t groups, const QuantRows& out);
    void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
    // Rotates n_heads heads in place by the angles whose cosines and sines (n_rot / 2 each) are given; neox: pairs are
    // (i, i + n_rot/2), otherwise (2i, 2i + 1). All values are multiplied by `scale` too.
    void (*rope)(float* heads, int n_heads, int head_dim, int n_rot, const float* cosines, const float* sines, bool neox,
                 float scale);
    // x = softcap * tanh(x * scale / softcap), or only x * scale if softcap is 0.
    void (*cap)(float* x, int64_t n, float scale, float softcap);
    // Spreads each head's values evenly by an orthogonal transform that is its own inverse (kernel: hadamard).
    void (*spread)(float* heads, int n_heads, int head_dim);
    // out = activation(gate) * up; `out` may be `gate`. gelu: its approximation by tanh.
    void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);
    void (*gelu_mul)(const float* gate, const float* up, int64_t n, float* out);
    void (*relu2)(const float* x, int64_t n, float* out);  // the square of what is above 0
    void (*mul)(const float* a, const float* b, int64_t n, float* out);
    void (*sigmoid_mul)(const float* gate, const float* x, int64_t n, float* out);
    void (*add)(const float* x, int64_t n, float* to);
    // to = (to + x * scale) * total
    void (*add_scaled)(const float* x, int64_t n, float scale, float total, float* to);

    // --- attention (attention) ---
    // Store K and V of one head of a token at `slot` of a block, in the layer's cell of it.
    void (*write_kv)(const KVLayout& layout, uint8_t* cell, int head, int slot, const float* k, const float* v);
    // Softmax state over positions [begin, end) that each query may see, end - begin <= kSplit, begin a whole tile's;
    // states[(token * heads + head) * (head_dim + 2)]. A query that sees none of them gets sum 0, peak -infinity.
    void (*attend)(const AttendJob& job, int begin, int end, float* states, uint8_t* scratch);
    // into = into combined with `later`, n_states states; into must hold the earlier positions.
    void (*merge_states)(float* into, const float* later, int64_t n_states, int head_dim);
    // out[i] = state's weighted sum / its sum, for one state.
    void (*finish_state)(const float* state, int head_dim, float* out);

    // --- recurrences (recurrence) ---
    // out = activation(bias + sum over the kernel of weights[i] * taps[i]), for n channels. weights: [kernel][stride].
    void (*convolve)(const float* const* taps, const float* weights, int64_t stride, const float* bias, int kernel, int64_t n,
                     bool silu, float* out);
    // Each column: S = decay * S; S += key * factor * (value - S key); out = S query.  `scratch`: the tile's size.
    void (*delta_rule)(const StateJob& job, float* scratch);
    // Each column: S = decay * S + key * factor * value; out = S query + skip * value.
    void (*state_scan)(const StateJob& job, float* scratch);

    // --- sampling (sampling): over a row of n values, of which any may be -infinity ---
    // The first of the largest values, or the first NaN if there is one.
    int64_t (*argmax)(const float* values, int64_t n);
    // Maxima of disjoint groups of kMaximaGroup values, as many as fit; returns how many. NaN is ignored.
    int64_t (*group_maxima)(const float* values, int64_t n, float* maxima);
    // The ids of the values in [low, high), in their order; returns how many. `low` is finite.
    int64_t (*ids_between)(const float* values, int64_t n, float low, float high, int32_t* ids);
    // weights = exp((value - peak) / temperature), or 0 if that is less than min_weight or e^-87; block_sums has the sum of
    // each kWeightBlock of them. `weights` has room for whole blocks.
    void (*weigh)(const float* values, int64_t n, float peak, double temperature, float min_weight, float* weights,
                  double* block_sums);
    // The same sums, over weights of at least min_weight whose values are at least `cut`, a finite number.
    void (*sum_kept)(const float* values, const float* weights, int64_t n, float cut, float min_weight, double* block_sums);
    // For each of kCuts cuts, all finite: how many values are at least that, and the sum of their weights.
    void (*sums_from)(const float* values, const float* weights, int64_t n, const float* cuts, int64_t* counts, double* sums);
};

constexpr int kSplit = 256;  // positions whose scores are computed together; fixed, so that results are

// How many query tokens to take together, given the query heads per kv head, and the scratch memory that `attend` needs.
int attention_tile_tokens(int heads);
size_t attend_scratch_bytes(int head_dim, int heads);

constexpr int kMaximaGroup = 64;
constexpr int kWeightBlock = 256;
constexpr int kCuts = 3;
CLLM_INLINE int64_t weight_blocks(int64_t n) { return (n + kWeightBlock - 1) / kWeightBlock; }

// Room for two opened tiles, or for what AMX needs beside the columns that it opens at a time.
constexpr size_t kLeastMatmulScratch = 96 << 10;
CLLM_INLINE size_t matmul_scratch_bytes(int64_t cols) {
    const size_t two_tiles = size_t(cols) * kOpenedColumnBytes * 2;
    return two_tiles > kLeastMatmulScratch ? two_tiles : kLeastMatmulScratch;
}

const Kernels& generic_kernels();
// Null where the build has none.
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();
const Kernels* amx_kernels();

}  // namespace cllm

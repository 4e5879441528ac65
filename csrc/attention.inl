// Attention of a tile of query rows over one split of a sequence's positions.
//
// A row is a (token, head) pair; all rows of a tile share the kv head, so a K or V vector is fetched and converted once for
// many of them. Work goes in chunks of kChunkTiles tiles and, inside, in blocks of at most kRowBlock rows:
//
//   scores   a lane is a key:        score[row][key] = sum over d of q[row][d] * k[d][key]
//   softmax  of each row's visible scores: weights, their sum, their peak
//   values   a lane is a dimension:  sums[row][d] = sum over positions of weight[row][position] * v[position][d]
//
// Both sums are one chain of `fma` in ascending order from zero for each (row, key) and (row, d), whatever the number of
// rows, tiles and chunks around it: that is what makes results independent of the batch. Blocking only shares loads.
//
// Slots that were never written may hold anything, NaN too. Their scores are computed, as lanes are independent, and then
// overwritten; their V is never touched, as 0 * NaN is not 0.
#pragma once

#include "attention_sizes.h"
#include "kv_tiles.inl"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

constexpr int kRowBlock = 6;
// Vectors of running sums that fit in the registers, with room for what they are computed from.
constexpr int kAccumulators = Vec::lanes == 16 ? 24 : 12;

// The largest power of two up to `most` of which `rows` fit.
constexpr int vectors_per_row(int rows, int most) {
    while (most > 1 && rows * most > kAccumulators) most /= 2;
    return most;
}

// What the kernels read: tiles in the arena, or a chunk that was turned into floats.
struct Halves {
    using Value = uint16_t;
    static constexpr bool in_arena = true;
    static CLLM_INLINE Vec load(const Value* p) { return Vec::load_f16(p); }
};
struct Floats {
    using Value = float;
    static constexpr bool in_arena = false;
    static CLLM_INLINE Vec load(const Value* p) { return Vec::load(p); }
};

// Tiles of one chunk, and those to fetch from memory meanwhile.
struct Chunk {
    int begin, end;  // positions, counted from the split's first
    const uint8_t* tiles[kChunkTiles];
    const uint8_t* ahead[kChunkTiles];
};

struct RowBlock {
    int first, rows;
    int visible_to_all;  // positions of the split that each of its rows may see
    int visible_to_any;
};

// Scores of kRows rows and kTiles tiles.
template <class Source, int kRows, int kTiles>
static CLLM_INLINE void score_tiles(const uint8_t* const* tiles, const uint8_t* const* ahead, int head_dim,
                                    const float* const* q, float* scores) {
    using Value = typename Source::Value;
    constexpr int kVecs = kTiles * kVecsPerTile;
    const Value* keys[kTiles];
    for (int t = 0; t < kTiles; ++t) keys[t] = reinterpret_cast<const Value*>(tiles[t]);
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sums[r][v] = Vec::zero();
    }
#pragma GCC unroll 2
    for (int d = 0; d < head_dim; ++d) {
        // A cache line of halves holds two dimensions.
        if (Source::in_arena && d % 2 == 0) {
#pragma GCC unroll 8
            for (int t = 0; t < kTiles; ++t) __builtin_prefetch(ahead[t] + d * int(kTileTokens * sizeof(Value)));
        }
        Vec k[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
            k[v] = Source::load(keys[v / kVecsPerTile] + d * kTileTokens + v % kVecsPerTile * Vec::lanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Vec query = Vec::all(q[r][d]);
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) sums[r][v] = fma(query, k[v], sums[r][v]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sums[r][v].store(scores + r * kScoreStride + v * Vec::lanes);
    }
}

// Scores of a block of rows with the chunk's first `n_tiles` tiles.
template <class Source, int kRows>
static void score_block(const Chunk& chunk, int n_tiles, int head_dim, const float* const* q, float* scores) {
    constexpr int kTogether = vectors_per_row(kRows * kVecsPerTile, kChunkTiles);
    int tile = 0;
    for (; tile + kTogether <= n_tiles; tile += kTogether) {
        score_tiles<Source, kRows, kTogether>(chunk.tiles + tile, chunk.ahead + tile, head_dim, q,
                                              scores + tile * kTileTokens);
    }
    for (; tile < n_tiles; ++tile) {
        score_tiles<Source, kRows, 1>(chunk.tiles + tile, chunk.ahead + tile, head_dim, q, scores + tile * kTileTokens);
    }
}

// Adds tokens [first, last) of the chunk to kVecs vectors of each row's sums, from dimension `column` on.
template <class Source, int kRows, int kVecs>
static CLLM_INLINE void add_columns(const Chunk& chunk, int first, int last, int head_dim, int column,
                                    const float* weights, float* sums, int sums_stride) {
    using Value = typename Source::Value;
    Vec sum[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sum[r][v] = Vec::load(sums + r * sums_stride + column + v * Vec::lanes);
    }
    for (int token = first; token < last;) {
        const int tile = token / kTileTokens, offset = token % kTileTokens * head_dim + column;
        const Value* row = reinterpret_cast<const Value*>(chunk.tiles[tile]) + offset;
        const uint8_t* ahead = chunk.ahead[tile] + offset * int(sizeof(Value));
        const int stop = (tile + 1) * kTileTokens < last ? (tile + 1) * kTileTokens : last;
        for (; token < stop; ++token, row += head_dim, ahead += head_dim * int(sizeof(Value))) {
            if (Source::in_arena) {
                for (int at = 0; at < kVecs * Vec::lanes * int(sizeof(Value)); at += 64) __builtin_prefetch(ahead + at);
            }
            Vec value[kVecs];
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) value[v] = Source::load(row + v * Vec::lanes);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const Vec weight = Vec::all(weights[r * kScoreStride + token]);
#pragma GCC unroll 8
                for (int v = 0; v < kVecs; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sum[r][v].store(sums + r * sums_stride + column + v * Vec::lanes);
    }
}

template <class Source, int kRows>
static void add_values(const Chunk& chunk, int first, int last, int head_dim, const float* weights, float* sums,
                       int sums_stride) {
    constexpr int kVecs = vectors_per_row(kRows, 4);
    int column = 0;
    for (; column + kVecs * Vec::lanes <= sums_stride; column += kVecs * Vec::lanes) {
        add_columns<Source, kRows, kVecs>(chunk, first, last, head_dim, column, weights, sums, sums_stride);
    }
    for (; column < sums_stride; column += Vec::lanes) {
        add_columns<Source, kRows, 1>(chunk, first, last, head_dim, column, weights, sums, sums_stride);
    }
}

using ScoreBlock = void (*)(const Chunk&, int, int, const float* const*, float*);
using AddValues = void (*)(const Chunk&, int, int, int, const float*, float*, int);

template <class Source>
static ScoreBlock score_block_of(int rows) {
    static constexpr ScoreBlock table[kRowBlock] = {score_block<Source, 1>, score_block<Source, 2>, score_block<Source, 3>,
                                                    score_block<Source, 4>, score_block<Source, 5>, score_block<Source, 6>};
    return table[rows - 1];
}

template <class Source>
static AddValues add_values_of(int rows) {
    static constexpr AddValues table[kRowBlock] = {add_values<Source, 1>, add_values<Source, 2>, add_values<Source, 3>,
                                                   add_values<Source, 4>, add_values<Source, 5>, add_values<Source, 6>};
    return table[rows - 1];
}

// One call of `attend`: the job, how its rows are cut into blocks, and where its intermediate results lie.
struct Attention {
    const AttendJob& job;
    const KVLayout& layout;
    int begin, end;       // positions
    int rows, n_blocks;   // query rows, row blocks
    int head_dim, width;  // width: head_dim rounded up to whole vectors
    size_t block_bytes, k_offset, v_offset;
    float *sums, *scores, *floats;

    Attention(const AttendJob& j, int first, int last, uint8_t* scratch)
        : job(j), layout(*j.layout), begin(first), end(last), rows(j.tokens * j.heads),
          n_blocks((rows + kRowBlock - 1) / kRowBlock), head_dim(layout.head_dim),
          width((head_dim + Vec::lanes - 1) / Vec::lanes * Vec::lanes), block_bytes(layout.block_bytes()),
          k_offset(layout.k_tile(j.layer, j.kv_head, 0)), v_offset(layout.v_tile(j.layer, j.kv_head, 0)) {
        const AttendScratch offsets(head_dim, rows);
        const uintptr_t misaligned = reinterpret_cast<uintptr_t>(scratch) % kScratchAlign;
        float* base = reinterpret_cast<float*>(scratch + (misaligned ? kScratchAlign - misaligned : 0));
        sums = base + offsets.sums;
        scores = base + offsets.scores;
        floats = base + offsets.chunk;
    }

    // Positions of the split that a row may see, perhaps none.
    CLLM_INLINE int visible(int row) const {
        const int limit = job.first_position + row / job.heads + 1;
        return limit <= begin ? 0 : (limit < end ? limit : end) - begin;
    }

    // Blocks differ by at most one row in size.
    CLLM_INLINE RowBlock block(int index) const {
        const int size = rows / n_blocks, larger = rows % n_blocks;
        const int first = index * size + (index < larger ? index : larger);
        const int count = size + (index < larger ? 1 : 0);
        return {first, count, visible(first), visible(first + count - 1)};
    }

    CLLM_INLINE int n_chunks() const { return (end - begin + kChunkTokens - 1) / kChunkTokens; }

    CLLM_INLINE const uint8_t* tile_at(int position, bool of_values) const {
        const uint8_t* base = job.arena + size_t(job.blocks[position / layout.block_size]) * block_bytes;
        const size_t tile = size_t(position % layout.block_size / kTileTokens);
        return base + (of_values ? v_offset + tile * layout.v_tile_bytes() : k_offset + tile * layout.k_tile_bytes());
    }

    // Chunks are numbered through: those of K, then those of V.
    CLLM_INLINE void locate(int index, const uint8_t** tiles) const {
        const bool of_values = index >= n_chunks();
        const int first = begin + (of_values ? index - n_chunks() : index) * kChunkTokens;
        for (int t = 0; t < kChunkTiles; ++t) {
            const int position = first + t * kTileTokens;
            tiles[t] = position < end ? tile_at(position, of_values) : tiles[0];
        }
    }

    CLLM_INLINE Chunk chunk(int index) const {
        Chunk c;
        c.begin = (index < n_chunks() ? index : index - n_chunks()) * kChunkTokens;
        c.end = c.begin + kChunkTokens < end - begin ? c.begin + kChunkTokens : end - begin;
        locate(index, c.tiles);
        locate(index + 1 < 2 * n_chunks() ? index + 1 : index, c.ahead);
        return c;
    }

    // With few rows, converting halves anew for each block of rows is cheaper than storing them as floats.
    CLLM_INLINE bool reads_arena(KVType type) const { return type == KVType::f16 && n_blocks <= 2; }

    CLLM_INLINE const float* query(int row) const {
        return job.q + row / job.heads * job.q_stride + row % job.heads * head_dim;
    }

    // Replaces the chunk's tiles by floats in the scratch memory.
    template <class Widen>
    CLLM_INLINE void widen(Chunk& c, KVType type, Widen widen_tile) const {
        for (int t = 0; t * kTileTokens < c.end - c.begin; ++t) {
            float* out = floats + size_t(t) * kTileTokens * head_dim;
            widen_tile(type, c.tiles[t], c.ahead[t], head_dim, out);
            c.tiles[t] = reinterpret_cast<const uint8_t*>(out);
        }
    }

    void score() const {
        const bool direct = reads_arena(layout.k_type);
        for (int index = 0; index < n_chunks(); ++index) {
            Chunk c = chunk(index);
            if (!direct) widen(c, layout.k_type, widen_k_tile);
            for (int b = 0; b < n_blocks; ++b) {
                const RowBlock of = block(b);
                const int last = of.visible_to_any < c.end ? of.visible_to_any : c.end;
                if (last <= c.begin) continue;
                const ScoreBlock run = direct ? score_block_of<Halves>(of.rows) : score_block_of<Floats>(of.rows);
                const float* q[kRowBlock];
                for (int r = 0; r < of.rows; ++r) q[r] = query(of.first + r);
                run(c, (last - c.begin + kTileTokens - 1) / kTileTokens, head_dim, q,
                    scores + size_t(of.first) * kScoreStride + c.begin);
            }
        }
    }

    // Turns a row's scores into weights and writes the state's sum and peak.
    void soften(int row, float* state) const {
        const int n = visible(row);
        float* x = scores + size_t(row) * kScoreStride;
        const int padded = (n + Vec::lanes - 1) / Vec::lanes * Vec::lanes;
        for (int i = n; i < padded; ++i) x[i] = -INFINITY;
        Vec peaks = Vec::all(-INFINITY);
        for (int i = 0; i < padded; i += Vec::lanes) peaks = vmax(peaks, Vec::load(x + i));
        const float peak = peaks.max();
        Vec total = Vec::zero();
        for (int i = 0; i < padded; i += Vec::lanes) {
            const Vec weight = vexp(Vec::load(x + i) - Vec::all(peak));
            weight.store(x + i);
            total = total + weight;
        }
        state[head_dim] = total.sum();
        state[head_dim + 1] = peak;
    }

    void add_chunk(const Chunk& c, const RowBlock& of, bool direct) const {
        const auto run = [&](int row, int n_rows, int first, int last) {
            if (first >= last) return;
            const AddValues add = direct ? add_values_of<Halves>(n_rows) : add_values_of<Floats>(n_rows);
            add(c, first - c.begin, last - c.begin, head_dim, scores + size_t(row) * kScoreStride + c.begin,
                sums + size_t(row) * width, width);
        };
        const int common = of.visible_to_all < c.end ? of.visible_to_all : c.end;
        run(of.first, of.rows, c.begin, common);
        if (of.visible_to_any <= c.begin || common == c.end) return;
        for (int row = of.first; row < of.first + of.rows; ++row) {
            const int limit = visible(row);
            run(row, 1, common > c.begin ? common : c.begin, limit < c.end ? limit : c.end);
        }
    }

    void add_up() const {
        const bool direct = reads_arena(layout.v_type) && head_dim == width;
        for (size_t i = 0; i < size_t(rows) * width; ++i) sums[i] = 0.0f;
        for (int index = 0; index < n_chunks(); ++index) {
            Chunk c = chunk(n_chunks() + index);
            if (!direct) widen(c, layout.v_type, widen_v_tile);
            for (int b = 0; b < n_blocks; ++b) add_chunk(c, block(b), direct);
        }
    }
};

static void attend(const AttendJob& job, int begin, int end, float* states, uint8_t* scratch) {
    const Attention attention(job, begin, end, scratch);
    const int head_dim = attention.head_dim;
    attention.score();
    for (int row = 0; row < attention.rows; ++row) attention.soften(row, states + size_t(row) * (head_dim + 2));
    attention.add_up();
    for (int row = 0; row < attention.rows; ++row) {
        std::memcpy(states + size_t(row) * (head_dim + 2), attention.sums + size_t(row) * attention.width,
                    size_t(head_dim) * sizeof(float));
    }
}

static void merge_states(float* into, const float* later, int64_t n_states, int head_dim) {
    const int size = head_dim + 2;
    for (int64_t i = 0; i < n_states; ++i, into += size, later += size) {
        if (later[head_dim] == 0.0f) continue;  // sees nothing there
        if (into[head_dim] == 0.0f) {
            std::memcpy(into, later, size_t(size) * sizeof(float));
            continue;
        }
        const float peak = into[head_dim + 1] > later[head_dim + 1] ? into[head_dim + 1] : later[head_dim + 1];
        const float keep = vexp(Vec::all(into[head_dim + 1] - peak)).max();
        const float gain = vexp(Vec::all(later[head_dim + 1] - peak)).max();
        for (int d = 0; d <= head_dim; ++d) into[d] = into[d] * keep + later[d] * gain;
        into[head_dim + 1] = peak;
    }
}

static void finish_state(const float* state, int head_dim, float* out) {
    const float share = 1.0f / state[head_dim];
    for (int d = 0; d < head_dim; ++d) out[d] = state[d] * share;
}

}  // namespace CLLM_NS
}  // namespace cllm

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

#include <utility>

#include "attention_sizes.h"
#include "kv_tiles.inl"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

// kRowBlock: rows computed together; kAccumulators: vectors of running sums that fit in the registers beside what they are
// computed from; kDirectRows: up to so many rows, converting halves anew for each block of rows beats storing them as floats.
#if defined(CLLM_AVX512)
constexpr int kRowBlock = 6, kAccumulators = 24, kDirectRows = 12;
#elif defined(CLLM_AVX2)
constexpr int kRowBlock = 6, kAccumulators = 12, kDirectRows = 12;
#else
constexpr int kRowBlock = 2, kAccumulators = 4, kDirectRows = 2;
#endif

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

// Positions of one chunk, counted from the split's first; its tiles, and those to fetch from memory meanwhile.
struct Chunk {
    int begin, end;
    const uint8_t* const* tiles;
    const uint8_t* const* ahead;
};

// e^x for x <= 0. Beside the peak's weight, which is 1, one below e^-60 cannot be told from e^-60; but its products with
// values would be subnormal numbers, which are slow.
CLLM_INLINE Vec weight_of(Vec x) { return exp_within(vmax(x, Vec::all(-60.0f))); }

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

// The function for a number of rows, 1 to kRowBlock.
template <class Source, int... kRows>
static ScoreBlock score_block_for(int rows, std::integer_sequence<int, kRows...>) {
    static constexpr ScoreBlock table[] = {score_block<Source, kRows + 1>...};
    return table[rows - 1];
}

template <class Source, int... kRows>
static AddValues add_values_for(int rows, std::integer_sequence<int, kRows...>) {
    static constexpr AddValues table[] = {add_values<Source, kRows + 1>...};
    return table[rows - 1];
}

using RowCounts = std::make_integer_sequence<int, kRowBlock>;

// One call of `attend`: the job, how its rows are cut into blocks, where its tiles and its intermediate results lie.
struct Attention {
    static constexpr int kMaxTiles = kSplit / kTileTokens;

    const AttendJob& job;
    const KVLayout& layout;
    int begin, end;                    // positions
    int head_dim, width;               // width: head_dim rounded up to whole vectors
    int rows, n_blocks, block_rows, n_larger;  // of the row blocks, the first n_larger have one row more than block_rows
    int n_chunks;
    float *sums, *scores;
    const uint8_t* tiles[2 * kMaxTiles + kChunkTiles];  // of K, whole chunks; then of V; then whatever the last may fetch
    const uint8_t* float_tiles[kChunkTiles];

    Attention(const AttendJob& j, int first, int last, uint8_t* scratch)
        : job(j), layout(*j.layout), begin(first), end(last), head_dim(layout.head_dim),
          width((head_dim + Vec::lanes - 1) / Vec::lanes * Vec::lanes), rows(j.tokens * j.heads),
          n_blocks((rows + kRowBlock - 1) / kRowBlock), block_rows(rows / n_blocks), n_larger(rows % n_blocks),
          n_chunks((end - begin + kChunkTokens - 1) / kChunkTokens) {
        const AttendScratch offsets(head_dim, rows);
        const uintptr_t misaligned = reinterpret_cast<uintptr_t>(scratch) % kScratchAlign;
        float* base = reinterpret_cast<float*>(scratch + (misaligned ? kScratchAlign - misaligned : 0));
        sums = base + offsets.sums;
        scores = base + offsets.scores;
        for (int t = 0; t < kChunkTiles; ++t) {
            float_tiles[t] = reinterpret_cast<const uint8_t*>(base + offsets.chunk + size_t(t) * kTileTokens * head_dim);
        }
        locate();
    }

    void locate() {
        const size_t block_bytes = layout.block_bytes();
        const size_t k_offset = layout.k_tile(job.layer, job.kv_head, 0), k_bytes = layout.k_tile_bytes();
        const size_t v_offset = layout.v_tile(job.layer, job.kv_head, 0), v_bytes = layout.v_tile_bytes();
        const int32_t* block = job.blocks + begin / layout.block_size;
        int tile = begin % layout.block_size / kTileTokens;
        const uint8_t** of_values = tiles + n_chunks * kChunkTiles;
        for (int i = 0; i < n_chunks * kChunkTiles; ++i) {
            // Places behind the last tile are filled with it: they may be fetched, but are not used.
            if (begin + i * kTileTokens >= end) {
                tiles[i] = tiles[i - 1];
                of_values[i] = of_values[i - 1];
                continue;
            }
            const uint8_t* base = job.arena + size_t(*block) * block_bytes;
            tiles[i] = base + k_offset + size_t(tile) * k_bytes;
            of_values[i] = base + v_offset + size_t(tile) * v_bytes;
            if (++tile == layout.tiles_per_block()) {
                tile = 0;
                ++block;
            }
        }
        for (int t = 0; t < kChunkTiles; ++t) tiles[2 * n_chunks * kChunkTiles + t] = of_values[n_chunks * kChunkTiles - 1];
    }

    // Positions of the split that a row may see, perhaps none.
    CLLM_INLINE int visible(int row) const {
        const int limit = job.first_position + (job.tokens == 1 ? 0 : row / job.heads) + 1;
        return limit <= begin ? 0 : (limit < end ? limit : end) - begin;
    }

    CLLM_INLINE RowBlock block(int index) const {
        const int first = index * block_rows + (index < n_larger ? index : n_larger);
        const int count = block_rows + (index < n_larger ? 1 : 0);
        return {first, count, visible(first), visible(first + count - 1)};
    }

    // Chunks are numbered through: those of K, then those of V.
    CLLM_INLINE Chunk chunk(int index) const {
        const int first = (index < n_chunks ? index : index - n_chunks) * kChunkTokens;
        const int last = first + kChunkTokens < end - begin ? first + kChunkTokens : end - begin;
        return {first, last, tiles + index * kChunkTiles, tiles + (index + 1) * kChunkTiles};
    }

    CLLM_INLINE bool reads_arena(KVType type) const { return type == KVType::f16 && rows <= kDirectRows; }

    CLLM_INLINE const float* query(int row) const {
        return job.q + row / job.heads * job.q_stride + row % job.heads * head_dim;
    }

    // The chunk as floats in the scratch memory.
    template <class Widen>
    CLLM_INLINE Chunk widened(const Chunk& c, KVType type, Widen widen) const {
        for (int t = 0; t * kTileTokens < c.end - c.begin; ++t) {
            float* out = reinterpret_cast<float*>(const_cast<uint8_t*>(float_tiles[t]));
            widen(type, c.tiles[t], c.ahead[t], head_dim, out);
        }
        return {c.begin, c.end, float_tiles, c.ahead};
    }

    void score() const {
        const bool direct = reads_arena(layout.k_type);
        for (int index = 0; index < n_chunks; ++index) {
            const Chunk c = direct ? chunk(index) : widened(chunk(index), layout.k_type, widen_k_tile);
            for (int b = 0; b < n_blocks; ++b) {
                const RowBlock of = block(b);
                const int last = of.visible_to_any < c.end ? of.visible_to_any : c.end;
                if (last <= c.begin) continue;
                const ScoreBlock run = direct ? score_block_for<Halves>(of.rows, RowCounts())
                                              : score_block_for<Floats>(of.rows, RowCounts());
                const float* q[kRowBlock];
                for (int r = 0; r < of.rows; ++r) q[r] = query(of.first + r);
                run(c, (last - c.begin + kTileTokens - 1) / kTileTokens, head_dim, q,
                    scores + size_t(of.first) * kScoreStride + c.begin);
            }
        }
    }

    // Each row's largest visible score; what follows it in its last vector becomes -infinity.
    void find_peaks(const RowBlock& of, float* states) const {
        float limits[2 * Vec::lanes];
        for (int i = 0; i < 2 * Vec::lanes; ++i) limits[i] = i < Vec::lanes ? INFINITY : -INFINITY;
        for (int row = of.first; row < of.first + of.rows; ++row) {
            float* x = scores + size_t(row) * kScoreStride;
            const int n = visible(row);
            Vec peaks = Vec::all(-INFINITY);
            int i = 0;
            for (; i + Vec::lanes <= n; i += Vec::lanes) peaks = vmax(Vec::load(x + i), peaks);
            if (i < n) {
                const Vec last = vmin(Vec::load(x + i), Vec::load(limits + Vec::lanes - (n - i)));
                last.store(x + i);
                peaks = vmax(last, peaks);
            }
            states[size_t(row) * (head_dim + 2) + head_dim + 1] = peaks.max();
        }
    }

    // Turns scores into weights and adds them up. Apart from find_peaks, so that rows overlap in the pipeline.
    void soften(const RowBlock& of, float* states) const {
        for (int row = of.first; row < of.first + of.rows; ++row) {
            float* x = scores + size_t(row) * kScoreStride;
            float* sum_and_peak = states + size_t(row) * (head_dim + 2) + head_dim;
            const Vec peak = Vec::all(sum_and_peak[1]);
            const int n = visible(row);
            Vec total = Vec::zero();
            for (int i = 0; i < n; i += Vec::lanes) {
                const Vec weight = weight_of(Vec::load(x + i) - peak);
                weight.store(x + i);
                total = total + weight;
            }
            sum_and_peak[0] = total.sum();
        }
    }

    void add_chunk(const Chunk& c, const RowBlock& of, bool direct) const {
        const auto run = [&](int row, int n_rows, int first, int last) {
            if (first >= last) return;
            const AddValues add = direct ? add_values_for<Halves>(n_rows, RowCounts()) : add_values_for<Floats>(n_rows, RowCounts());
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
        for (int index = 0; index < n_chunks; ++index) {
            const Chunk found = chunk(n_chunks + index);
            const Chunk c = direct ? found : widened(found, layout.v_type, widen_v_tile);
            for (int b = 0; b < n_blocks; ++b) add_chunk(c, block(b), direct);
        }
    }
};

static void attend(const AttendJob& job, int begin, int end, float* states, uint8_t* scratch) {
    const Attention attention(job, begin, end, scratch);
    const int head_dim = attention.head_dim;
    attention.score();
    for (int b = 0; b < attention.n_blocks; ++b) {
        attention.find_peaks(attention.block(b), states);
        attention.soften(attention.block(b), states);
    }
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
        const float keep = weight_of(Vec::all(into[head_dim + 1] - peak)).max();
        const float gain = weight_of(Vec::all(later[head_dim + 1] - peak)).max();
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

// Attention of a tile of query rows over one split of a sequence's positions.
//
// A row is a (token, head) pair; all rows of a tile share the kv head, so a K or V vector is fetched and converted
// once for many of them. Work goes in chunks of kChunkTiles tiles and, inside, in blocks of at most kRowBlock rows:
// the scores of the whole split, then each row's weights, their sum and their peak, then the weighted sums of V.
//
// Slots that were never written may hold anything, NaN too. Their scores are computed, as lanes are independent, and
// then overwritten; their V is never touched, as 0 * NaN is not 0. The same goes for positions a row may not see.
#pragma once

#include "attention_kernels.inl"

namespace cllm {
namespace CLLM_NS {

// e^x for x <= 0. Beside the peak's weight, which is 1, one below e^-60 cannot be told from e^-60; but its products
// with values would be subnormal numbers, which are slow.
CLLM_INLINE Vec weight_of(Vec x) { return exp_within(vmax(x, Vec::all(-60.0f))); }

struct RowBlock {
    int first, rows;
    int visible_to_all;  // positions of the split that each of its rows may see
    int visible_to_any;
};

// One call of `attend`: the job, how its rows are cut into blocks, where its tiles and its intermediate results lie.
struct Attention {
    static constexpr int kMaxTiles = kSplit / kTileTokens;

    const AttendJob& job;
    const KVLayout& layout;
    int begin, end;                            // positions
    int head_dim, width;                       // width: head_dim rounded up to whole vectors
    int rows, n_blocks, block_rows, n_larger;  // the first n_larger row blocks have one row more than block_rows
    int n_chunks;
    float *sums, *scores, *floats;
    const uint8_t* tiles[2 * kMaxTiles + kChunkTiles];  // whole chunks of K, then of V, then what the last one fetches
    const uint8_t* float_tiles[kChunkTiles];            // a chunk in `floats`

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
        floats = base + offsets.chunk;
        for (int t = 0; t < kChunkTiles; ++t) {
            float_tiles[t] = reinterpret_cast<const uint8_t*>(floats + size_t(t) * kTileTokens * head_dim);
        }
        locate();
    }

    void locate() {
        const size_t block_bytes = layout.block_bytes();
        const size_t k_offset = layout.k_tile(job.layer, job.kv_head, 0), k_bytes = layout.k_tile_bytes();
        const size_t v_offset = layout.v_tile(job.layer, job.kv_head, 0), v_bytes = layout.v_tile_bytes();
        const int32_t* block = job.blocks + begin / layout.block_size;
        int tile = begin % layout.block_size / kTileTokens;
        const int n = n_chunks * kChunkTiles;
        const uint8_t** of_values = tiles + n;
        for (int i = 0; i < n; ++i) {
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
        for (int t = 0; t < kChunkTiles; ++t) of_values[n + t] = of_values[n - 1];
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

    CLLM_INLINE void find_queries(const RowBlock& of, const float** q) const {
        int token = of.first / job.heads, head = of.first % job.heads;
        for (int r = 0; r < of.rows; ++r) {
            q[r] = job.q + token * job.q_stride + head * head_dim;
            if (++head == job.heads) {
                head = 0;
                ++token;
            }
        }
    }

    // The chunk as floats in the scratch memory.
    template <class Widen>
    CLLM_INLINE Chunk widened(const Chunk& c, KVType type, Widen widen) const {
        for (int t = 0; t * kTileTokens < c.end - c.begin; ++t) {
            widen(type, c.tiles[t], c.ahead[t], head_dim, floats + size_t(t) * kTileTokens * head_dim);
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
                find_queries(of, q);
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
            const AddValues add = direct ? add_values_for<Halves>(n_rows, RowCounts())
                                         : add_values_for<Floats>(n_rows, RowCounts());
            add(c, first - c.begin, last - c.begin, head_dim, scores + size_t(row) * kScoreStride + c.begin,
                sums + size_t(row) * width, width);
        };
        // Rows of a block differ in what they see by a few positions at most; those are added row by row.
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

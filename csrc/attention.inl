// Attention of a tile of query rows over one split of a sequence's positions.
//
// A row is a (token, head) pair; all rows of a tile share the kv head, so a K or V vector is fetched and converted
// once for many of them. Work goes in chunks of kChunkTiles tiles and, inside, in blocks of at most kRowBlock rows:
// the scores of the whole split, then each row's weights, their sum and their peak, then the weighted sums of V (of a
// quantised type in groups of 32 dimensions instead of chunks).
//
// Slots that were never written may hold anything, NaN, too. Their scores are computed, since lanes are independent, and then
// overwritten; their V is never read, since 0 * NaN is not 0, and nor are the scales of quantised ones: codes are always
// finite, so a weight of 0 is enough there. The same holds for positions that a row may not see: those after it, and those before its
// window. A split begins where a tile of rows first sees something, at a whole tile.
#pragma once

#include "attention_quants.inl"

namespace cllm {
namespace CLLM_NS {

// e^x for x <= 0, at least e^-60: beside the peak's weight, which is 1, smaller ones make no difference, but their products
// with values would be subnormal numbers, which are slow.
CLLM_INLINE Vec weight_of(Vec x) { return exp_within(vmax(x, Vec::all(-60.0f))); }

struct RowBlock {
    int first, rows;
    int hidden_from_any;  // positions of the split that lie before what one of its rows may see
    int visible_to_all;   // where those end that each of its rows may see
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
    uint8_t* unpacked;                         // tiles of q4_0 as q8_0
    int16_t *queries, *weights;
    float *query_units, *value_scales;
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
        unpacked = reinterpret_cast<uint8_t*>(base + offsets.unpacked);
        queries = reinterpret_cast<int16_t*>(base + offsets.queries);
        query_units = base + offsets.query_units;
        weights = reinterpret_cast<int16_t*>(base + offsets.weights);
        value_scales = base + offsets.value_scales;
        for (int t = 0; t < kChunkTiles; ++t) {
            float_tiles[t] = reinterpret_cast<const uint8_t*>(floats + size_t(t) * kTileTokens * head_dim);
        }
        locate();
    }

    void locate() {
        const size_t cell_bytes = layout.cell_bytes;
        const size_t k_offset = layout.k_tile(job.kv_head, 0), k_bytes = layout.k_tile_bytes();
        const size_t v_offset = layout.v_tile(job.kv_head, 0), v_bytes = layout.v_tile_bytes();
        const int32_t* cell = layout.entry(job.table, begin / layout.block_size);
        int tile = begin % layout.block_size / kTileTokens;
        const int n = n_chunks * kChunkTiles;
        const uint8_t** of_values = tiles + n;
        for (int i = 0; i < n; ++i) {
            // Entries after the last tile repeat it: they may be fetched, but are not used.
            if (begin + i * kTileTokens >= end) {
                tiles[i] = tiles[i - 1];
                of_values[i] = of_values[i - 1];
                continue;
            }
            const uint8_t* base = job.arena + size_t(*cell) * cell_bytes;
            tiles[i] = base + k_offset + size_t(tile) * k_bytes;
            of_values[i] = base + v_offset + size_t(tile) * v_bytes;
            if (++tile == layout.tiles_per_block()) {
                tile = 0;
                cell += layout.cells;
            }
        }
        for (int t = 0; t < kChunkTiles; ++t) of_values[n + t] = of_values[n - 1];
    }

    CLLM_INLINE int limit(int row) const { return job.first_position + (job.tokens == 1 ? 0 : row / job.heads) + 1; }

    // A row may see the split's positions [hidden, visible), perhaps none.
    CLLM_INLINE int visible(int row) const {
        const int last = limit(row);
        return last <= begin ? 0 : (last < end ? last : end) - begin;
    }
    CLLM_INLINE int hidden(int row) const {
        const int first = limit(row) - job.window;
        return first <= begin ? 0 : (first < end ? first : end) - begin;
    }

    CLLM_INLINE RowBlock block(int index) const {
        const int first = index * block_rows + (index < n_larger ? index : n_larger);
        const int count = block_rows + (index < n_larger ? 1 : 0);
        return {first, count, hidden(first + count - 1), visible(first), visible(first + count - 1)};
    }

    // Chunks are numbered through: those of K, then those of V.
    CLLM_INLINE Chunk chunk(int index) const {
        const int first = (index < n_chunks ? index : index - n_chunks) * kChunkTokens;
        const int last = first + kChunkTokens < end - begin ? first + kChunkTokens : end - begin;
        return {first, last, tiles + index * kChunkTiles, tiles + (index + 1) * kChunkTiles};
    }

    CLLM_INLINE bool reads_arena() const { return rows <= kDirectRows; }

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
    CLLM_INLINE Chunk widened(const Chunk& c) const {
        for (int t = 0; t * kTileTokens < c.end - c.begin; ++t) {
            widen_halves(c.tiles[t], c.ahead[t], head_dim, floats + size_t(t) * kTileTokens * head_dim);
        }
        return {c.begin, c.end, float_tiles, c.ahead};
    }

    void score_halves() const {
        const bool direct = reads_arena();
        for (int index = 0; index < n_chunks; ++index) {
            const Chunk c = direct ? chunk(index) : widened(chunk(index));
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

    // The chunk as q8_0, its tiles listed in `found`.
    CLLM_INLINE Chunk unpack_keys(const Chunk& c, const uint8_t** found) const {
        uint8_t* to = unpacked;
        for (int t = 0; t * kTileTokens < c.end - c.begin; ++t) {
            const uint8_t *from = c.tiles[t], *ahead = c.ahead[t];
            found[t] = to;
            for (int d = 0; d < head_dim; d += kQuantGroup, to += kByteGroup) {
                unpack_group(from, ahead, to);
                from += group_bytes(KVType::q4_0);
                ahead += group_bytes(KVType::q4_0);
            }
        }
        return {c.begin, c.end, found, c.ahead};
    }

    void score_quants() const {
        const bool nibbles = layout.k_type == KVType::q4_0;
        const float unit = nibbles ? kLevelUnit : 1.0f;
        for (int b = 0; b < n_blocks; ++b) {
            const RowBlock of = block(b);
            const float* q[kRowBlock];
            find_queries(of, q);
            for (int r = 0; r < of.rows; ++r) {
                const int row = of.first + r;
                query_units[row] = unit * round_query(q[r], head_dim, queries + size_t(row) * head_dim);
            }
        }
        for (int index = 0; index < n_chunks; ++index) {
            const uint8_t* found[kChunkTiles];
            const Chunk c = nibbles ? unpack_keys(chunk(index), found) : chunk(index);
            for (int b = 0; b < n_blocks; ++b) {
                const RowBlock of = block(b);
                const int last = of.visible_to_any < c.end ? of.visible_to_any : c.end;
                if (last <= c.begin) continue;
                const ScoreBytes run = nibbles ? score_bytes_for<false>(of.rows, RowCounts())
                                               : score_bytes_for<true>(of.rows, RowCounts());
                run(c, (last - c.begin + kTileTokens - 1) / kTileTokens, head_dim, queries + size_t(of.first) * head_dim,
                    query_units + of.first, scores + size_t(of.first) * kScoreStride + c.begin);
            }
        }
    }

    void cap_scores(const RowBlock& of) const {
        const Vec to = Vec::all(1.0f / job.softcap), back = Vec::all(job.softcap);
        for (int row = of.first; row < of.first + of.rows; ++row) {
            float* x = scores + size_t(row) * kScoreStride;
            const int n = visible(row);
            for (int i = hidden(row) / Vec::lanes * Vec::lanes; i < n; i += Vec::lanes)
                (vtanh(Vec::load(x + i) * to) * back).store(x + i);
        }
    }

    // Each row's largest visible score; the rest of its first and its last vector becomes -infinity.
    void find_peaks(const RowBlock& of, float* states) const {
        float limits[2 * Vec::lanes];
        for (int i = 0; i < 2 * Vec::lanes; ++i) limits[i] = i < Vec::lanes ? INFINITY : -INFINITY;
        for (int row = of.first; row < of.first + of.rows; ++row) {
            float* x = scores + size_t(row) * kScoreStride;
            const int n = visible(row), skipped = hidden(row);
            Vec peaks = Vec::all(-INFINITY);
            int i = skipped / Vec::lanes * Vec::lanes;
            for (int h = i; h < skipped; ++h) x[h] = -INFINITY;
            for (; i + Vec::lanes <= n; i += Vec::lanes) peaks = vmax(Vec::load(x + i), peaks);
            if (i < n) {
                const Vec last = vmin(Vec::load(x + i), Vec::load(limits + Vec::lanes - (n - i)));
                last.store(x + i);
                peaks = vmax(last, peaks);
            }
            states[size_t(row) * (head_dim + 2) + head_dim + 1] = peaks.max();
        }
    }

    // Turns scores into weights (0 for hidden positions, and for later ones in the last tile) and adds them up. Separate from find_peaks, so that
    // rows overlap in the pipeline.
    void exponentiate(const RowBlock& of, float* states) const {
        for (int row = of.first; row < of.first + of.rows; ++row) {
            float* x = scores + size_t(row) * kScoreStride;
            float* sum_and_peak = states + size_t(row) * (head_dim + 2) + head_dim;
            const Vec peak = Vec::all(sum_and_peak[1]);
            const int n = visible(row), skipped = hidden(row);
            Vec total = Vec::zero();
            for (int i = skipped < n ? skipped / Vec::lanes * Vec::lanes : n; i < n; i += Vec::lanes) {
                const Vec weight = weight_of(Vec::load(x + i) - peak);
                weight.store(x + i);
                total = total + weight;
            }
            sum_and_peak[0] = total.sum();
            for (int i = 0; i < skipped; ++i) x[i] = 0.0f;
            for (int i = n; i % kTileTokens != 0; ++i) x[i] = 0.0f;
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
        // Rows of a block differ in what they see by a few positions at most; those are added row by row, in order.
        const auto alone = [&](int first, int last) {
            for (int row = of.first; row < of.first + of.rows; ++row) {
                const int from = hidden(row), to = visible(row);
                run(row, 1, from > first ? from : first, to < last ? to : last);
            }
        };
        const int first = of.hidden_from_any > c.begin ? of.hidden_from_any : c.begin;
        const int last = of.visible_to_all < c.end ? of.visible_to_all : c.end;
        if (of.visible_to_any <= c.begin) return;
        if (first >= last) return alone(c.begin, c.end);
        if (first > c.begin) alone(c.begin, first);
        run(of.first, of.rows, first, last);
        if (last < c.end) alone(last, c.end);
    }

    void add_halves(float* states) const {
        const bool direct = reads_arena() && head_dim == width;
        for (size_t i = 0; i < size_t(rows) * width; ++i) sums[i] = 0.0f;
        for (int index = 0; index < n_chunks; ++index) {
            const Chunk found = chunk(n_chunks + index);
            const Chunk c = direct ? found : widened(found);
            for (int b = 0; b < n_blocks; ++b) add_chunk(c, block(b), direct);
        }
        for (int row = 0; row < rows; ++row) {
            std::memcpy(states + size_t(row) * (head_dim + 2), sums + size_t(row) * width, size_t(head_dim) * sizeof(float));
        }
    }

    // The weights of a block's rows for the group whose scales are in `value_scales`, and their units. Bytes of positions
    // that a row may not see are multiplied with 0.
    void weigh(const RowBlock& of, int n_tiles, float* units) const {
        for (int r = 0; r < of.rows; ++r) {
            const int seen = (visible(of.first + r) + kTileTokens - 1) / kTileTokens;
            int16_t* to = weights + r * kSplit;
            units[r] = round_weights(scores + size_t(of.first + r) * kScoreStride, value_scales, seen, to);
            if (layout.v_type == KVType::q4_0) units[r] *= kLevelUnit;
            std::memset(to + seen * kTileTokens, 0, size_t(n_tiles - seen) * kTileTokens * sizeof(int16_t));
        }
    }

    void add_quants(float* states) const {
        const bool nibbles = layout.v_type == KVType::q4_0;
        const int n_tiles = (end - begin + kTileTokens - 1) / kTileTokens, groups = head_dim / kQuantGroup;
        const uint8_t* const* values = tiles + n_chunks * kChunkTiles;
        const uint8_t* places[kMaxTiles + kChunkTiles];  // of the group, then the first ones of the next
        const uint8_t* opened[kMaxTiles];
        for (int g = 0; g < groups; ++g) {
            for (int i = 0; i < n_tiles + kChunkTiles; ++i) {
                const int tile = i % n_tiles, of = g + i / n_tiles < groups ? g + i / n_tiles : groups - 1;
                places[i] = values[tile] + of * group_bytes(layout.v_type);
            }
            for (int i = 0; i < n_tiles; ++i) {
                opened[i] = nibbles ? unpacked + i * kByteGroup : places[i];
                if (nibbles) unpack_group(places[i], places[i + kChunkTiles], unpacked + i * kByteGroup);
                for (int at = 0; at < kTileTokens; at += Vec::lanes) {
                    const Vec scales = Vec::load_f16(reinterpret_cast<const uint16_t*>(opened[i]) + at);
                    scales.store(value_scales + i * kTileTokens + at);
                }
            }
            for (int b = 0; b < n_blocks; ++b) {
                const RowBlock of = block(b);
                const int any = (of.visible_to_any + kTileTokens - 1) / kTileTokens;
                float units[kRowBlock];
                weigh(of, any, units);
                add_bytes_for(of.rows, RowCounts())({opened, nibbles ? opened : places + kChunkTiles}, any, weights, units,
                                                    states + size_t(of.first) * (head_dim + 2) + g * kQuantGroup,
                                                    head_dim + 2);
            }
        }
    }
};

static void attend(const AttendJob& job, int begin, int end, float* states, uint8_t* scratch) {
    const Attention attention(job, begin, end, scratch);
    const bool k_halves = job.layout->k_type == KVType::f16, v_halves = job.layout->v_type == KVType::f16;
    k_halves ? attention.score_halves() : attention.score_quants();
    for (int b = 0; b < attention.n_blocks; ++b) {
        if (job.softcap != 0.0f) attention.cap_scores(attention.block(b));
        attention.find_peaks(attention.block(b), states);
        attention.exponentiate(attention.block(b), states);
    }
    v_halves ? attention.add_halves(states) : attention.add_quants(states);
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

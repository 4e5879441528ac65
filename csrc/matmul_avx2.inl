// Products with quantised weights by VPMADDUBSW, or with VNNI by VPDPBUSD: eight output rows are the lanes of a register,
// four columns at a time.
//
// Without VNNI, products of unsigned quants and inputs are added up in int16 over as many quads of columns as cannot overflow,
// then in int32; those of signed bytes at once. The integer sums are exact; the float sequence after each group is the same for
// every number of inputs T and of tiles R, packed or opened.
#pragma once

#include "matmul_blocks_avx2.inl"
#include "matmul_float.inl"

namespace cllm {
namespace CLLM_NS {

constexpr int64_t kInputBytes = 400000;  // of inputs multiplied with one tile: they stay in the L2 cache
constexpr int64_t kInputsTogether = kPanelRows;

constexpr int kAheadBytes = 1024;        // how far ahead a packed tile is prefetched

// The inputs of T rows of one panel.
template <int T>
struct Inputs {
    const int8_t* values;
    const float* scales;
    const float* sums;
    const int32_t* offsets;

    CLLM_INLINE Inputs(const QuantRows& a, int64_t first_row, bool groups_of_16) {
        const int64_t runs = a.cols / kRun, panel = first_row / kPanelRows;
        values = a.values + panel * kPanelRows * a.cols;
        scales = a.scales + panel * kPanelRows * runs;
        sums = a.sums + panel * kPanelRows * runs;
        offsets = groups_of_16 ? a.offsets16 + panel * kPanelRows * runs * 2 : a.offsets32 + panel * kPanelRows * runs;
    }
    CLLM_INLINE __m256i quad(int t, int64_t at) const {
        int32_t four;
        std::memcpy(&four, values + (at * kPanelRows + t) * 4, 4);
        return _mm256_set1_epi32(four);
    }
    CLLM_INLINE __m256 scale(int t, int64_t run) const { return _mm256_set1_ps(scales[run * kPanelRows + t]); }
    // Of the columns of a group, which is group `group` of the row.
    template <int Group>
    CLLM_INLINE __m256 sum(int t, int64_t group) const {
        if constexpr (Group == kRun) return _mm256_set1_ps(sums[group * kPanelRows + t]);
        const float whole = kSumOfOffset * float(offsets[group * kPanelRows + t]);
        return _mm256_set1_ps(scales[group * Group / kRun * kPanelRows + t] * whole);
    }
    // The offsets that remove the centre from a group's sum.
    template <int Centre>
    CLLM_INLINE __m256i offset(int t, int64_t group) const {
        const __m256i of_128 = _mm256_set1_epi32(offsets[group * kPanelRows + t]);
        return Centre == 128 ? of_128 : _mm256_srai_epi32(of_128, shift_to(Centre));
    }
};

#if defined(CLLM_AVXVNNI)

// The products of quads [Quad, Last) of a run, onto the sums.
template <int Quad, int Last, class Block, int T>
CLLM_INLINE void sum_quads(const Block& block, int run, const Inputs<T>& in, int64_t first_quad, __m256i (&sums)[2][T]) {
    if constexpr (Quad < Last) {
        const __m256i top = block.template line<Quad>(run, 0), bottom = block.template line<Quad>(run, 1);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            const __m256i x = in.quad(t, first_quad + Quad);
            sums[0][t] = _mm256_dpbusd_avx_epi32(sums[0][t], top, x);
            sums[1][t] = _mm256_dpbusd_avx_epi32(sums[1][t], bottom, x);
        }
        sum_quads<Quad + 1, Last>(block, run, in, first_quad, sums);
    }
}

#else

// Quads of a group whose products fit int16 together: 2 * 127 * the largest quant each. None of signed bytes.
CLLM_INLINE constexpr int quads_in_16_bits(const Layout& layout) {
    const int fitting = layout.bits <= 4 ? 8 : layout.bits == 5 ? 4 : layout.bits == 6 ? 2 : 1, quads = layout.group / 4;
    return fitting < quads ? fitting : quads;
}

// Adds in the order as written. Otherwise the compiler, which may reorder integer sums, computes all products of a group
// first and spills them to memory.
CLLM_INLINE void add_pairs(__m256i& sum, __m256i products) {
    sum = _mm256_add_epi16(sum, products);
    __asm__("" : "+x"(sum));
}

// The products of quads [Quad, Last) of a run, onto the sums in int16.
template <int Quad, int Last, class Block, int T>
CLLM_INLINE void add_quads(const Block& block, int run, const Inputs<T>& in, int64_t first_quad, __m256i (&pairs)[2][T]) {
    if constexpr (Quad < Last) {
        const __m256i top = block.template line<Quad>(run, 0), bottom = block.template line<Quad>(run, 1);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            const __m256i x = in.quad(t, first_quad + Quad);
            add_pairs(pairs[0][t], _mm256_maddubs_epi16(top, x));
            add_pairs(pairs[1][t], _mm256_maddubs_epi16(bottom, x));
        }
        add_quads<Quad + 1, Last>(block, run, in, first_quad, pairs);
    }
}

// Signed bytes: the weight's sign moves to the input, since the instruction wants one side unsigned.
template <int Quad, class Block, int T>
CLLM_INLINE void add_signed_quad(const Block& block, int run, const Inputs<T>& in, int64_t first_quad, __m256i (&sums)[2][T]) {
    __m256i w[2], magnitude[2];
    for (int half = 0; half < 2; ++half) {
        w[half] = block.template line<Quad>(run, half);
        magnitude[half] = _mm256_abs_epi8(w[half]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
        const __m256i x = in.quad(t, first_quad + Quad);
        for (int half = 0; half < 2; ++half) {
            const __m256i pairs = _mm256_maddubs_epi16(magnitude[half], _mm256_sign_epi8(x, w[half]));
            sums[half][t] = _mm256_add_epi32(sums[half][t], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
}

// The products of quads [Quad, Last) of a run, onto the sums in int32.
template <int Quad, int Last, class Block, int T>
CLLM_INLINE void sum_quads(const Block& block, int run, const Inputs<T>& in, int64_t first_quad, __m256i (&sums)[2][T]) {
    if constexpr (Quad < Last) {
        constexpr int step = quads_in_16_bits(Block::layout);
        if constexpr (Block::layout.bits == 8) {
            add_signed_quad<Quad>(block, run, in, first_quad, sums);
        } else {
            __m256i pairs[2][T];
            for (int half = 0; half < 2; ++half)
                for (int t = 0; t < T; ++t) pairs[half][t] = _mm256_setzero_si256();
            add_quads<Quad, Quad + step>(block, run, in, first_quad, pairs);
            for (int half = 0; half < 2; ++half)
                for (int t = 0; t < T; ++t)
                    sums[half][t] = _mm256_add_epi32(sums[half][t], _mm256_madd_epi16(pairs[half][t], _mm256_set1_epi16(1)));
        }
        sum_quads<Quad + step, Last>(block, run, in, first_quad, sums);
    }
}

#endif

// The integer sums of the row's group `group`, of a tile's upper and its lower eight rows, scaled onto accumulators that live
// in memory.
template <class Block, int T>
CLLM_INLINE void scale_sums(const __m256i (&sums)[2][T], const float* factors, const Inputs<T>& in, int64_t group,
                            float (*acc)[kTileRows]) {
    constexpr Layout layout = Block::layout;
    for (int t = 0; t < T; ++t) {
        const __m256 input_scale = in.scale(t, group * layout.group / kRun);
        const __m256 input_sum = layout.has_min ? in.template sum<layout.group>(t, group) : _mm256_setzero_ps();
        for (int half = 0; half < 2; ++half) {
            __m256 total = _mm256_load_ps(acc[t] + half * 8);
            if (layout.has_min) total = _mm256_fmadd_ps(_mm256_load_ps(factors + kTileRows + half * 8), input_sum, total);
            const __m256 scale = _mm256_mul_ps(_mm256_load_ps(factors + half * 8), input_scale);
            _mm256_store_ps(acc[t] + half * 8, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[half][t]), scale, total));
        }
    }
}

// The groups of run `run` of a block, which is run `at` of the row; from quad Quad on.
template <int Quad, class Block, int T>
CLLM_INLINE void add_run(const Block& block, int run, const Inputs<T>& in, int64_t at, float (*acc)[kTileRows]) {
    if constexpr (Quad < kRunLines) {
        constexpr Layout layout = Block::layout;
        constexpr int quads = layout.group / 4, groups = kRun / layout.group, group = Quad / quads;
        __m256i sums[2][T];
        for (int t = 0; t < T; ++t) {
            constexpr bool centred = layout.centre > 0 && (layout.bits < 8 || kVnni);
            sums[0][t] = centred ? in.template offset<layout.centre>(t, at * groups + group) : _mm256_setzero_si256();
            sums[1][t] = sums[0][t];
        }
        sum_quads<Quad, Quad + quads>(block, run, in, at * kRunLines, sums);
        scale_sums<Block>(sums, block.factors(run * groups + group), in, at * groups + group, acc);
        add_run<Quad + quads>(block, run, in, at, acc);
    }
}

// T inputs with R tiles, run by run, so that the memory is read in R places at once.
template <class Block, int T, int R>
static void run_tiles(const TileJob& job, int64_t row) {
    const PackedMatrix& w = job.w;
    const uint8_t* tile = Block::opened ? job.opened : w.tile(job.tile);
    const size_t next_tile = Block::opened ? w.opened_bytes() : w.tile_bytes();
    const int64_t blocks = w.cols / Block::columns;
    const Inputs<T> in(job.inputs, row, Block::layout.group == 16);
    alignas(64) float acc[R][T][kTileRows] = {};
    // With many rows the output exceeds the L2 cache; prefetched now, it is there when the sums are.
    for (int t = 0; t < T; ++t) __builtin_prefetch(job.out + (row + t) * job.out_stride + job.tile * kTileRows, 1);
    Block block[R];
    for (int64_t b = 0; b < blocks; ++b, tile += Block::bytes) {
        constexpr int runs = Block::columns / kRun, step = Block::bytes / runs;
        for (int r = 0; r < R; ++r) block[r].go_to(tile + r * next_tile);
        for (int run = 0; run < runs; ++run)
            for (int r = 0; r < R; ++r) {
                const uint8_t* ahead = tile + r * next_tile + run * step + kAheadBytes;
                for (int line = 0; !Block::opened && line < step; line += kLineBytes) __builtin_prefetch(ahead + line);
                add_run<0>(block[r], run, in, b * runs + run, acc[r]);
            }
    }
    for (int r = 0; r < R; ++r)
        put_results<T>(acc[r], w, job.tile + r, job.out + row * job.out_stride, job.out_stride, job.add);
}

// With few inputs memory is the limit, and four places at once are read faster.
CLLM_INLINE int64_t tiles_together(int64_t inputs, bool opened) { return inputs <= 2 && !opened ? 4 : 1; }

// Inputs from which on it pays to open a tile: the more bits lie apart, the sooner.
CLLM_INLINE int64_t opens_from(Packing packing) {
    const int bits = layout_of(packing).bits;
    return in_codes(packing) ? 1 : bits == 5 || bits == 6 ? 9 : 25;
}

using RunTiles = void (*)(const TileJob&, int64_t);

template <class Block>
CLLM_INLINE RunTiles run_opened(int64_t inputs) {
    static constexpr RunTiles found[kPanelRows] = {run_tiles<Block, 1, 1>, run_tiles<Block, 2, 1>, run_tiles<Block, 3, 1>,
                                                   run_tiles<Block, 4, 1>};
    return found[inputs - 1];
}

template <class Block>
CLLM_INLINE RunTiles run_packed(int64_t tiles, int64_t inputs) {
    if (tiles == 1) return run_opened<Block>(inputs);
    if (tiles == 2) return inputs == 1 ? run_tiles<Block, 1, 2> : run_tiles<Block, 2, 2>;
    return inputs == 1 ? run_tiles<Block, 1, 4> : run_tiles<Block, 2, 4>;
}

CLLM_INLINE RunTiles run_tiles_of(Packing packing, bool opened, int64_t tiles, int64_t inputs) {
    return with_packing(packing, [&](auto p) {
        if constexpr (!in_codes(p))
            if (!opened) return run_packed<PackedBlock<p>>(tiles, inputs);
        return run_opened<OpenedBlock<opened_like(p)>>(inputs);
    });
}

#include "matmul_loop.inl"

}  // namespace CLLM_NS
}  // namespace cllm

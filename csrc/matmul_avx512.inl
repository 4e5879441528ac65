// Products with quantised weights by VPDPBUSD: 16 output rows are the lanes of a register, four columns at a time.
//
// For a group of columns the products of weights and inputs are added up in int32, exactly, so the order does not matter;
// then the sum is scaled into the float accumulator, group after group. That sequence is the same for every number of
// inputs T and of tiles R that are computed together, packed or opened: they only decide how often a value is used once it
// is in a register.
#pragma once

#include "matmul_blocks_avx512.inl"
#include "matmul_float.inl"

namespace cllm {
namespace CLLM_NS {

constexpr int64_t kInputBytes = 400000;  // of inputs multiplied with one tile: they stay in the L2 cache
constexpr int64_t kInputsTogether = 6;

// The inputs of one panel, from one of its rows on.
struct Inputs {
    const int8_t* values;
    const float* scales;
    const float* sums;
    const int32_t* offsets;

    CLLM_INLINE Inputs(const QuantRows& a, int64_t first_row, bool groups_of_16) {
        const int64_t runs = a.cols / kRun, lane = first_row % kPanelRows, panel_row = first_row - lane;
        values = a.values + panel_row * a.cols + lane * kPanelCols;
        scales = a.scales + panel_row * runs + lane;
        sums = a.sums + panel_row * runs + lane;
        offsets = groups_of_16 ? a.offsets16 + panel_row * runs * 2 + lane : a.offsets32 + panel_row * runs + lane;
    }
    CLLM_INLINE __m512i quad(int t, int64_t at) const {
        constexpr int64_t together = kPanelCols / 4;  // quads of a row
        int32_t four;
        std::memcpy(&four, values + (at / together * kPanelRows + t) * kPanelCols + at % together * 4, 4);
        __m512i all = _mm512_set1_epi32(four);
        // In a register: as a memory operand it would be read again for every tile.
        asm("" : "+v"(all));
        return all;
    }
    CLLM_INLINE __m512 scale(int t, int64_t run) const { return _mm512_set1_ps(scales[run * kPanelRows + t]); }
    // Of the columns of a group, which is group `group` of the row.
    template <int Group>
    CLLM_INLINE __m512 sum(int t, int64_t group) const {
        if constexpr (Group == kRun) return _mm512_set1_ps(sums[group * kPanelRows + t]);
        const float whole = kSumOfOffset * float(offsets[group * kPanelRows + t]);
        return _mm512_set1_ps(scales[group * Group / kRun * kPanelRows + t] * whole);
    }
    // The offsets that remove the centre from a group's sum.
    template <int Centre>
    CLLM_INLINE __m512i offset(int t, int64_t group) const {
        const __m512i of_128 = _mm512_set1_epi32(offsets[group * kPanelRows + t]);
        return Centre == 128 ? of_128 : _mm512_srai_epi32(of_128, shift_to(Centre));
    }
};

// The products of quads [Quad, Last) of a run of R tiles, onto their sums.
template <int Quad, int Last, class Block, int T, int R>
CLLM_INLINE void sum_quads(const Block (&blocks)[R], int run, const Inputs& in, int64_t first_quad, __m512i (&sums)[R][T]) {
    if constexpr (Quad < Last) {
        __m512i w[R];
        for (int r = 0; r < R; ++r) w[r] = blocks[r].template line<Quad>(run);
        for (int t = 0; t < T; ++t) {
            const __m512i x = in.quad(t, first_quad + Quad);
            for (int r = 0; r < R; ++r) sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], w[r], x);
        }
        sum_quads<Quad + 1, Last>(blocks, run, in, first_quad, sums);
    }
}

// The integer sums of the row's group `group`, scaled onto the float accumulators of one tile.
template <class Block, int T>
CLLM_INLINE void scale_sums(const __m512i (&sums)[T], const float* factors, const Inputs& in, int64_t group, __m512 (&acc)[T]) {
    constexpr Layout layout = Block::layout;
    const __m512 scale = _mm512_load_ps(factors);
    const __m512 minimum = layout.has_min ? _mm512_load_ps(factors + kTileRows) : _mm512_setzero_ps();
    for (int t = 0; t < T; ++t) {
        if (layout.has_min) acc[t] = _mm512_fmadd_ps(minimum, in.template sum<layout.group>(t, group), acc[t]);
        const __m512 both = _mm512_mul_ps(scale, in.scale(t, group * layout.group / kRun));
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), both, acc[t]);
    }
}

// The groups of run `run` of R blocks, which is run `at` of the row; from quad Quad on.
template <int Quad, class Block, int T, int R>
CLLM_INLINE void add_run(const Block (&blocks)[R], int run, const Inputs& in, int64_t at, __m512 (&acc)[R][T]) {
    if constexpr (Quad < kRunLines) {
        constexpr Layout layout = Block::layout;
        constexpr int quads = layout.group / 4, groups = kRun / layout.group, group = Quad / quads;
        __m512i sums[R][T];
        for (int t = 0; t < T; ++t)
            for (int r = 0; r < R; ++r)
                sums[r][t] = layout.centre ? in.template offset<layout.centre>(t, at * groups + group) : _mm512_setzero_si512();
        sum_quads<Quad, Quad + quads>(blocks, run, in, at * kRunLines, sums);
        for (int r = 0; r < R; ++r)
            scale_sums<Block>(sums[r], blocks[r].factors(run * groups + group), in, at * groups + group, acc[r]);
        add_run<Quad + quads>(blocks, run, in, at, acc);
    }
}

template <int T, int R>
CLLM_INLINE void put_sums(const TileJob& job, int64_t row, __m512 (&acc)[R][T]) {
    for (int r = 0; r < R; ++r) {
        const int64_t first = (job.tile + r) * kTileRows, left = job.w.rows - first;
        const __mmask16 rows = left >= kTileRows ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
        for (int t = 0; t < T; ++t) {
            float* to = job.out + (row + t) * job.out_stride + first;
            if (job.add) acc[r][t] = _mm512_add_ps(_mm512_maskz_loadu_ps(rows, to), acc[r][t]);
            _mm512_mask_storeu_ps(to, rows, acc[r][t]);
        }
    }
}

template <class Block, int T, int R>
static void run_tiles(const TileJob& job, int64_t row) {
    const PackedMatrix& w = job.w;
    const uint8_t* tile = Block::opened ? job.opened : w.tile(job.tile);
    const size_t next_tile = Block::opened ? w.opened_bytes() : w.tile_bytes();
    const int64_t n_blocks = w.cols / Block::columns;
    const Inputs in(job.inputs, row, Block::layout.group == 16);
    Block blocks[R];
    __m512 acc[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            acc[r][t] = _mm512_setzero_ps();
            // With many rows the output exceeds the L2 cache; prefetched now, it is there when the sums are.
            __builtin_prefetch(job.out + (row + t) * job.out_stride + (job.tile + r) * kTileRows, 1);
        }
    for (int64_t b = 0; b < n_blocks; ++b, tile += Block::bytes) {
        constexpr int runs = Block::columns / kRun;
        for (int r = 0; r < R; ++r) blocks[r].go_to(tile + r * next_tile);
        for (int run = 0; run < runs; ++run) add_run<0>(blocks, run, in, b * runs + run, acc);
    }
    put_sums<T, R>(job, row, acc);
}

// Two, so that with 6 inputs the 12 integer and 12 float accumulators fit the 32 registers. With few inputs memory is the
// limit, and four places at once are read faster.
CLLM_INLINE int64_t tiles_together(int64_t inputs, bool opened) { return inputs <= 2 && !opened ? 4 : 2; }

#if defined(CLLM_AMX)
constexpr bool kOpens = false;  // many inputs are for AMX, which opens tiles in its own way
#else
constexpr bool kOpens = true;
#endif

// Inputs from which on it pays to open a tile.
CLLM_INLINE int64_t opens_from(Packing packing) { return in_codes(packing) ? 1 : kOpens ? 13 : INT64_MAX; }

using RunTiles = void (*)(const TileJob&, int64_t);

template <class Block>
CLLM_INLINE RunTiles run_block(int64_t tiles, int64_t inputs) {
    static constexpr RunTiles found[2][kInputsTogether] = {
        {run_tiles<Block, 1, 1>, run_tiles<Block, 2, 1>, run_tiles<Block, 3, 1>, run_tiles<Block, 4, 1>,
         run_tiles<Block, 5, 1>, run_tiles<Block, 6, 1>},
        {run_tiles<Block, 1, 2>, run_tiles<Block, 2, 2>, run_tiles<Block, 3, 2>, run_tiles<Block, 4, 2>,
         run_tiles<Block, 5, 2>, run_tiles<Block, 6, 2>},
    };
    if (!Block::opened && tiles == 4) return inputs == 1 ? run_tiles<Block, 1, 4> : run_tiles<Block, 2, 4>;
    return found[tiles - 1][inputs - 1];
}

CLLM_INLINE RunTiles run_tiles_of(Packing packing, [[maybe_unused]] bool opened, int64_t tiles, int64_t inputs) {
    return with_packing(packing, [&](auto p) {
        if constexpr (kOpens || in_codes(p))
            if (in_codes(p) || opened) return run_block<OpenedBlock<opened_like(p)>>(tiles, inputs);
        if constexpr (!in_codes(p)) return run_block<PackedBlock<p>>(tiles, inputs);
    });
}

#include "matmul_loop.inl"

}  // namespace CLLM_NS
}  // namespace cllm

// Moves of blocks within the arena, on all threads.
//
// A list of moves means: one after another, each through a copy of its source. Most do not touch each other, so they are
// split into copies of single blocks, and each copy gets the first wave in which it may happen:
//
//   after the wave that wrote its source, and after those that wrote or read its target
//
// Copies of one wave are independent and done together. A run that slides by d blocks over itself becomes waves of d blocks
// in the right direction; moves that fill holes are one wave.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "team.h"

namespace cllm {

// `count` adjacent blocks, from `source` on, go to `target` on.
struct BlockMove {
    int32_t source, target, count;
};

// Whether copies go past the caches or through them: which is faster depends on the machine (on Zen 3 it is the first, by
// half; on a Xeon with 300 MB of L3 the second, by half), so both are timed, and the slower one again from time to time.
class CopyChoice {
public:
    bool streams() const;
    void learn(bool streamed, size_t bytes, double seconds);

private:
    static constexpr int kTryOtherEvery = 64;
    double bytes_per_s_[2] = {0.0, 0.0};
    int calls_ = 0;
};

class BlockMover {
public:
    // All blocks are in the arena, fewer than 2^32 - 1 in all moves together. If there is no memory for the plan, it throws
    // std::bad_alloc before anything is moved.
    void move(const BlockMove* moves, size_t count, uint8_t* arena, size_t block_bytes, int64_t blocks, Team& team);

private:
    struct Copy {
        int32_t source, target;
        uint32_t wave;
    };
    struct Piece {
        size_t source, target, bytes;  // in the arena
    };

    void plan(const BlockMove* moves, size_t count, int64_t blocks);
    void add(int32_t source, int32_t target);
    void order_by_wave();
    void cut(size_t block_bytes, int threads);
    void cut_wave(size_t first, size_t last, size_t block_bytes, size_t piece_bytes);
    void add_run(int32_t source, int32_t target, size_t count, size_t block_bytes, size_t piece_bytes);

    // The last wave that read and wrote each block, counted on over all calls, so that nothing is cleared between them.
    std::vector<uint32_t> read_, written_;
    uint32_t first_wave_ = 1, last_wave_ = 0;  // of this call
    std::vector<Copy> copies_, ordered_;
    std::vector<size_t> wave_ends_;  // in ordered_
    std::vector<Piece> pieces_;
    std::vector<size_t> piece_ends_;  // of the waves, in pieces_
    CopyChoice choice_;
};

}  // namespace cllm

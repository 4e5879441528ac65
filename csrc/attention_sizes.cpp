#include "attention_sizes.h"

namespace cllm {

int attention_tile_tokens(int heads) { return heads < kTileQueryRows ? kTileQueryRows / heads : 1; }

size_t attend_scratch_bytes(int head_dim, int heads) {
    const AttendScratch layout(head_dim, attention_tile_tokens(heads) * heads);
    return layout.end * sizeof(float) + kScratchAlign;
}

}  // namespace cllm

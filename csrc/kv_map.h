// Which layers share a table, and where each lies in a block's cells; where the parts of a state lie in its.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kv_layout.h"
#include "model.h"

namespace cllm {

struct KVGroup {
    std::vector<int> layers;
    int cells = 1;   // of a block
    int window = 0;  // how many tokens those that attend to them look back; 0: to the first one
};

// Where a part of a state lies: in which of its block's cells, and from which byte on.
struct StatePlace {
    int cell;
    size_t offset;
};

// The state of a sequence is one block, of `cells` cells.
struct StateMap {
    int cells = 0;  // 0: no layer has a state
    std::vector<std::vector<StatePlace>> places;  // of each layer's parts
};

struct KVMap {
    int block_size = 16;
    size_t cell_bytes = 0;
    KVType k_type = KVType::f16, v_type = KVType::f16;
    std::vector<KVGroup> groups;
    std::vector<KVLayout> layers;  // for one without K and V of its own, that of the layer it attends to
    StateMap states;

    // The first block that a sequence needs which goes on at `position`.
    int first_block(const KVGroup& group, int position) const {
        return group.window > 0 && position >= group.window ? (position - group.window + 1) / block_size : 0;
    }
};

// Without `groups`, all layers are one, in one cell; `cell_bytes` of 0 is what the largest group needs. Throws
// std::invalid_argument if that is no layout.
KVMap map_kv(const Shape& shape, int block_size, KVType k_type, KVType v_type, size_t cell_bytes, std::vector<KVGroup> groups,
             StateMap states = {});

// What all layers' K and V of a block take in one cell.
size_t one_cell_kv_bytes(const Shape& shape, int block_size, KVType k_type, KVType v_type);

// A whole state in one cell, and the bytes that it takes: {} and 0 if there is none.
std::pair<StateMap, size_t> one_cell_states(const Shape& shape);

}  // namespace cllm

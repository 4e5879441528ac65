#include "kv_map.h"

#include <algorithm>
#include <stdexcept>

namespace cllm {

namespace {

constexpr size_t kCellAlign = 32;  // all tiles are multiples of that

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

std::string number(int64_t value) { return std::to_string(value); }

KVLayout layout_of(const KVMap& map, const LayerShape& s) {
    KVLayout found;
    found.n_kv_heads = s.n_kv_heads;
    found.head_dim = s.head_dim;
    found.block_size = map.block_size;
    found.k_type = map.k_type;
    found.v_type = map.v_type;
    return found;
}

// Layers fill the cells of a block one after another.
void place(const Shape& shape, KVMap& map, int index) {
    const KVGroup& group = map.groups[size_t(index)];
    size_t offset = 0;
    int cell = 0;
    for (const int layer : group.layers) {
        if (layer < 0 || layer >= shape.n_layers() || !shape.layers[size_t(layer)].stores())
            refuse("layer " + number(layer) + " stores no K/V");
        KVLayout& to = map.layers[size_t(layer)];
        if (to.cell_bytes > 0) refuse("layer " + number(layer) + " is in two groups");
        to = layout_of(map, shape.layers[size_t(layer)]);
        if (offset > 0 && offset + to.bytes() > map.cell_bytes) {
            ++cell;
            offset = 0;
        }
        if (to.bytes() > map.cell_bytes || cell >= group.cells)
            refuse("a block of group " + number(index) + " does not fit into " + number(group.cells) + " cells of " +
                   number(int64_t(map.cell_bytes)) + " bytes");
        to.cell_bytes = map.cell_bytes;
        to.group = index;
        to.cells = group.cells;
        to.cell = cell;
        to.offset = offset;
        offset += to.bytes();
    }
}

}  // namespace

KVMap map_kv(const Shape& shape, int block_size, KVType k_type, KVType v_type, size_t cell_bytes, std::vector<KVGroup> groups) {
    if (block_size < kTileTokens || block_size % kTileTokens || block_size > (1 << 16))
        refuse("block_size is " + number(block_size) + ", no multiple of " + number(kTileTokens));
    KVMap map{block_size, cell_bytes, k_type, v_type, std::move(groups), std::vector<KVLayout>(shape.layers.size())};
    size_t all_bytes = 0;
    for (const LayerShape& s : shape.layers) {
        if (s.head_dim % 32 && (k_type != KVType::f16 || v_type != KVType::f16))
            refuse("head_dim is " + number(s.head_dim) + ", no multiple of 32, so K/V can only be f16");
        if (s.stores()) all_bytes += layout_of(map, s).bytes();
    }
    if (map.groups.empty()) {
        map.groups.emplace_back();
        for (int i = 0; i < shape.n_layers(); ++i)
            if (shape.layers[size_t(i)].stores()) map.groups[0].layers.push_back(i);
        if (map.cell_bytes == 0) map.cell_bytes = all_bytes;
    }
    if (map.cell_bytes == 0 || map.cell_bytes % kCellAlign)
        refuse("cell_bytes is " + number(int64_t(map.cell_bytes)) + ", no multiple of " + number(int64_t(kCellAlign)));
    for (size_t i = 0; i < map.groups.size(); ++i) {
        if (map.groups[i].cells < 1 || map.groups[i].cells > (1 << 12)) refuse("a group has " + number(map.groups[i].cells) + " cells");
        place(shape, map, int(i));
    }
    std::vector<bool> looks_back(map.groups.size());  // to the first token
    for (int i = 0; i < shape.n_layers(); ++i) {
        const LayerShape& s = shape.layers[size_t(i)];
        KVLayout& layout = map.layers[size_t(i)];
        if (!s.stores()) layout = map.layers[size_t(s.kv_from)];
        if (layout.cell_bytes == 0) refuse("layer " + number(i) + " is in no group");
        KVGroup& group = map.groups[size_t(layout.group)];
        if (s.window == kNoWindow) looks_back[size_t(layout.group)] = true;
        group.window = looks_back[size_t(layout.group)] ? 0 : std::max(group.window, s.window);
    }
    return map;
}

}  // namespace cllm

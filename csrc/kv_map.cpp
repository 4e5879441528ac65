#include "kv_map.h"

#include <algorithm>
#include <stdexcept>

namespace cllm {

namespace {

constexpr size_t kCellAlign = 32;    // all tiles are multiples of that
constexpr size_t kStateAlign = 64;  // stores past the caches need that of states
constexpr int kMostCells = 1 << 16;  // of a block

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

std::string number(int64_t value) { return std::to_string(value); }

KVLayout layout_of(const LayerShape& s, int block_size, KVType k_type, KVType v_type) {
    KVLayout found;
    found.n_kv_heads = s.n_kv_heads;
    found.head_dim = s.head_dim;
    found.block_size = block_size;
    found.k_type = k_type;
    found.v_type = v_type;
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
        to = layout_of(shape.layers[size_t(layer)], map.block_size, map.k_type, map.v_type);
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

// Every part of every layer's state has a place of its own.
void check_states(const Shape& shape, const KVMap& map) {
    struct Taken {
        int cell;
        size_t begin, end;
    };
    std::vector<Taken> taken;
    if (map.states.places.size() != shape.layers.size()) refuse("there are no places for states");
    if (map.states.cells < 1 || map.states.cells > kMostCells) refuse("a state has " + number(map.states.cells) + " cells");
    if (map.cell_bytes % kStateAlign) refuse("cell_bytes is " + number(int64_t(map.cell_bytes)) + ", no multiple of " + number(int64_t(kStateAlign)));
    for (int i = 0; i < shape.n_layers(); ++i) {
        const auto& recurrence = shape.layers[size_t(i)].recurrence;
        const std::vector<StatePlace>& places = map.states.places[size_t(i)];
        const int parts = recurrence ? recurrence->parts() : 0;
        if (int(places.size()) != parts)
            refuse("the state of layer " + number(i) + " has " + number(parts) + " parts, and " + number(int64_t(places.size())) + " places");
        for (int part = 0; part < parts; ++part) {
            const StatePlace& place = places[size_t(part)];
            const size_t bytes = recurrence->part_bytes(part);
            if (place.cell < 0 || place.cell >= map.states.cells || place.offset % kStateAlign || bytes > map.cell_bytes ||
                place.offset > map.cell_bytes - bytes)
                refuse("part " + number(part) + " of the state of layer " + number(i) + " cannot lie at byte " +
                       number(int64_t(place.offset)) + " of cell " + number(place.cell));
            taken.push_back({place.cell, place.offset, place.offset + bytes});
        }
    }
    std::sort(taken.begin(), taken.end(), [](const Taken& a, const Taken& b) {
        return a.cell != b.cell ? a.cell < b.cell : a.begin < b.begin;
    });
    for (size_t i = 1; i < taken.size(); ++i)
        if (taken[i].cell == taken[i - 1].cell && taken[i].begin < taken[i - 1].end)
            refuse("parts of a state overlap in cell " + number(taken[i].cell));
}

}  // namespace

size_t one_cell_kv_bytes(const Shape& shape, int block_size, KVType k_type, KVType v_type) {
    size_t bytes = 0;
    for (const LayerShape& s : shape.layers)
        if (s.stores()) bytes += layout_of(s, block_size, k_type, v_type).bytes();
    return bytes;
}

std::pair<StateMap, size_t> one_cell_states(const Shape& shape) {
    if (!shape.recurrent()) return {};
    StateMap states{1, std::vector<std::vector<StatePlace>>(shape.layers.size())};
    size_t end = 0;
    for (int i = 0; i < shape.n_layers(); ++i) {
        const auto& recurrence = shape.layers[size_t(i)].recurrence;
        for (int part = 0; recurrence && part < recurrence->parts(); ++part) {
            states.places[size_t(i)].push_back({0, end});
            end += (recurrence->part_bytes(part) + kStateAlign - 1) / kStateAlign * kStateAlign;
        }
    }
    return {std::move(states), end};
}

KVMap map_kv(const Shape& shape, int block_size, KVType k_type, KVType v_type, size_t cell_bytes, std::vector<KVGroup> groups,
             StateMap states) {
    if (block_size < kTileTokens || block_size % kTileTokens || block_size > (1 << 16))
        refuse("block_size is " + number(block_size) + ", no multiple of " + number(kTileTokens));
    KVMap map{block_size, cell_bytes, k_type, v_type, std::move(groups), std::vector<KVLayout>(shape.layers.size()), std::move(states)};
    const size_t all_bytes = one_cell_kv_bytes(shape, block_size, k_type, v_type);
    for (const LayerShape& s : shape.layers) {
        if (s.attends() && s.head_dim % 32 && (k_type != KVType::f16 || v_type != KVType::f16))
            refuse("head_dim is " + number(s.head_dim) + ", no multiple of 32, so K/V can only be f16");
    }
    if (map.groups.empty()) {
        map.groups.emplace_back();
        for (int i = 0; i < shape.n_layers(); ++i)
            if (shape.layers[size_t(i)].stores()) map.groups[0].layers.push_back(i);
        if (map.cell_bytes == 0) map.cell_bytes = all_bytes;
    }
    if (map.cell_bytes == 0 || map.cell_bytes % kCellAlign)
        refuse("cell_bytes is " + number(int64_t(map.cell_bytes)) + ", no multiple of " + number(int64_t(kCellAlign)));
    if (shape.recurrent()) check_states(shape, map);
    else if (map.states.cells) refuse("there are places for states, but no layer has one");
    for (size_t i = 0; i < map.groups.size(); ++i) {
        if (map.groups[i].cells < 1 || map.groups[i].cells > (1 << 12)) refuse("a group has " + number(map.groups[i].cells) + " cells");
        place(shape, map, int(i));
    }
    std::vector<bool> looks_back(map.groups.size());  // to the first token
    for (int i = 0; i < shape.n_layers(); ++i) {
        const LayerShape& s = shape.layers[size_t(i)];
        KVLayout& layout = map.layers[size_t(i)];
        if (!s.attends()) continue;
        if (!s.stores()) layout = map.layers[size_t(s.kv_from)];
        if (layout.cell_bytes == 0) refuse("layer " + number(i) + " is in no group");
        KVGroup& group = map.groups[size_t(layout.group)];
        if (s.window == kNoWindow) looks_back[size_t(layout.group)] = true;
        group.window = looks_back[size_t(layout.group)] ? 0 : std::max(group.window, s.window);
    }
    return map;
}

}  // namespace cllm

// Layers that carry a state from token to token: a convolution over the last tokens, and states of heads that every token
// changes.
//
//   inputs of all rows ──► convolution: a task is some channels of a chunk ──► states: a task is some columns of a head, of a
//                          chunk, over all its tokens
//
// A task takes its tokens one after another, and no task needs another of its phase. So a row's bits depend on its tokens and
// those before it alone. A step reads a state from one block and writes it to another, so one that fails has changed nothing.
#include <cmath>
#include <cstring>

#include "forward.h"
#include "stream_copy.h"

namespace cllm {

namespace {

using Kind = RecurrenceShape::Kind;

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

const float* Forward::state_part(const StateCells& cells, int layer, int part) const {
    if (!cells.read) return nullptr;
    const StatePlace& place = map_->states.places[size_t(layer)][size_t(part)];
    return reinterpret_cast<const float*>(arena_ + size_t(cells.read[place.cell]) * map_->cell_bytes + place.offset);
}

float* Forward::new_state_part(const StateCells& cells, int layer, int part) const {
    const StatePlace& place = map_->states.places[size_t(layer)][size_t(part)];
    return reinterpret_cast<float*>(arena_ + size_t(cells.write[place.cell]) * map_->cell_bytes + place.offset);
}

void Forward::recur(int index) {
    const RecurrenceShape& s = *model_.layers[size_t(index)].shape.recurrence;
    const int64_t chunks = int64_t(chunks_.size()), units = count_units(s);
    const auto each_task = [&](Phase phase, int64_t of_chunk, const auto& work) {
        timed(phase, [&] {
            team_.share(chunks * of_chunk, 1, [&](int thread, int64_t first, int64_t last) {
                for (; first < last; ++first) {
                    const size_t chunk = size_t(first / of_chunk);
                    work(chunks_[chunk], first_rows_[chunk], int(first % of_chunk), thread);
                }
                stream_fence();
            });
        });
    };
    each_task(Phase::convolution, units, [&](const Chunk& chunk, int64_t row, int unit, int thread) {
        if (!s.has_heads()) return convolve_short(index, chunk, row, unit_of(s, unit), thread);
        convolve(index, chunk, row, unit_of(s, unit), thread);
    });
    if (!s.has_heads()) return;
    const int tiles = s.value_dim / kStateColumns;
    each_task(Phase::state, int64_t(s.n_heads) * tiles, [&](const Chunk& chunk, int64_t row, int task, int thread) {
        advance(index, chunk, row, task / tiles, task % tiles, thread);
    });
}

// A delta net has matrices for all of this; the others have everything in one, in this order: gate, convolution's channels,
// steps.
Forward::Mixture Forward::mixture_of(const RecurrenceShape& s) const {
    float* mixed = work_.mixed.data();
    const int64_t stride = s.input_size(), values = s.values();
    if (s.kind == Kind::delta_net)
        return {mixed, work_.state_gate.data(), work_.decays.data(), stride, values, s.n_heads};
    return {mixed + values, mixed, mixed + values + s.channels(), stride, stride, stride};
}

int Forward::count_units(const RecurrenceShape& s) {
    return s.has_heads() ? s.n_heads + 2 * s.n_groups : (s.channels() + kChannelsTogether - 1) / kChannelsTogether;
}

// Channels are queries, keys and values of a delta net; values, keys and queries otherwise.
Forward::Unit Forward::unit_of(const RecurrenceShape& s, int index) {
    if (!s.has_heads()) {
        const int first = index * kChannelsTogether;
        return {Unit::Kind::other, 0, first, std::min(kChannelsTogether, s.channels() - first)};
    }
    const bool delta = s.kind == Kind::delta_net;
    if (index < s.n_heads) return {Unit::Kind::value, index, (delta ? 2 * s.keys() : 0) + index * s.value_dim, s.value_dim};
    index -= s.n_heads;
    const bool first_part = index < s.n_groups;
    const int head = index % s.n_groups;
    return {delta && first_part ? Unit::Kind::query : Unit::Kind::key, head,
            (delta ? 0 : s.values()) + index * s.key_dim, s.key_dim};
}

// The inputs of the last tokens before the chunk, at the beginning of a ring of [kernel][width].
float* Forward::first_taps(int index, const Chunk& chunk, const Unit& unit, int thread) {
    const RecurrenceShape& s = *model_.layers[size_t(index)].shape.recurrence;
    float* taps = work_.threads[size_t(thread)].taps.data();
    const size_t bytes = size_t(unit.width) * sizeof(float);
    for (int tap = 0; tap < s.kernel - 1; ++tap) {
        const float* from = state_part(chunk.state, index, s.matrices() + tap);
        if (from) std::memcpy(taps + tap * unit.width, from + unit.first, bytes);
        else std::memset(taps + tap * unit.width, 0, bytes);
    }
    return taps;
}

void Forward::store_taps(int index, const Chunk& chunk, const Unit& unit, const float* taps) {
    const RecurrenceShape& s = *model_.layers[size_t(index)].shape.recurrence;
    for (int tap = 0; tap < s.kernel - 1; ++tap)
        std::memcpy(new_state_part(chunk.state, index, s.matrices() + tap) + unit.first,
                    taps + (chunk.tokens + tap) % s.kernel * unit.width, size_t(unit.width) * sizeof(float));
}

// In place. What queries and keys of a delta net are used for follows at once.
void Forward::convolve(int index, const Chunk& chunk, int64_t first_row, const Unit& unit, int thread) {
    const Layer& layer = model_.layers[size_t(index)];
    const RecurrenceShape& s = *layer.shape.recurrence;
    const Mixture mixture = mixture_of(s);
    const Vector &bias = layer.conv_bias, &lengths = unit.kind == Unit::Kind::query ? layer.query_lengths : layer.key_lengths;
    const bool normalises = s.kind == Kind::delta_net && unit.kind != Unit::Kind::value;
    float *taps = first_taps(index, chunk, unit, thread), *channels = mixture.channels + first_row * mixture.stride + unit.first;
    const float* inputs[kMostTaps];
    for (int token = 0; token < chunk.tokens; ++token, channels += mixture.stride) {
        std::memcpy(taps + (token + s.kernel - 1) % s.kernel * unit.width, channels, size_t(unit.width) * sizeof(float));
        for (int tap = 0; tap < s.kernel; ++tap) inputs[tap] = taps + (token + tap) % s.kernel * unit.width;
        kernels_.convolve(inputs, layer.conv.data() + unit.first, s.channels(), bias.empty() ? nullptr : bias.data() + unit.first,
                          s.kernel, unit.width, true, channels);
        // Vectors of one length; the norm adds to the mean of squares, not to their sum.
        if (normalises) kernels_.rms_norm(channels, lengths.data(), unit.width, model_.shape.rms_eps / float(unit.width), channels);
    }
    store_taps(index, chunk, unit, taps);
    if (unit.kind == Unit::Kind::value) make_gates(layer, chunk, first_row, unit.head);
}

// C * (the convolution of B * x): a row is [B | C | x].
void Forward::convolve_short(int index, const Chunk& chunk, int64_t first_row, const Unit& unit, int thread) {
    const Layer& layer = model_.layers[size_t(index)];
    const RecurrenceShape& s = *layer.shape.recurrence;
    const int64_t size = s.channels();
    const float* row = work_.mixed.data() + first_row * 3 * size + unit.first;
    float *taps = first_taps(index, chunk, unit, thread), *out = work_.recurred.data() + first_row * size + unit.first;
    const float* inputs[kMostTaps];
    for (int token = 0; token < chunk.tokens; ++token, row += 3 * size, out += size) {
        kernels_.mul(row, row + 2 * size, unit.width, taps + (token + s.kernel - 1) % s.kernel * unit.width);
        for (int tap = 0; tap < s.kernel; ++tap) inputs[tap] = taps + (token + tap) % s.kernel * unit.width;
        kernels_.convolve(inputs, layer.conv.data() + unit.first, size, nullptr, s.kernel, unit.width, false, out);
        kernels_.mul(row + size, out, unit.width, out);
    }
    store_taps(index, chunk, unit, taps);
}

// How much of a head's state each token keeps, and how much of the token it takes.
void Forward::make_gates(const Layer& layer, const Chunk& chunk, int64_t first_row, int head) {
    const RecurrenceShape& s = *layer.shape.recurrence;
    const Mixture mixture = mixture_of(s);
    for (int64_t row = first_row; row < first_row + chunk.tokens; ++row) {
        const int64_t at = row * s.n_heads + head;
        const float step = softplus(mixture.steps[row * mixture.step_stride + head] + layer.step_bias[size_t(head)]);
        float& factor = work_.factors.data()[at];
        factor = s.kind == Kind::delta_net ? 1.0f / (1.0f + std::exp(-factor)) : step;
        work_.decays.data()[at] = std::exp(step * layer.decay[size_t(head)]);
    }
}

void Forward::advance(int index, const Chunk& chunk, int64_t first_row, int head, int tile, int thread) {
    const Layer& layer = model_.layers[size_t(index)];
    const RecurrenceShape& s = *layer.shape.recurrence;
    const Mixture mixture = mixture_of(s);
    const bool delta = s.kind == Kind::delta_net;
    const int column = tile * kStateColumns, group = s.group_of(head);
    const float *row = mixture.channels + first_row * mixture.stride, *state = state_part(chunk.state, index, head);
    const float *one = row + (delta ? 0 : s.values()) + group * s.key_dim, *other = one + s.keys();
    const size_t place = size_t(column) * size_t(s.key_dim);
    const int64_t gates = first_row * s.n_heads + head;
    const StateJob job{
        state ? state + place : nullptr,
        new_state_part(chunk.state, index, head) + place,
        chunk.tokens,
        s.key_dim,
        delta ? one : other,
        delta ? other : one,
        row + (delta ? 2 * s.keys() : 0) + head * s.value_dim + column,
        mixture.stride,
        work_.decays.data() + gates,
        work_.factors.data() + gates,
        s.n_heads,
        delta ? 0.0f : layer.skip[size_t(head)],
        work_.recurred.data() + first_row * s.values() + head * s.value_dim + column,
        s.values(),
    };
    (delta ? kernels_.delta_rule : kernels_.state_scan)(job, work_.threads[size_t(thread)].state.data());
}

// What the heads give, gated and normalised: a delta net's heads are normalised before that, the others' groups after it.
Forward::Inputs Forward::recurred(const Layer& layer) {
    const RecurrenceShape& shape = *layer.shape.recurrence;
    work_.use_heads_for(shape.values());
    const auto make = [this, &layer](int64_t row, ThreadSpace& own, InputBuffer& to) {
        const RecurrenceShape& s = *layer.shape.recurrence;
        const int64_t size = s.values();
        const float* given = work_.recurred.data() + row * size;
        if (!s.has_heads()) return quantise(given, size, row, to);
        const Mixture mixture = mixture_of(s);
        const float *gate = mixture.gate + row * mixture.gate_stride, eps = model_.shape.rms_eps;
        float* made = own.row.data();
        const bool delta = s.kind == Kind::delta_net;
        const int64_t width = delta ? s.value_dim : size / s.n_groups;
        if (!delta) kernels_.silu_mul(gate, given, size, made);
        for (int64_t first = 0; s.norm && first < size; first += width) {
            const float* weights = layer.state_norm.data() + (delta ? 0 : first);
            kernels_.rms_norm(delta ? given + first : made + first, weights, width, eps, made + first);
        }
        if (delta) kernels_.silu_mul(gate, made, size, made);
        quantise(made, size, row, to);
    };
    return {make, &Workspace::heads, &ThreadSpace::heads};
}

}  // namespace cllm

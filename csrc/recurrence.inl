// Recurrences: convolutions over the last tokens, and states that every token changes.
//
// Lanes are columns of a head's state, so no sum goes over lanes. A tile of the state stays in the first cache while its
// tokens pass, and one pass over it does all for a token:
//
//   token t     S = decay S + key * learned  ──► out[t] = S query        and at once, of the same row,
//   token t+1                                     recalled = S key[t+1]
#pragma once

#include <cstring>

#include "elementwise.inl"
#include "kernels.h"
#include "simd.h"

namespace cllm {
namespace CLLM_NS {

static void convolve(const float* const* taps, const float* weights, int64_t stride, const float* bias, int kernel, int64_t n,
                     bool activates, float* out) {
    int64_t i = 0;
    for (; i + Vec::lanes <= n; i += Vec::lanes) {
        Vec sum = bias ? Vec::load(bias + i) : Vec::zero();
        for (int tap = 0; tap < kernel; ++tap) sum = fma(Vec::load(taps[tap] + i), Vec::load(weights + tap * stride + i), sum);
        (activates ? silu(sum) : sum).store(out + i);
    }
    if (i == n) return;
    float rest[Vec::lanes] = {};
    for (int64_t k = i; k < n; ++k) {
        float sum = bias ? bias[k] : 0.0f;
        for (int tap = 0; tap < kernel; ++tap) sum += taps[tap][k] * weights[tap * stride + k];
        rest[k - i] = sum;
    }
    if (activates) silu(Vec::load(rest)).store(rest);
    std::memcpy(out + i, rest, size_t(n - i) * sizeof(float));
}

constexpr int kTileVectors = kStateColumns / Vec::lanes;
constexpr int kChains = 4 / kTileVectors;  // sums side by side: their additions need not wait for each other

// Numbers for the columns of a tile.
struct Columns {
    Vec v[kTileVectors];

    static CLLM_INLINE Columns load(const float* p) {
        Columns found;
        for (int i = 0; i < kTileVectors; ++i) found.v[i] = Vec::load(p + i * Vec::lanes);
        return found;
    }
    CLLM_INLINE void store(float* p) const {
        for (int i = 0; i < kTileVectors; ++i) v[i].store(p + i * Vec::lanes);
    }
    CLLM_INLINE void stream(float* p) const {
        for (int i = 0; i < kTileVectors; ++i) v[i].stream(p + i * Vec::lanes);
    }
};

template <class Of>
CLLM_INLINE Columns each(Of of) {
    Columns found;
    for (int i = 0; i < kTileVectors; ++i) found.v[i] = of(i);
    return found;
}

struct ChainedSum {
    Columns chain[kChains];

    CLLM_INLINE ChainedSum() {
        for (Columns& each : chain)
            for (Vec& part : each.v) part = Vec::zero();
    }
    CLLM_INLINE void add(int number, const Columns& row, Vec factor) {
        for (int i = 0; i < kTileVectors; ++i) chain[number].v[i] = fma(row.v[i], factor, chain[number].v[i]);
    }
    CLLM_INLINE Columns total() const {
        if constexpr (kChains == 4)
            return each([&](int i) { return (chain[0].v[i] + chain[1].v[i]) + (chain[2].v[i] + chain[3].v[i]); });
        else
            return each([&](int i) { return chain[0].v[i] + chain[1].v[i]; });
    }
};

// What a token changes in every row, and what it asks.
struct Change {
    Vec decay;
    Columns learned;
    const float *key, *query;
};

enum class Target { none, scratch, memory };

// One pass over a tile, see above. Target::none: nothing changes, only the next token recalls.
template <Target target, bool recalls>
static CLLM_INLINE void pass(const float* from, float* to, int key_dim, const Change& change, const float* next_key,
                             Columns& found, Columns& recalled) {
    ChainedSum asked, next;
    const auto take = [&](int i, int chain) {
        Columns row = Columns::load(from + i * kStateColumns);
        if constexpr (target != Target::none) {
            const Vec key = Vec::all(change.key[i]);
            row = each([&](int c) { return fma(key, change.learned.v[c], row.v[c] * change.decay); });
            if constexpr (target == Target::scratch) row.store(to + i * kStateColumns);
            if constexpr (target == Target::memory) row.stream(to + i * kStateColumns);
            asked.add(chain, row, Vec::all(change.query[i]));
        }
        if constexpr (recalls) next.add(chain, row, Vec::all(next_key[i]));
    };
    int i = 0;
    for (; i + kChains <= key_dim; i += kChains)
        for (int chain = 0; chain < kChains; ++chain) take(i + chain, chain);
    for (; i < key_dim; ++i) take(i, 0);
    if constexpr (target != Target::none) found = asked.total();
    if constexpr (recalls) recalled = next.total();
}

// The state to begin with.
CLLM_INLINE const float* first_state(const StateJob& job, float* scratch) {
    if (job.read) return job.read;
    std::memset(scratch, 0, size_t(job.key_dim) * kStateColumns * sizeof(float));
    return scratch;
}

static void delta_rule(const StateJob& job, float* scratch) {
    const float *state = first_state(job, scratch), *key = job.keys, *query = job.queries, *value = job.values;
    Columns recalled, found;
    const Change nothing{Vec::zero(), Columns{}, nullptr, nullptr};
    pass<Target::none, true>(state, nullptr, job.key_dim, nothing, key, found, recalled);
    float* out = job.out;
    for (int64_t token = 0; token < job.tokens; ++token) {
        const Vec decay = Vec::all(job.decays[token * job.gate_stride]), factor = Vec::all(job.factors[token * job.gate_stride]);
        const Columns values = Columns::load(value);
        const Columns learned = each([&](int c) { return (values.v[c] - recalled.v[c] * decay) * factor; });
        const Change change{decay, learned, key, query};
        if (token + 1 < job.tokens) {
            pass<Target::scratch, true>(state, scratch, job.key_dim, change, key + job.stride, found, recalled);
            state = scratch;
        } else {
            pass<Target::memory, false>(state, job.write, job.key_dim, change, nullptr, found, recalled);
        }
        found.store(out);
        key += job.stride, query += job.stride, value += job.stride, out += job.out_stride;
    }
}

static void state_scan(const StateJob& job, float* scratch) {
    const float *state = first_state(job, scratch), *key = job.keys, *query = job.queries, *value = job.values;
    const Vec skip = Vec::all(job.skip);
    Columns none, found;
    float* out = job.out;
    for (int64_t token = 0; token < job.tokens; ++token) {
        const Vec decay = Vec::all(job.decays[token * job.gate_stride]), factor = Vec::all(job.factors[token * job.gate_stride]);
        const Columns values = Columns::load(value);
        const Change change{decay, each([&](int c) { return values.v[c] * factor; }), key, query};
        if (token + 1 < job.tokens) {
            pass<Target::scratch, false>(state, scratch, job.key_dim, change, nullptr, found, none);
            state = scratch;
        } else {
            pass<Target::memory, false>(state, job.write, job.key_dim, change, nullptr, found, none);
        }
        each([&](int c) { return fma(skip, values.v[c], found.v[c]); }).store(out);
        key += job.stride, query += job.stride, value += job.stride, out += job.out_stride;
    }
}

}  // namespace CLLM_NS
}  // namespace cllm

// The loops whose speed is a machine's limit, one set for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cllm {

// A group is what 32 columns of one vector of accumulators take: 8 dot products of 4 columns. Each loop keeps enough
// accumulators in flight to hide the latency of its instructions.
constexpr int kGroupDots = 8;
constexpr int kGroupsPerCall = 1 << 12;

extern volatile uint64_t result_sink;  // results go here, so that no loop is optimised away

// Hands a vector to result_sink.
template <class Vector>
inline __attribute__((always_inline)) void keep(const Vector& vector) {
    uint64_t words[sizeof(Vector) / 8];
    std::memcpy(words, &vector, sizeof words);
    for (const uint64_t word : words) result_sink = word;
}

// Tells the compiler that `value` may have changed, so that it cannot move work out of a loop or merge two equal sums.
// Costs no instruction.
#define CLLM_OPAQUE(value) __asm__ volatile("" : "+x"(value))

struct Dots {
    // Both return how many multiply-adds they did.
    double (*dots)();
    double (*grouped_dots)();
};

Dots avxvnni_dots();
Dots amx_dots();

}  // namespace cllm

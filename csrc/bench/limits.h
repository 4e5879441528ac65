// The limits of this machine, to measure the engine against.
#pragma once

#include <cstddef>

namespace cllm {

struct MachineLimits {
    double int8_macs_per_s = 0;          // multiply-adds of bytes, operands in registers
    double grouped_int8_macs_per_s = 0;  // the same with what a scale per 32 columns needs: to float, times scale, add
    double read_bytes_per_s = 0;         // memory read, over 256 MB
    double model_read_bytes_per_s = 0;   // memory read, over `model_bytes`, part of which may stay in the caches
};

// Each of the four runs for `seconds` on `threads` threads. `instruction_set` is one that this CPU runs, by the name of its kernels.
// Throws std::invalid_argument for anything else, and for numbers that make no sense.
MachineLimits measure_limits(const char* instruction_set, int threads, double seconds, size_t model_bytes);

// Bytes per second that memcpy copies, each of `threads` threads its part of two buffers of `bytes`, for `seconds`.
// Throws std::invalid_argument for numbers that make no sense, std::bad_alloc.
double measure_copy(int threads, double seconds, size_t bytes);

}  // namespace cllm

// A copy that bypasses the caches: moves are often larger than the caches, and would evict what is needed next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace cllm {

// Before other threads are told that data stored past the caches is there: an atomic store alone does not wait for it.
inline void stream_fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// The ranges must not overlap. Other threads see the result after any atomic operation that follows this.
inline void stream_copy(uint8_t* to, const uint8_t* from, size_t bytes) {
#if defined(__SSE2__)
    constexpr size_t kLine = 64, kAhead = 1024;
    const size_t head = std::min(bytes, size_t(-reinterpret_cast<uintptr_t>(to)) % kLine);
    std::memcpy(to, from, head);
    size_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(from + at) + kAhead, _MM_HINT_NTA);  // past the end it does nothing
        const auto* source = reinterpret_cast<const __m128i*>(from + at);
        auto* target = reinterpret_cast<__m128i*>(to + at);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    std::memcpy(to + at, from + at, bytes - at);
    stream_fence();
#else
    std::memcpy(to, from, bytes);
#endif
}

inline void plain_copy(uint8_t* to, const uint8_t* from, size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace cllm

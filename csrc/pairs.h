// Dot products of 16-bit integers, two at a time, summed in 32 bits.
#pragma once

#include <cstring>

#include "simd.h"

namespace cllm {
namespace CLLM_NS {

#if defined(CLLM_AVX512)

// As many pairs of 16-bit integers as a Vec has lanes.
struct Pairs {
    __m512i v;
    static CLLM_INLINE Pairs load_i8(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
    // The same pair in every lane.
    static CLLM_INLINE Pairs all(const int16_t* p) {
        int32_t both;
        std::memcpy(&both, p, sizeof both);
        return {_mm512_set1_epi32(both)};
    }
};
struct PairSum {
    __m512i v;
    static CLLM_INLINE PairSum zero() { return {_mm512_setzero_si512()}; }
    CLLM_INLINE void add(Pairs a, Pairs b) { v = _mm512_dpwssd_epi32(v, a.v, b.v); }
    CLLM_INLINE Vec floats() const { return {_mm512_cvtepi32_ps(v)}; }
};
// 16 floats, rounded to the nearest.
CLLM_INLINE void store_int16(const Vec (&x)[1], int16_t* out) {
    _mm256_storeu_si256((__m256i*)out, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x[0].v)));
}
#elif defined(CLLM_AVX2)

struct Pairs {
    __m256i v;
    static CLLM_INLINE Pairs load_i8(const int8_t* p) { return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p))}; }
    static CLLM_INLINE Pairs all(const int16_t* p) {
        int32_t both;
        std::memcpy(&both, p, sizeof both);
        return {_mm256_set1_epi32(both)};
    }
};
struct PairSum {
    __m256i v;
    static CLLM_INLINE PairSum zero() { return {_mm256_setzero_si256()}; }
    CLLM_INLINE void add(Pairs a, Pairs b) {
        // As one piece: gcc would compute all products first, run out of registers and keep the sums in memory.
        __m256i products;
        asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(v), "=&x"(products) : "x"(a.v), "x"(b.v));
    }
    CLLM_INLINE Vec floats() const { return {_mm256_cvtepi32_ps(v)}; }
};
CLLM_INLINE void store_int16(const Vec (&x)[2], int16_t* out) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0].v), _mm256_cvtps_epi32(x[1].v));
    _mm256_storeu_si256((__m256i*)out, _mm256_permute4x64_epi64(mixed, 0xd8));
}

#else

// Without an instruction for it, floats are faster. They round sums above 2^24, always in the same order.
struct Pairs {
    Lanes first, second;
    static CLLM_INLINE Pairs load_i8(const int8_t* p) {
        HalfLanes bytes;
        std::memcpy(&bytes, p, sizeof bytes);
        const UnsignedLanes both = __builtin_convertvector(bytes, UnsignedLanes);
        return {__builtin_convertvector((IntLanes)(both << 24) >> 24, Lanes),
                __builtin_convertvector((IntLanes)(both << 16) >> 24, Lanes)};
    }
    static CLLM_INLINE Pairs all(const int16_t* p) { return {Vec::all(float(p[0])).v, Vec::all(float(p[1])).v}; }
};
struct PairSum {
    Lanes v;
    static CLLM_INLINE PairSum zero() { return {Vec::zero().v}; }
    CLLM_INLINE void add(Pairs a, Pairs b) { v += a.first * b.first + a.second * b.second; }
    CLLM_INLINE Vec floats() const { return {v}; }
};
CLLM_INLINE void store_int16(const Vec (&x)[2], int16_t* out) {
    const Vec limit = Vec::all(32767.0f);
    for (int half = 0; half < 2; ++half) {
        const Vec rounded = vround(vmax(vmin(x[half], limit), Vec::zero() - limit));
        for (int i = 0; i < Vec::lanes; ++i) out[half * Vec::lanes + i] = int16_t(int32_t(rounded.v[i]));
    }
}

#endif

// The entries of a table of 16 for the low nibbles of 32 bytes, then for the high ones.
CLLM_INLINE void look_up_bytes(const uint8_t* p, const int8_t* table, int8_t* out) {
#if defined(CLLM_AVX512) || defined(CLLM_AVX2)
    const __m256i fifteen = _mm256_set1_epi8(15), bytes = _mm256_loadu_si256((const __m256i*)p);
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), fifteen);
    _mm256_storeu_si256((__m256i*)out, _mm256_shuffle_epi8(values, _mm256_and_si256(bytes, fifteen)));
    _mm256_storeu_si256((__m256i*)(out + 32), _mm256_shuffle_epi8(values, upper));
#else
    for (int i = 0; i < 32; ++i) {
        out[i] = table[p[i] & 15];
        out[32 + i] = table[p[i] >> 4];
    }
#endif
}

}  // namespace CLLM_NS
}  // namespace cllm

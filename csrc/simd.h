// One float vector type, `Vec`, in three builds: 16 lanes (AVX-512), 8 lanes (AVX2 + FMA + F16C), 8 lanes of plain C++.
//
// A file that includes this is compiled once per instruction set, with CLLM_AVX512 or CLLM_AVX2 or neither defined, and
// puts everything into CLLM_NS so that the builds do not mix. CLLM_AMX goes with the first, CLLM_AVXVNNI with the second:
// they only multiply matrices in a way of their own. Every operation has one fixed rounding: `fma` rounds once in
// all builds, and sums over lanes use one fixed tree. Results are equal for equal input within a build, not across builds.
#pragma once

#include <cmath>
#include <cstdint>

#include "half.h"

#if defined(CLLM_AVX512)
// GCC 12 warns about undefined operands in its own header.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#if defined(CLLM_AMX)
#define CLLM_NS amx
#else
#define CLLM_NS avx512
#endif
#elif defined(CLLM_AVX2)
#include <immintrin.h>
#if defined(CLLM_AVXVNNI)
#define CLLM_NS avxvnni
#else
#define CLLM_NS avx2
#endif
#else
#define CLLM_NS generic
#endif

namespace cllm {
namespace CLLM_NS {

#if defined(CLLM_AVX512)

struct Vec {
    static constexpr int lanes = 16;
    __m512 v;
    static CLLM_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
    static CLLM_INLINE Vec all(float x) { return {_mm512_set1_ps(x)}; }
    static CLLM_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static CLLM_INLINE Vec load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
    static CLLM_INLINE Vec load_bf16(const uint16_t* p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
    }
    CLLM_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
    // Past the caches, to an aligned address; stream_fence() (stream_copy.h) makes it seen by others.
    CLLM_INLINE void stream(float* p) const { _mm512_stream_ps(p, v); }
    CLLM_INLINE void store_f16(uint16_t* p) const {
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    CLLM_INLINE float sum() const { return _mm512_reduce_add_ps(v); }
    CLLM_INLINE float max() const { return _mm512_reduce_max_ps(v); }
};
CLLM_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
CLLM_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
CLLM_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
CLLM_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
CLLM_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
CLLM_INLINE Vec vmax(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
CLLM_INLINE Vec vmin(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
CLLM_INLINE Vec vabs(Vec a) { return {_mm512_abs_ps(a.v)}; }
CLLM_INLINE Vec vround(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for whole n, where both a and the result are normal numbers.
CLLM_INLINE Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// One bit per lane: is a >= b? Never where one of them is NaN.
CLLM_INLINE uint32_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// x where a >= b, otherwise 0.
CLLM_INLINE Vec where_at_least(Vec a, Vec b, Vec x) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), x.v)};
}
// sum + x where a >= b, otherwise sum.
CLLM_INLINE Vec add_where_at_least(Vec sum, Vec a, Vec b, Vec x) {
    return {_mm512_mask_add_ps(sum.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), sum.v, x.v)};
}
// A sum of vectors in float64.
struct DoubleSum {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    CLLM_INLINE void add(Vec x) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
    }
    CLLM_INLINE double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};

#elif defined(CLLM_AVX2)

struct Vec {
    static constexpr int lanes = 8;
    __m256 v;
    static CLLM_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
    static CLLM_INLINE Vec all(float x) { return {_mm256_set1_ps(x)}; }
    static CLLM_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static CLLM_INLINE Vec load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
    static CLLM_INLINE Vec load_bf16(const uint16_t* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }
    CLLM_INLINE void store(float* p) const { _mm256_storeu_ps(p, v); }
    CLLM_INLINE void stream(float* p) const { _mm256_stream_ps(p, v); }
    CLLM_INLINE void store_f16(uint16_t* p) const {
        _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    CLLM_INLINE float sum() const {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
    CLLM_INLINE float max() const {
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
    }
};
CLLM_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
CLLM_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
CLLM_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
CLLM_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
CLLM_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
CLLM_INLINE Vec vmax(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
CLLM_INLINE Vec vmin(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
CLLM_INLINE Vec vabs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
CLLM_INLINE Vec vround(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
CLLM_INLINE Vec scale_by_power(Vec a, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), exponent))};
}
CLLM_INLINE uint32_t at_least(Vec a, Vec b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ))); }
CLLM_INLINE Vec where_at_least(Vec a, Vec b, Vec x) { return {_mm256_and_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ), x.v)}; }
CLLM_INLINE Vec add_where_at_least(Vec sum, Vec a, Vec b, Vec x) { return sum + where_at_least(a, b, x); }
struct DoubleSum {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    CLLM_INLINE void add(Vec x) {
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x.v)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1)));
    }
    CLLM_INLINE double total() const {
        const __m256d both = _mm256_add_pd(low, high);
        const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(both), _mm256_extractf128_pd(both, 1));
        return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
    }
};

#else

// The compiler's own vectors: it splits them into what the CPU has. Loops over plain arrays mostly stay scalar.
#pragma GCC diagnostic ignored "-Wpsabi"  // no vector is ever passed: all functions are inlined
typedef float Lanes __attribute__((vector_size(32), aligned(16)));
typedef int32_t IntLanes __attribute__((vector_size(32), aligned(16)));
typedef uint32_t UnsignedLanes __attribute__((vector_size(32), aligned(16)));
typedef uint16_t HalfLanes __attribute__((vector_size(16)));
typedef double DoubleLanes __attribute__((vector_size(64), aligned(16)));

struct Vec {
    static constexpr int lanes = 8;
    Lanes v;
    template <class F>
    static CLLM_INLINE Vec each(F value) {
        Vec out;
        for (int i = 0; i < lanes; ++i) out.v[i] = value(i);
        return out;
    }
    static CLLM_INLINE Vec zero() { return all(0.0f); }
    static CLLM_INLINE Vec all(float x) {
        return each([&](int) { return x; });
    }
    static CLLM_INLINE Vec load(const float* p) {
        Vec out;
        std::memcpy(&out.v, p, sizeof out.v);
        return out;
    }
    static CLLM_INLINE Vec load_f16(const uint16_t* p) {
        // As f16_to_f32, without branches: times 2^112 brings the exponent into float's range, exactly.
        HalfLanes halves;
        std::memcpy(&halves, p, sizeof halves);
        const IntLanes bits = __builtin_convertvector(halves, IntLanes), rest = (bits & 0x7fff) << 13;
        const IntLanes finite = (IntLanes)((Lanes)rest * 5.192296858534828e33f);
        // The sum's top bit is set for infinity and NaN only.
        const IntLanes special = (IntLanes)((UnsignedLanes)rest + 0x70800000u) >> 31;
        return {(Lanes)((bits & 0x8000) << 16 | finite | (special & 0x7f800000))};
    }
    static CLLM_INLINE Vec load_bf16(const uint16_t* p) {
        return each([&](int i) { return bf16_to_f32(p[i]); });
    }
    CLLM_INLINE void store(float* p) const { std::memcpy(p, &v, sizeof v); }
    CLLM_INLINE void stream(float* p) const { store(p); }
    CLLM_INLINE void store_f16(uint16_t* p) const {
        for (int i = 0; i < lanes; ++i) p[i] = f32_to_f16(v[i]);
    }
    CLLM_INLINE float sum() const { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
    CLLM_INLINE float max() const {
        float best = v[0];
        for (int i = 1; i < lanes; ++i) best = v[i] > best ? v[i] : best;
        return best;
    }
};
CLLM_INLINE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
CLLM_INLINE Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
CLLM_INLINE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
CLLM_INLINE Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
// Without a fused instruction a correctly rounded fma is a slow library call; two roundings, always, are as repeatable.
CLLM_INLINE Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
// All bits of the lanes where a > b, or a >= b. Comparing whole vectors, gcc goes lane by lane where registers are shorter.
template <bool or_equal>
CLLM_INLINE Vec is_greater(Vec a, Vec b) {
    typedef float Half __attribute__((vector_size(16)));
    Half x[2], y[2];
    std::memcpy(x, &a.v, sizeof x);
    std::memcpy(y, &b.v, sizeof y);
    for (int i = 0; i < 2; ++i) x[i] = or_equal ? (Half)(x[i] >= y[i]) : (Half)(x[i] > y[i]);
    return Vec::load((const float*)x);
}
CLLM_INLINE Vec select(Vec mask, Vec a, Vec b) {
    const IntLanes bits = (IntLanes)mask.v;
    return {(Lanes)((bits & (IntLanes)a.v) | (~bits & (IntLanes)b.v))};
}
CLLM_INLINE Vec vmax(Vec a, Vec b) { return select(is_greater<false>(a, b), a, b); }
CLLM_INLINE Vec vmin(Vec a, Vec b) { return select(is_greater<false>(b, a), a, b); }
CLLM_INLINE Vec vabs(Vec a) { return {(Lanes)((IntLanes)a.v & 0x7fffffff)}; }
// For magnitudes below 2^22, which are all that is rounded here: adding 1.5 * 2^23 leaves no room for a fraction.
CLLM_INLINE Vec vround(Vec a) { return {(a.v + 12582912.0f) - 12582912.0f}; }
CLLM_INLINE Vec scale_by_power(Vec a, Vec n) {
    return {(Lanes)((IntLanes)a.v + __builtin_convertvector(n.v, IntLanes) * (1 << 23))};
}
CLLM_INLINE uint32_t at_least(Vec a, Vec b) {
    const IntLanes bits = (IntLanes)is_greater<true>(a, b).v & IntLanes{1, 2, 4, 8, 16, 32, 64, 128};
    uint64_t pairs[4];
    std::memcpy(pairs, &bits, sizeof bits);
    const uint64_t all = (pairs[0] | pairs[1]) | (pairs[2] | pairs[3]);
    return uint32_t(all | all >> 32);
}
CLLM_INLINE Vec where_at_least(Vec a, Vec b, Vec x) { return select(is_greater<true>(a, b), x, Vec::zero()); }
CLLM_INLINE Vec add_where_at_least(Vec sum, Vec a, Vec b, Vec x) { return sum + where_at_least(a, b, x); }
struct DoubleSum {
    DoubleLanes v = {};
    CLLM_INLINE void add(Vec x) { v += __builtin_convertvector(x.v, DoubleLanes); }
    CLLM_INLINE double total() const { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
};

#endif

// e^x for -87 <= x <= 88.7, good to about 2 units in the last place.
CLLM_INLINE Vec exp_within(Vec x) {
    const Vec n = vround(x * Vec::all(1.44269504088896341f));
    Vec r = fma(n, Vec::all(-0.693359375f), x);
    r = fma(n, Vec::all(2.12194440e-4f), r);
    Vec p = Vec::all(1.9875691500e-4f);
    p = fma(p, r, Vec::all(1.3981999507e-3f));
    p = fma(p, r, Vec::all(8.3334519073e-3f));
    p = fma(p, r, Vec::all(4.1665795894e-2f));
    p = fma(p, r, Vec::all(1.6666665459e-1f));
    p = fma(p, r, Vec::all(5.0000001201e-1f));
    p = fma(p, r * r, r + Vec::all(1.0f));
    return scale_by_power(p, n);
}

// e^x; stays at e^-87 below -87, since smaller numbers are subnormal and slow, and at e^88.7 above 88.7.
CLLM_INLINE Vec vexp(Vec x) { return exp_within(vmax(vmin(x, Vec::all(88.7f)), Vec::all(-87.0f))); }

// Good to about 1e-7.
CLLM_INLINE Vec vtanh(Vec x) { return Vec::all(1.0f) - Vec::all(2.0f) / (vexp(x + x) + Vec::all(1.0f)); }

}  // namespace CLLM_NS
}  // namespace cllm

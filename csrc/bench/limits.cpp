#include "limits.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../cpu.h"
#include "limits_loops.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define CLLM_X86 1
#else
#define CLLM_X86 0
#endif

namespace cllm {

volatile uint64_t result_sink;

namespace {

constexpr size_t kReadBytes = size_t(256) << 20;
constexpr size_t kLine = 64;
constexpr size_t kHugePage = size_t(2) << 20;
// A thread reads its part as this many parallel streams, which keeps more cache lines in flight than one.
constexpr int kStreams = 4;

struct Loops {
    Dots compute;
    // Reads `bytes`, a multiple of kLine, of each of kStreams parts that begin `stride` bytes apart.
    void (*read)(const uint8_t* data, size_t stride, size_t bytes);
};

#if CLLM_X86

// GCC 12 warns about an undefined operand in its own header.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) double dots_avx512() {
    const __m512i weights = _mm512_set1_epi8(3), activations = _mm512_set1_epi8(2);
    __m512i sums[16];
    for (auto& sum : sums) {
        sum = _mm512_setzero_si512();
        CLLM_OPAQUE(sum);
    }
    for (int group = 0; group < kGroupsPerCall; group++)
        for (int dot = 0; dot < kGroupDots; dot++)
#pragma GCC unroll 16
            for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, weights, activations);
    __m512i total = _mm512_setzero_si512();
    for (auto& sum : sums) total = _mm512_add_epi32(total, sum);
    keep(total);
    return double(kGroupsPerCall) * kGroupDots * 16 * 64;
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) double grouped_dots_avx512() {
    const __m512i weights = _mm512_set1_epi8(3), activations = _mm512_set1_epi8(2);
    const __m512 scale = _mm512_set1_ps(1e-6f);
    __m512 floats[8];
    for (auto& value : floats) value = _mm512_setzero_ps();
    for (int group = 0; group < kGroupsPerCall; group++) {
        __m512i sums[8];
        for (auto& sum : sums) {
            sum = _mm512_setzero_si512();
            CLLM_OPAQUE(sum);
        }
        for (int dot = 0; dot < kGroupDots; dot++)
#pragma GCC unroll 8
            for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, weights, activations);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) floats[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i]), scale, floats[i]);
    }
    __m512 total = _mm512_setzero_ps();
    for (auto& value : floats) total = _mm512_add_ps(total, value);
    keep(total);
    return double(kGroupsPerCall) * kGroupDots * 8 * 64;
}

__attribute__((target("avx512f"))) void read_avx512(const uint8_t* data, size_t stride, size_t bytes) {
    __m512i sums[kStreams];
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    for (size_t at = 0; at < bytes; at += kLine)
#pragma GCC unroll 4
        for (int i = 0; i < kStreams; i++)
            sums[i] = _mm512_xor_si512(sums[i], _mm512_loadu_si512(data + i * stride + at));
    for (int i = 1; i < kStreams; i++) sums[0] = _mm512_xor_si512(sums[0], sums[i]);
    keep(sums[0]);
}

// Products of an unsigned and a signed byte are summed in pairs to 16 bits, and those over a group, which fits for weights
// of four bits; the callers sum once per group to 32 bits.
__attribute__((target("avx2"), always_inline)) inline void sum_group_avx2(__m256i (&sums)[4]) {
    __m256i weights = _mm256_set1_epi8(3), activations = _mm256_set1_epi8(2);
    for (auto& sum : sums) {
        sum = _mm256_setzero_si256();
        CLLM_OPAQUE(sum);
    }
#pragma GCC unroll 8
    for (int dot = 0; dot < kGroupDots; dot++) {
#pragma GCC unroll 4
        for (auto& sum : sums) {
            CLLM_OPAQUE(weights);
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, activations));
            CLLM_OPAQUE(sum);
        }
    }
}

__attribute__((target("avx2"))) double dots_avx2() {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i totals[4];
    for (auto& total : totals) total = _mm256_setzero_si256();
    for (int group = 0; group < kGroupsPerCall; group++) {
        __m256i sums[4];
        sum_group_avx2(sums);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) totals[i] = _mm256_add_epi32(totals[i], _mm256_madd_epi16(sums[i], ones));
    }
    __m256i total = _mm256_setzero_si256();
    for (auto& each : totals) total = _mm256_add_epi32(total, each);
    keep(total);
    return double(kGroupsPerCall) * kGroupDots * 4 * 32;
}

__attribute__((target("avx2,fma"))) double grouped_dots_avx2() {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256 scale = _mm256_set1_ps(1e-6f);
    __m256 totals[4];
    for (auto& total : totals) total = _mm256_setzero_ps();
    for (int group = 0; group < kGroupsPerCall; group++) {
        __m256i sums[4];
        sum_group_avx2(sums);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            totals[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(sums[i], ones)), scale, totals[i]);
    }
    __m256 total = _mm256_setzero_ps();
    for (auto& each : totals) total = _mm256_add_ps(total, each);
    keep(total);
    return double(kGroupsPerCall) * kGroupDots * 4 * 32;
}

__attribute__((target("avx2"))) void read_avx2(const uint8_t* data, size_t stride, size_t bytes) {
    __m256i sums[kStreams];
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    for (size_t at = 0; at < bytes; at += kLine)
#pragma GCC unroll 4
        for (int i = 0; i < kStreams; i++) {
            const auto* line = reinterpret_cast<const __m256i*>(data + i * stride + at);
            sums[i] = _mm256_xor_si256(sums[i], _mm256_xor_si256(_mm256_loadu_si256(line), _mm256_loadu_si256(line + 1)));
        }
    for (int i = 1; i < kStreams; i++) sums[0] = _mm256_xor_si256(sums[0], sums[i]);
    keep(sums[0]);
}

#pragma GCC diagnostic pop
#endif  // CLLM_X86

// Plain C++ on bytes in the first-level cache, as the compiler makes it.
constexpr int kGenericBytes = 4096;

template <bool grouped>
double dots_generic() {
    alignas(64) uint8_t weights[kGenericBytes];
    alignas(64) int8_t activations[kGenericBytes];
    std::memset(weights, 3, sizeof weights);
    std::memset(activations, 2, sizeof activations);
    constexpr int kRounds = 64;
    float total = 0;
    int32_t whole = 0;
    for (int round = 0; round < kRounds; round++) {
        __asm__ volatile("" : : "r"(weights), "r"(activations) : "memory");
        for (int at = 0; at < kGenericBytes; at += 32) {
            int32_t sum = 0;
            for (int i = 0; i < 32; i++) sum += int32_t(weights[at + i]) * activations[at + i];
            if (grouped) {
                total += float(sum) * 1e-6f;
            } else {
                whole += sum;
            }
        }
    }
    result_sink = uint64_t(whole) + uint64_t(total);
    return double(kRounds) * kGenericBytes;
}

// One word of a line brings the whole line.
void read_generic(const uint8_t* data, size_t stride, size_t bytes) {
    uint64_t sums[kStreams] = {};
    for (size_t at = 0; at < bytes; at += kLine)
        for (int i = 0; i < kStreams; i++) {
            uint64_t word;
            std::memcpy(&word, data + i * stride + at, sizeof word);
            sums[i] ^= word;
        }
    keep(sums);
}

Loops select_loops(const std::string& name) {
#if CLLM_X86
#if defined(CLLM_BUILDS_AMX)
    if (name == "amx" && has_amx() && take_amx()) return {amx_dots(), read_avx512};
#endif
#if defined(CLLM_BUILDS_AVXVNNI)
    if (name == "avxvnni" && runs_avxvnni()) return {avxvnni_dots(), read_avx2};
#endif
    if (name == "avx512" && runs_avx512()) return {{dots_avx512, grouped_dots_avx512}, read_avx512};
    if (name == "avx2" && runs_avx2()) return {{dots_avx2, grouped_dots_avx2}, read_avx2};
#endif
    if (name == "generic") return {{dots_generic<false>, dots_generic<true>}, read_generic};
    throw std::invalid_argument("measure_limits: this CPU cannot run the instruction set " + name);
}

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The sum per second of what `work(thread)` returns, called repeatedly on every thread for `seconds`. Each thread calls
// `prepare(thread)` and warms up with one call; then all begin to count together.
double rate_on_threads(
    int threads, double seconds, const std::function<double(int)>& work, const std::function<void(int)>& prepare = [](int) {}) {
    std::vector<double> rates(size_t(threads), 0.0);
    std::atomic<int> waiting{threads};
    const auto run = [&](int thread) {
        prepare(thread);
        work(thread);
        waiting--;
        while (waiting.load() > 0) std::this_thread::yield();
        double done = 0, elapsed = 0;
        const double start = seconds_now();
        do {
            done += work(thread);
            elapsed = seconds_now() - start;
        } while (elapsed < seconds);
        rates[size_t(thread)] = done / elapsed;
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; thread++) others.emplace_back(run, thread);
    run(0);
    for (auto& other : others) other.join();
    double total = 0;
    for (const double rate : rates) total += rate;
    return total;
}

struct FreeDeleter {
    void operator()(uint8_t* memory) const { std::free(memory); }
};

using Memory = std::unique_ptr<uint8_t, FreeDeleter>;

// At least this many bytes, in large pages if there are any, untouched: memory is placed near the thread that touches it
// first, so each thread must fill what it will read.
Memory untouched_memory(size_t bytes) {
    const size_t taken = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    Memory memory(static_cast<uint8_t*>(std::aligned_alloc(kHugePage, taken)));
    if (!memory) throw std::bad_alloc();
#if defined(__linux__)
    madvise(memory.get(), taken, MADV_HUGEPAGE);  // if it fails, the figure is a little lower
#endif
    return memory;
}

void check_measure(const std::string& name, int threads, double seconds) {
    if (threads < 1 || threads > 1024) throw std::invalid_argument(name + ": threads must be 1 to 1024");
    if (!(seconds > 0 && seconds <= 60)) throw std::invalid_argument(name + ": seconds must be above 0, up to 60");
}

// Every thread reads a part of its own, front to back, again and again.
double read_rate(const Loops& loops, int threads, double seconds, size_t bytes) {
    const size_t unit = size_t(threads) * kStreams * kLine;
    const size_t size = (bytes + unit - 1) / unit * unit;
    const Memory memory = untouched_memory(size);
    const size_t part = size / size_t(threads);
    const auto part_of = [&](int thread) { return memory.get() + size_t(thread) * part; };
    const auto read = [&](int thread) {
        loops.read(part_of(thread), part / kStreams, part / kStreams);
        return double(part);
    };
    return rate_on_threads(threads, seconds, read, [&](int thread) { std::memset(part_of(thread), 1, part); });
}

}  // namespace

MachineLimits measure_limits(const char* instruction_set, int threads, double seconds, size_t model_bytes) {
    check_measure("measure_limits", threads, seconds);
    if (model_bytes < kLine || model_bytes > (size_t(1) << 40))
        throw std::invalid_argument("measure_limits: model_bytes must be 64 to 2^40");
    const Loops loops = select_loops(instruction_set);
    MachineLimits limits;
    limits.int8_macs_per_s = rate_on_threads(threads, seconds, [&](int) { return loops.compute.dots(); });
    limits.grouped_int8_macs_per_s = rate_on_threads(threads, seconds, [&](int) { return loops.compute.grouped_dots(); });
    limits.read_bytes_per_s = read_rate(loops, threads, seconds, kReadBytes);
    limits.model_read_bytes_per_s = read_rate(loops, threads, seconds, model_bytes);
    return limits;
}

double measure_copy(int threads, double seconds, size_t bytes) {
    check_measure("measure_copy", threads, seconds);
    if (bytes < size_t(threads) || bytes > (size_t(1) << 40))
        throw std::invalid_argument("measure_copy: bytes must be as many as threads, up to 2^40");
    const Memory source = untouched_memory(bytes), target = untouched_memory(bytes);
    const size_t part = bytes / size_t(threads);
    const auto part_of = [&](const Memory& memory, int thread) { return memory.get() + size_t(thread) * part; };
    const auto copy = [&](int thread) {
        std::memcpy(part_of(target, thread), part_of(source, thread), part);
        return double(part);
    };
    const auto fill = [&](int thread) {
        std::memset(part_of(source, thread), 1, part);
        std::memset(part_of(target, thread), 1, part);
    };
    return rate_on_threads(threads, seconds, copy, fill);
}

}  // namespace cllm

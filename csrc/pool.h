// Threads that work on one step together.
//
// `run` starts a function on every thread, the caller among them. Inside it the threads go through the same phases: each
// takes tasks by `next` until none is left, then waits at `barrier`. A waiting thread spins first, because phases last
// microseconds, and sleeps after a while: where cores are scarce, spinning would keep the others from theirs.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace cllm {

// A number that only rises, and threads that wait for it to.
class Signal {
public:
    uint64_t value() const { return value_.load(std::memory_order_acquire); }
    void raise();
    // Until the value is another than `seen`: spins so many times, then sleeps.
    void wait_beyond(uint64_t seen, int spins);

private:
    alignas(64) std::atomic<uint64_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

class ThreadPool {
public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return int(workers_.size()) + 1; }

    // Calls work(context, thread) on all threads; returns when all have returned. `work` must not throw.
    void run(void (*work)(void*, int), void* context);

    // The next task of the phase; each number comes once. Tasks end where the caller says.
    int64_t next() { return task_.fetch_add(1, std::memory_order_relaxed); }

    // The next items of a phase that has `count` of them, alike: many at first, so that memory is read in long runs, and
    // fewer the fewer are left, so that the threads end together. Each item comes once; an empty span is the end.
    struct Span {
        int64_t first, last;
    };
    Span take(int64_t count) {
        int64_t first = task_.load(std::memory_order_relaxed), last;
        do {
            if (first >= count) return {count, count};
            last = first + std::max<int64_t>(1, (count - first) / (2 * size()));
        } while (!task_.compare_exchange_weak(first, last, std::memory_order_relaxed));
        return {first, last};
    }

    // Until all threads are here; then a new phase begins, its tasks numbered from 0.
    void barrier();

    // Every task of [0, count) once, on whichever thread comes first, then a barrier.
    template <class Work>
    void phase(int64_t count, Work&& work) {
        for (int64_t task = next(); task < count; task = next()) work(task);
        barrier();
    }

    // The same by spans.
    template <class Work>
    void spans(int64_t count, Work&& work) {
        for (Span span = take(count); span.first < span.last; span = take(count)) work(span.first, span.last);
        barrier();
    }

private:
    void serve(int thread);

    std::vector<std::thread> workers_;
    void (*work_)(void*, int) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<int64_t> task_{0};
    alignas(64) std::atomic<int> arrived_{0};
    Signal phases_, runs_;
    std::atomic<bool> closing_{false};
};

}  // namespace cllm

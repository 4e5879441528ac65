#include "pool.h"

namespace cllm {

namespace {

constexpr int kSpinsAtBarrier = 4000;
constexpr int kSpinsBetweenRuns = 400;  // the time between steps belongs to those who read the answers

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
}

ThreadPool::~ThreadPool() {
    closing_.store(true);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        runs_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(void (*work)(void*, int), void* context) {
    work_ = work;
    context_ = context;
    task_.store(0, std::memory_order_relaxed);
    runs_.fetch_add(1);
    if (sleepers_.load() > 0) {
        // Under the lock, so that nobody who has just found nothing to do misses it.
        { const std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    work(context, 0);
    barrier();
}

void ThreadPool::barrier() {
    if (workers_.empty()) {
        task_.store(0, std::memory_order_relaxed);
        return;
    }
    const uint64_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size() - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        task_.store(0, std::memory_order_relaxed);
        generation_.store(generation + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
        if (spins < kSpinsAtBarrier)
            pause();
        else
            std::this_thread::yield();
    }
}

void ThreadPool::wait_for_run(uint64_t seen) {
    for (int spins = 0; spins < kSpinsBetweenRuns; ++spins) {
        if (runs_.load() != seen) return;
        pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return runs_.load() != seen; });
    sleepers_.fetch_sub(1);
}

void ThreadPool::serve(int thread) {
    for (uint64_t seen = 0;; ++seen) {
        wait_for_run(seen);
        if (closing_.load()) return;
        work_(context_, thread);
        barrier();
    }
}

}  // namespace cllm

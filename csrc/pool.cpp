#include "pool.h"

namespace cllm {

namespace {

constexpr int kSpinsAtBarrier = 5000;
constexpr int kSpinsBetweenRuns = 1000;  // the time between steps belongs to those who read the answers

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void Signal::raise() {
    value_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    // Under the lock, so that nobody who has just found nothing new misses it.
    { const std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
}

void Signal::wait_beyond(uint64_t seen, int spins) {
    for (; spins > 0; --spins) {
        if (value() != seen) return;
        pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return value_.load() != seen; });
    sleepers_.fetch_sub(1);
}

ThreadPool::ThreadPool(int threads) {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
}

ThreadPool::~ThreadPool() {
    closing_.store(true);
    runs_.raise();
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(void (*work)(void*, int), void* context) {
    work_ = work;
    context_ = context;
    task_.store(0, std::memory_order_relaxed);
    runs_.raise();
    work(context, 0);
    barrier();
}

void ThreadPool::barrier() {
    const uint64_t phase = phases_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) < size() - 1) return phases_.wait_beyond(phase, kSpinsAtBarrier);
    arrived_.store(0, std::memory_order_relaxed);
    task_.store(0, std::memory_order_relaxed);
    phases_.raise();
}

void ThreadPool::serve(int thread) {
    for (uint64_t seen = 0;; ++seen) {
        runs_.wait_beyond(seen, kSpinsBetweenRuns);
        if (closing_.load()) return;
        work_(context_, thread);
        barrier();
    }
}

}  // namespace cllm

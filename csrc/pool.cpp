#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core.h"

namespace cllm {

namespace {

// Times in microseconds. Measured on 2 and 16 cores, alone and beside a busy process on each.
constexpr int kPatience = 2;        // before a thread helps with the shares of others
constexpr int kSpin = 1000;         // before it sleeps: longer than the time between two steps
constexpr int kCrowdedSpin = 100;   // the same on a crowded core: longer than a thread is ever late by chance
constexpr int kLook = 20;           // between two checks whether the core is crowded
constexpr int kRingEvery = 100;     // between two calls of sleepers, because waking one costs more than a small phase
constexpr int kYields = 50;         // how many times a thread yields to another of the pool before it sleeps

constexpr int kItemBits = 26;
constexpr uint64_t kItemMask = (uint64_t(1) << kItemBits) - 1;

uint64_t word(uint64_t phase, int64_t items) { return phase << kItemBits | uint64_t(items); }
bool is_of(uint64_t word, uint64_t phase) { return word >> kItemBits == (phase << kItemBits) >> kItemBits; }
int64_t items_of(uint64_t word) { return int64_t(word & kItemMask); }

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A pause is 10 to 150 cycles, as the CPU has it.
int measure_pauses() {
    using Clock = std::chrono::steady_clock;
    constexpr int kPauses = 256;
    double shortest = 1e9;
    for (int round = 0; round < 4; ++round) {
        const auto start = Clock::now();
        for (int i = 0; i < kPauses; ++i) pause();
        shortest = std::min(shortest, std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    }
    return std::max(1, int(kPauses / std::max(shortest, 0.1)));
}

int current_core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;  // unknown: threads count as on different cores
#endif
}

}  // namespace

ThreadPool::ThreadPool() : pauses_per_us_(measure_pauses()), states_(new ThreadState[kMostThreads]) {}

ThreadPool::~ThreadPool() {
    closing_.store(true);
    const uint64_t last = phase_.load() + 1;
    jobs_[last & 1].count.store(0);
    phase_.store(last);
    phases_.notify(INT_MAX);
    larger_.notify(INT_MAX);
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::grow(int threads) {
    try {
        workers_.reserve(size_t(threads - 1));
        for (int thread = int(workers_.size()) + 1; thread < threads; ++thread)
            workers_.emplace_back([this, thread] { serve(thread); });
    } catch (const std::system_error& error) {
        throw std::runtime_error("the system refused to start thread " + std::to_string(workers_.size() + 2) + " of " +
                                 std::to_string(threads) + ": " + error.what());
    }
}

void ThreadPool::begin_turn(int threads) {
    turn_.lock();
    const int before = team_.exchange(threads);
    if (before < threads && larger_.has_waiters()) larger_.notify(INT_MAX);
}

void ThreadPool::end_turn() { turn_.unlock(); }

void ThreadPool::run_phase(Entry entry, const void* context, int64_t count, int64_t grain, int shares) {
    if (count <= 0) return;
    if (count <= grain || count > int64_t(kItemMask)) return entry(context, 0, 0, count, true);
    const uint64_t phase = phase_.load(std::memory_order_relaxed) + 1;
    Job& job = jobs_[phase & 1];
    job.entry.store(entry, std::memory_order_relaxed);
    job.context.store(context, std::memory_order_relaxed);
    job.count.store(count, std::memory_order_relaxed);
    job.grain.store(grain, std::memory_order_relaxed);
    job.shares.store(shares, std::memory_order_relaxed);
    publish(phase);
    const auto over = [&] { return all_done(phase, count); };
    int64_t done = work_on(phase, 0, 0, 0);
    const auto lend_a_hand = [&] { done += help(phase, 0, done); };
    while (!wait(0, over, lend_a_hand)) finished_.wait(over);
}

void ThreadPool::publish(uint64_t phase) {
    phase_.store(phase);
    if (!phases_.has_waiters()) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - rung_ < std::chrono::microseconds(kRingEvery)) return;
    rung_ = now;
    phases_.notify(2);  // each that wakes wakes two more
}

bool ThreadPool::all_done(uint64_t phase, int64_t count) const {
    const int team = team_.load(std::memory_order_relaxed);
    for (int thread = 0; thread < team; ++thread) {
        const uint64_t done = states_[size_t(thread)].done.load();
        if (is_of(done, phase)) count -= items_of(done);
    }
    return count == 0;
}

// A range of a share, if anything is left of it. A late thread may read the job of a later phase; but then the phase number
// has moved on, which is checked last: phase k cannot end while a thread holds a range of it, and its job is overwritten only
// after phase k + 1 has begun. A late claim has no effect, since it carries the number of its phase. The team is set before its
// first phase is published, when nothing is left of the phase before.
bool ThreadPool::claim(uint64_t phase, int share, int thread, Range& range) {
    if (thread >= team_.load()) return false;
    const Job& job = jobs_[phase & 1];
    const int64_t count = job.count.load(), grain = job.grain.load(), shares = job.shares.load();
    share %= int(shares);
    const int64_t begin = count * share / shares, end = count * (share + 1) / shares;
    std::atomic<uint64_t>& taken = states_[size_t(share)].taken;
    uint64_t seen = taken.load();
    do {
        range.first = is_of(seen, phase) ? items_of(seen) : begin;
        if (range.first >= end) return false;
        const int64_t left = end - range.first;
        const int64_t some = shares == 1 ? grain : (left / 2 + grain - 1) / grain * grain;
        range.last = range.first + std::min(left, std::max(grain, some));
        if (phase_.load() != phase) return false;
    } while (!taken.compare_exchange_weak(seen, word(phase, range.last)));
    return phase_.load() == phase;
}

// Works on a share until nothing is left of it; returns the number of items. `done_before`: by this thread, in this phase.
int64_t ThreadPool::work_on(uint64_t phase, int share, int thread, int64_t done_before) {
    int64_t done = 0;
    Range range;
    std::atomic<int>& busy_on = states_[size_t(thread)].busy_on;
    while (claim(phase, share, thread, range)) {
        if (done == 0) busy_on.store(current_core(), std::memory_order_relaxed);
        const Job& job = jobs_[phase & 1];
        job.entry.load()(job.context.load(), thread, range.first, range.last, done_before + done == 0);
        done += range.last - range.first;
    }
    if (done == 0) return 0;
    if (thread != 0) busy_on.store(-1, std::memory_order_relaxed);  // the owner always has something to do
    report(phase, thread, done_before + done);
    return done;
}

void ThreadPool::report(uint64_t phase, int thread, int64_t done) {
    states_[size_t(thread)].done.store(word(phase, done));
    if (finished_.has_waiters()) finished_.notify(1);
}

int64_t ThreadPool::help(uint64_t phase, int thread, int64_t done_before) {
    const int team = team_.load();
    int64_t done = 0;
    for (int step = 0; step < team; ++step) done += work_on(phase, (thread + step) % team, thread, done_before + done);
    return done;
}

// Whether `over` came true within this many microseconds.
template <class Over>
bool ThreadPool::spin(int us, const Over& over) const {
    for (int i = us * pauses_per_us_; i >= 0; --i) {
        if (over()) return true;
        pause();
    }
    return false;
}

// Whether another busy thread was last seen on this thread's core, so that only one of them can run.
bool ThreadPool::in_the_way(int thread) const {
    const int core = current_core(), team = team_.load(std::memory_order_relaxed);
    for (int other = 0; core >= 0 && other < team; ++other)
        if (other != thread && states_[size_t(other)].busy_on.load(std::memory_order_relaxed) == core) return true;
    return false;
}

// Waits until `over`, helping meanwhile; false if it is time to sleep.
template <class Over, class Help>
bool ThreadPool::wait(int thread, const Over& over, const Help& help) const {
    thread_local Core core;
    if (spin(kPatience, over)) return true;
    help();
    int yields = 0;
    for (int waited = 0; waited < (core.crowded() ? kCrowdedSpin : kSpin); waited += kLook) {
        // A sleeping thread would have to be woken for every phase.
        while (in_the_way(thread) && yields++ < kYields) {
            sched_yield();
            if (spin(1, over)) return true;
            help();
        }
        if (spin(kLook, over)) return true;
        help();
    }
    return false;
}

void ThreadPool::serve(int thread) {
    uint64_t phase = 0;
    int64_t done = 0;  // in this phase
    const auto called = [&] { return thread < team_.load() || closing_.load(); };
    const auto over = [&] { return phase_.load() != phase; };
    const auto lend_a_hand = [&] { done += help(phase, thread, done); };
    while (!closing_.load()) {
        if (!called()) {
            larger_.wait(called);
            continue;
        }
        if (over()) {
            phase = phase_.load();
            done = work_on(phase, thread, thread, 0);
        }
        if (wait(thread, over, lend_a_hand)) continue;
        phases_.wait(over);
        if (phases_.has_waiters()) phases_.notify(2);
    }
}

}  // namespace cllm

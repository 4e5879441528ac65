// Threads that work on one step together, phase after phase.
//
// A phase is a number of items and what to do with them. The thread that owns the turn publishes it, works on it like the
// others, and continues when all *items* are done. It never waits for a thread that holds none, so a thread that sleeps, is
// late or was descheduled delays nobody: the others do its share.
//
//   owner     publish phase k ──► works ──► all items of k done? ──► publish phase k + 1
//   others    see phase k ──► own share ──► others' shares, if the phase takes longer ──► wait for k + 1
//
// Every thread has one cache line for what it takes and one for what it has done: if all cores are available, a phase costs
// one line that all read and one line per thread that the owner reads. A waiting thread spins, because phases last
// microseconds. On a core that others want it soon sleeps, which keeps its priority for when it is needed; for another
// thread of the pool it makes way at once.
//
// All engines of a process have one pool and take turns (team.h), each with as many of its threads as it was given, counted
// from the first. Threads beyond those of the turn sleep apart, so that no phase wakes them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "event_count.h"
#include "fair_lock.h"

namespace cllm {

class ThreadPool {
public:
    static constexpr int kMostThreads = 1024;
    // What a phase does with the items [first, last). Must not throw.
    using Entry = void (*)(const void* context, int thread, int64_t first, int64_t last, bool prepare);

    ThreadPool();
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Ensures at least this many threads, counting the caller of `run_phase`. One thread at a time may call it, also while
    // others run phases. Throws std::runtime_error if the system has no more; existing threads stay usable.
    void grow(int threads);

    // Sleeps until earlier callers are done, then owns the first `threads` threads until `end_turn`.
    void begin_turn(int threads);
    void end_turn();

    // Returns when all `count` items are done; only in a turn. There are as many shares as the turn has threads, or one.
    void run_phase(Entry entry, const void* context, int64_t count, int64_t grain, int shares);

private:
    // Late threads may read this, and then notice that they are late: see `claim`.
    struct Job {
        std::atomic<Entry> entry{nullptr};
        std::atomic<const void*> context{nullptr};
        std::atomic<int64_t> count{0}, grain{1};
        std::atomic<int> shares{1};
    };
    // Both words hold the number of a phase and a number of items.
    struct ThreadState {
        alignas(64) std::atomic<uint64_t> taken{0};  // of this share, as a position among all items
        alignas(64) std::atomic<uint64_t> done{0};   // by this thread
        alignas(64) std::atomic<int> busy_on{-1};    // the core on which this thread began to work
    };
    struct Range {
        int64_t first, last;
    };

    void publish(uint64_t phase);
    bool all_done(uint64_t phase, int64_t count) const;
    bool claim(uint64_t phase, int share, int thread, Range& range);
    int64_t work_on(uint64_t phase, int share, int thread, int64_t done_before);
    int64_t help(uint64_t phase, int thread, int64_t done_before);
    void serve(int thread);
    void report(uint64_t phase, int thread, int64_t done);
    template <class Over>
    bool spin(int us, const Over& over) const;
    template <class Over, class Help>
    bool wait(int thread, const Over& over, const Help& help) const;
    bool in_the_way(int thread) const;

    const int pauses_per_us_;
    std::unique_ptr<ThreadState[]> states_;
    std::vector<std::thread> workers_;
    FairLock turn_;
    Job jobs_[2];  // of even and of odd phases
    alignas(64) std::atomic<uint64_t> phase_{0};
    std::atomic<int> team_{0};  // threads in this turn; changes only between phases
    std::atomic<bool> closing_{false};
    alignas(64) EventCount phases_;    // workers sleep until the next one
    alignas(64) EventCount finished_;  // the owner sleeps until more is done
    alignas(64) EventCount larger_;    // workers that are not in the team sleep until there is a larger one
    std::chrono::steady_clock::time_point rung_{};
};

}  // namespace cllm

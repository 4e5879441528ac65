// Threads that work on one step together, phase after phase.
//
// A phase is a number of items and what to do with them. The thread that owns the pool publishes it, works on it like the
// others and goes on when all *items* are done. It never waits for a thread that has none in hand, so one that sleeps, comes
// late or has lost its core to somebody else holds nobody up: the others do its part.
//
//   owner     publish phase k ──► works ──► all items of k done? ──► publish phase k + 1
//   others    see phase k ──► own share ──► others' shares, if the phase takes longer ──► wait for k + 1
//
// Every thread has a cache line of its own for what it takes and one for what it has done: where all cores are there, a phase
// costs one line that all read and one line each that the owner reads. Who waits spins, because phases last microseconds, but
// not for long on a core that somebody else wants: it sleeps there, which also saves its turn for when it is needed. If that
// somebody is one of the pool itself, it makes way at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "core.h"
#include "sleep.h"

namespace cllm {

class ThreadPool {
public:
    explicit ThreadPool(int threads);  // throws std::runtime_error if the system has no more threads
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // work(thread, first, last) for ranges that are [0, count) together, each item once; returns when all are done. Must not
    // throw, and is for the thread that owns the pool alone. Each thread begins with a share of its own, which is the same
    // one for the same count: what it reads, and has touched first, is near it. Ranges are multiples of `grain` where that
    // is possible.
    template <class Work>
    void share(int64_t count, int64_t grain, Work&& work) {
        share(count, grain, [](int) {}, work);
    }

    // The same; each thread that gets a range calls prepare(thread) before its first.
    template <class Prepare, class Work>
    void share(int64_t count, int64_t grain, Prepare&& prepare, Work&& work) {
        run(count, grain, size(), prepare, work);
    }

    // work(thread, item) for every item of [0, count), handed out one by one in their order: for items of unequal size.
    template <class Work>
    void queue(int64_t count, Work&& work) {
        run(count, 1, 1, [](int) {}, [&](int thread, int64_t first, int64_t last) {
            for (; first < last; ++first) work(thread, first);
        });
    }

private:
    using Entry = void (*)(const void* context, int thread, int64_t first, int64_t last, bool prepare);

    // Read by threads that may be late, and then find out that they are: see `claim`.
    struct Job {
        std::atomic<Entry> entry{nullptr};
        std::atomic<const void*> context{nullptr};
        std::atomic<int64_t> count{0}, grain{1};
        std::atomic<int> shares{1};
    };
    // Both words hold the number of a phase and a number of items.
    struct Seat {
        alignas(64) std::atomic<uint64_t> taken{0};  // of this share, as a position among all items
        alignas(64) std::atomic<uint64_t> done{0};   // by this thread
        alignas(64) std::atomic<int> busy_on{-1};    // the core on which this thread was when it began to work
    };
    struct Range {
        int64_t first, last;
    };

    template <class Prepare, class Work>
    void run(int64_t count, int64_t grain, int shares, const Prepare& prepare, const Work& work) {
        struct Both {
            const Prepare& prepare;
            const Work& work;
        };
        const Entry entry = [](const void* context, int thread, int64_t first, int64_t last, bool to_prepare) {
            const Both& both = *static_cast<const Both*>(context);
            if (to_prepare) both.prepare(thread);
            both.work(thread, first, last);
        };
        const Both both{prepare, work};
        run_phase(entry, &both, count, grain, shares);
    }

    void run_phase(Entry entry, const void* context, int64_t count, int64_t grain, int shares);
    void publish(uint64_t phase);
    bool all_done(uint64_t phase, int64_t count) const;
    bool claim(uint64_t phase, int share, Range& range);
    int64_t work_on(uint64_t phase, int share, int thread, int64_t done_before);
    int64_t help(uint64_t phase, int thread, int64_t done_before);
    void serve(int thread);
    void close();
    void report(uint64_t phase, int thread, int64_t done);
    template <class Over>
    bool spin(int us, const Over& over) const;
    template <class Over, class Help>
    bool wait(int thread, Core& core, const Over& over, const Help& help) const;
    bool in_the_way(int thread) const;

    const int size_;
    std::unique_ptr<Seat[]> seats_;
    std::vector<std::thread> workers_;
    const int pauses_per_us_;
    Job jobs_[2];  // of even and of odd phases
    alignas(64) std::atomic<uint64_t> phase_{0};
    std::atomic<bool> closing_{false};
    alignas(64) Bell phases_;    // workers sleep until the next one
    alignas(64) Bell finished_;  // the owner sleeps until somebody has done more
    std::chrono::steady_clock::time_point rung_{};
    Core owners_core_;
};

}  // namespace cllm

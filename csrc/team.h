// What an engine has of the process's compute threads: as many as it was given, a turn at a time.
//
//   engine A, 2 threads   ▇▇▇▇      ▇▇▇▇          one pool, as large as the largest team. Who has a turn has its first threads
//   engine B, 4 threads       ▇▇▇▇▇▇    ▇▇▇▇▇▇    to itself; turns go to whoever has waited longest.
#pragma once

#include <cstdint>
#include <memory>

#include "pool.h"

namespace cllm {

class Team {
public:
    explicit Team(int size);  // throws std::invalid_argument, and std::runtime_error if the system has no more threads

    int size() const { return size_; }

    // work(thread, first, last) for ranges that are [0, count) together, each item once; returns when all are done. Must not
    // throw, and is for the thread that has the turn alone. Each thread begins with a share of its own, which is the same
    // one for the same count: what it reads, and has touched first, is near it. Ranges are multiples of `grain` where that
    // is possible.
    template <class Work>
    void share(int64_t count, int64_t grain, Work&& work) {
        share(count, grain, [](int) {}, work);
    }

    // The same; each thread that gets a range calls prepare(thread) before its first.
    template <class Prepare, class Work>
    void share(int64_t count, int64_t grain, Prepare&& prepare, Work&& work) {
        run(count, grain, size_, prepare, work);
    }

    // work(thread, item) for every item of [0, count), handed out one by one in their order: for items of unequal size.
    template <class Work>
    void queue(int64_t count, Work&& work) {
        run(count, 1, 1, [](int) {}, [&](int thread, int64_t first, int64_t last) {
            for (; first < last; ++first) work(thread, first);
        });
    }

private:
    friend class Turn;

    template <class Prepare, class Work>
    void run(int64_t count, int64_t grain, int shares, const Prepare& prepare, const Work& work) {
        if (alone_) {
            if (count <= 0) return;
            prepare(0);
            return work(0, 0, count);
        }
        struct Both {
            const Prepare& prepare;
            const Work& work;
        };
        const ThreadPool::Entry entry = [](const void* context, int thread, int64_t first, int64_t last, bool to_prepare) {
            const Both& both = *static_cast<const Both*>(context);
            if (to_prepare) both.prepare(thread);
            both.work(thread, first, last);
        };
        const Both both{prepare, work};
        pool_->run_phase(entry, &both, count, grain, shares);
    }

    const int size_;
    std::shared_ptr<ThreadPool> pool_;  // none for a team of one
    bool alone_ = true;                 // whether the caller does everything, in this turn
};

// Taken around whatever a team shares out. A team of one needs nobody and waits for nobody; neither does one in a process that
// was forked off, where the pool's threads are not there, and whoever had the turn may not be there to pass it on.
class Turn {
public:
    explicit Turn(Team& team);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

private:
    Team& team_;
};

}  // namespace cllm

// An engine's share of the process's compute threads: as many as it was given, a turn at a time.
//
//   engine A, 2 threads   ▇▇▇▇      ▇▇▇▇          one pool, as large as the largest team. A turn has the pool's first threads
//   engine B, 4 threads       ▇▇▇▇▇▇    ▇▇▇▇▇▇    to itself; turns are granted in order of arrival.
#pragma once

#include <cstdint>
#include <memory>

#include "pool.h"

namespace cllm {

class Team {
public:
    explicit Team(int size);  // throws std::invalid_argument, and std::runtime_error if the system has no more threads

    int size() const { return size_; }

    // Calls work(thread, first, last) for ranges that cover [0, count), each item once; returns when all are done. `work` must
    // not throw. Only for the thread that has the turn. Each thread begins with its own share, the same one for the same
    // count, so that memory it touched first is near it. Ranges are multiples of `grain` if possible.
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

// Held while a team works. A team of one waits for nobody; neither does a team in a forked process, which has none of the
// pool's threads, and where the thread that had the turn may be missing, too.
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

// Whether the calling thread has its core to itself.
#pragma once

#include <chrono>

#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace cllm {

// Each thread has its own and asks only that. A core counts as crowded for a while after another program ran on it.
class Core {
public:
    bool crowded() {
        const auto now = Clock::now();
        const long switches = involuntary_switches();
        if (switches != seen_) {
            seen_ = switches;
            until_ = now + std::chrono::milliseconds(20);
        }
        return now < until_;
    }

private:
    using Clock = std::chrono::steady_clock;

    static long involuntary_switches() {
#if defined(__linux__)
        rusage used;
        if (getrusage(RUSAGE_THREAD, &used) == 0) return used.ru_nivcsw;
#endif
        return 0;
    }

    long seen_ = 0;
    Clock::time_point until_{};
};

}  // namespace cllm

// A lock that goes to the thread that has waited longest.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#include "event_count.h"

namespace cllm {

// Waiting threads sleep: it is held for a whole step.
class FairLock {
public:
    void lock() {
        const uint32_t mine = asked_.fetch_add(1);
        const auto mine_now = [&] { return served_.load() == mine; };
        while (!mine_now()) waiting_.wait(mine_now);
    }
    void unlock() {
        served_.fetch_add(1);
        if (waiting_.has_waiters()) waiting_.notify(INT_MAX);
    }

private:
    std::atomic<uint32_t> asked_{0}, served_{0};
    EventCount waiting_;
};

}  // namespace cllm

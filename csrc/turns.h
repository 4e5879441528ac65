// A lock that goes to whoever has waited longest.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#include "sleep.h"

namespace cllm {

// Who waits sleeps: a turn is a whole step.
class Turns {
public:
    void take() {
        const uint32_t mine = asked_.fetch_add(1);
        const auto called = [&] { return served_.load() == mine; };
        while (!called()) waiting_.sleep(called);
    }
    void pass_on() {
        served_.fetch_add(1);
        if (waiting_.anybody()) waiting_.ring(INT_MAX);
    }

private:
    std::atomic<uint32_t> asked_{0}, served_{0};
    Bell waiting_;
};

}  // namespace cllm

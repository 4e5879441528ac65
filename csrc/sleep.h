// Sleeping until somebody rings: on Linux a futex, so that waking a few of many does not wake them all.
#pragma once

#include <atomic>
#include <cstdint>

#if !defined(__linux__)
#include <condition_variable>
#include <mutex>
#endif

namespace cllm {

class Bell {
public:
    // Sleeps until `ring`, unless `awake()` is true once this thread counts as a sleeper: what makes it true must happen
    // before `anybody` is asked. May end early.
    template <class Awake>
    void sleep(const Awake& awake) {
        const uint32_t heard = rung_.load();
        sleepers_.fetch_add(1);
        if (!awake()) wait(heard);
        sleepers_.fetch_sub(1);
    }
    bool anybody() const { return sleepers_.load() > 0; }
    // Wakes that many sleepers, if there are.
    void ring(int count);

private:
    void wait(uint32_t heard);

    std::atomic<uint32_t> rung_{0};
    std::atomic<int> sleepers_{0};
#if !defined(__linux__)
    std::mutex mutex_;
    std::condition_variable wake_;
#endif
};

}  // namespace cllm

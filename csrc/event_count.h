// An event count: threads sleep until they are notified. On Linux a futex, so that waking a few does not wake all.
#pragma once

#include <atomic>
#include <cstdint>

#if !defined(__linux__)
#include <condition_variable>
#include <mutex>
#endif

namespace cllm {

class EventCount {
public:
    // Sleeps until `notify`, unless `ready()` is true once this thread counts as a waiter. The notifier must make it true
    // before it calls `has_waiters`. May return early.
    template <class Ready>
    void wait(const Ready& ready) {
        const uint32_t seen = count_.load();
        waiters_.fetch_add(1);
        if (!ready()) wait_for_change(seen);
        waiters_.fetch_sub(1);
    }
    bool has_waiters() const { return waiters_.load() > 0; }
    // Wakes up to `count` of them.
    void notify(int count);

private:
    void wait_for_change(uint32_t seen);

    std::atomic<uint32_t> count_{0};
    std::atomic<int> waiters_{0};
#if !defined(__linux__)
    std::mutex mutex_;
    std::condition_variable wake_;
#endif
};

}  // namespace cllm

#include "event_count.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cllm {

#if defined(__linux__)

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads it as a plain number");

void EventCount::wait_for_change(uint32_t seen) {
    // Returns at once if the value has changed.
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void EventCount::notify(int count) {
    count_.fetch_add(1);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

#else

void EventCount::wait_for_change(uint32_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return count_.load() != seen; });
}

void EventCount::notify(int) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        count_.fetch_add(1);
    }
    wake_.notify_all();
}

#endif

}  // namespace cllm

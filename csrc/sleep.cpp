#include "sleep.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cllm {

#if defined(__linux__)

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads it as a plain number");

void Bell::wait(uint32_t heard) {
    // Returns at once if somebody has rung since.
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rung_), FUTEX_WAIT_PRIVATE, heard, nullptr, nullptr, 0);
}

void Bell::ring(int count) {
    rung_.fetch_add(1);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rung_), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

#else

void Bell::wait(uint32_t heard) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return rung_.load() != heard; });
}

void Bell::ring(int) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        rung_.fetch_add(1);
    }
    wake_.notify_all();
}

#endif

}  // namespace cllm

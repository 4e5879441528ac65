#include "team.h"

#include <unistd.h>

#include <mutex>
#include <stdexcept>
#include <string>

namespace cllm {

namespace {

// The process's pool, while a team uses it.
struct Shared {
    std::mutex mutex;
    std::weak_ptr<ThreadPool> pool;
};

// Never destroyed: teams may outlive static objects at exit.
Shared& shared() {
    static Shared& only = *new Shared;
    return only;
}

// A forked process has none of a pool's threads, and joining them would never end, so the pool is leaked.
struct DeleteByOwner {
    pid_t owner = getpid();
    void operator()(ThreadPool* pool) const {
        if (getpid() == owner) delete pool;
    }
};

bool is_mine(const std::shared_ptr<ThreadPool>& pool) {
    return std::get_deleter<DeleteByOwner>(pool)->owner == getpid();
}

std::shared_ptr<ThreadPool> pool_of(int threads) {
    Shared& known = shared();
    const std::lock_guard<std::mutex> lock(known.mutex);
    std::shared_ptr<ThreadPool> pool = known.pool.lock();
    if (!pool || !is_mine(pool)) pool.reset(new ThreadPool, DeleteByOwner{});
    pool->grow(threads);
    known.pool = pool;
    return pool;
}

int checked(int size) {
    if (size < 1 || size > ThreadPool::kMostThreads) throw std::invalid_argument("threads is " + std::to_string(size));
    return size;
}

}  // namespace

Team::Team(int size) : size_(checked(size)), pool_(size > 1 ? pool_of(size) : nullptr) {}

Turn::Turn(Team& team) : team_(team) {
    team_.alone_ = !team_.pool_ || !is_mine(team_.pool_);
    if (!team_.alone_) team_.pool_->begin_turn(team_.size_);
}

Turn::~Turn() {
    if (!team_.alone_) team_.pool_->end_turn();
}

}  // namespace cllm

// Memory straight from the operating system: zero at first, taken page by page as it is touched, given back whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "team.h"

namespace cllm {

// Which pages to ask the operating system for: of 2 MiB, which need fewer address translations, or of the usual size. If
// there are no large ones, usual ones are taken.
enum class Pages { large, usual };

class Region {
public:
    Region() = default;
    explicit Region(size_t bytes, Pages pages = Pages::large);  // throws std::bad_alloc
    ~Region();
    Region(Region&& other) noexcept;
    Region& operator=(Region&& other) noexcept;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

    // Returns the pages (of the requested size) that lie wholly within these bytes to the operating system; their contents
    // are lost. Throws std::system_error.
    void release(size_t offset, size_t bytes);
    // Allocates the pages of these bytes, on all threads; their contents are lost. Throws std::system_error.
    void prepare(size_t offset, size_t bytes, Team& team);
    // Bytes that are in memory, as the operating system says. Throws std::system_error.
    size_t resident() const;

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
    size_t mapped_ = 0;  // whole pages
    size_t page_ = 1;
};

// Weights, one after another in large regions, so that big pages can be used; freed together.
class WeightArena {
public:
    uint8_t* take(size_t bytes);  // aligned to 64
    size_t taken() const { return taken_; }

private:
    std::vector<Region> regions_;
    size_t used_ = 0;  // of the last region
    size_t taken_ = 0;
};

// An array that only grows, aligned to 64; growing loses its contents.
template <class T>
class Buffer {
public:
    T* data() const { return data_.get(); }
    size_t size() const { return size_; }
    void ensure(size_t count) {
        if (count <= size_) return;
        size_ = 0;  // in case the allocation fails
        data_.reset();
        data_.reset(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))));
        size_ = count;
    }

private:
    struct Free {
        void operator()(T* p) const { ::operator delete(p, std::align_val_t(64)); }
    };
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

}  // namespace cllm

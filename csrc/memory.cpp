#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace cllm {

namespace {

constexpr size_t kBigPage = size_t(2) << 20;
constexpr size_t kShelfRegion = size_t(64) << 20;

size_t page_size() { return size_t(sysconf(_SC_PAGESIZE)); }

}  // namespace

Region::Region(size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(found);
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes, MADV_HUGEPAGE);  // a hint: fewer address translations; without it things are only slower
#endif
}

Region::~Region() {
    if (data_) munmap(data_, size_);
}

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

void Region::release(size_t offset, size_t bytes) {
    const size_t page = page_size(), first = (offset + page - 1) / page * page, last = (offset + bytes) / page * page;
    if (first < last) madvise(data_ + first, last - first, MADV_DONTNEED);
}

void Region::prepare(size_t offset, size_t bytes) {
    const size_t page = page_size();
    for (size_t at = offset; at < offset + bytes; at += page) data_[at] = 0;
}

size_t Region::resident() const {
    const size_t page = page_size(), pages = (size_ + page - 1) / page;
    std::vector<unsigned char> in_memory(pages);
    if (pages == 0 || mincore(data_, size_, in_memory.data()) != 0) return 0;
    size_t count = 0;
    for (const unsigned char flag : in_memory) count += flag & 1;
    return count * page;
}

uint8_t* Shelf::take(size_t bytes) {
    const size_t rounded = (bytes + 63) / 64 * 64;
    if (regions_.empty() || regions_.back().size() - used_ < rounded) {
        regions_.emplace_back(std::max(kShelfRegion, (rounded + kBigPage - 1) / kBigPage * kBigPage));
        used_ = 0;
    }
    uint8_t* at = regions_.back().data() + used_;
    used_ += rounded;
    taken_ += rounded;
    return at;
}

}  // namespace cllm

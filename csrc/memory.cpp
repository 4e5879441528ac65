#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

namespace cllm {

namespace {

constexpr size_t kLargePage = size_t(2) << 20;
constexpr size_t kShelfRegion = size_t(64) << 20;
constexpr size_t kLookPages = size_t(1) << 16;  // pages per query

size_t usual_page() { return size_t(sysconf(_SC_PAGESIZE)); }

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

// Address space that begins at a multiple of `alignment`; both are multiples of the usual page size.
uint8_t* map_aligned(size_t bytes, size_t alignment) {
    const size_t spare = alignment - usual_page();
    if (bytes > SIZE_MAX - spare) throw std::bad_alloc();
    void* found = mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    auto* const first = static_cast<uint8_t*>(found);
    const size_t before = round_up(reinterpret_cast<uintptr_t>(first), alignment) - reinterpret_cast<uintptr_t>(first);
    if (before) munmap(first, before);
    if (before < spare) munmap(first + before + bytes, spare - before);
    return first + before;
}

// Whether the kernel took the pages; false if it does not know how (before Linux 5.14).
bool populate(uint8_t* data, size_t bytes, int& error) {
#if defined(__linux__)
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers do not name
    int result;
    do {
        result = madvise(data, bytes, kPopulateWrite);
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno == EINVAL) return false;
    error = result == 0 ? 0 : errno;
    return true;
#else
    return false;
#endif
}

}  // namespace

Region::Region(size_t bytes, Pages pages) : size_(bytes), page_(pages == Pages::large ? kLargePage : usual_page()) {
    if (bytes == 0) return;
    mapped_ = round_up(bytes, page_);
    data_ = map_aligned(mapped_, kLargePage);
#if defined(MADV_HUGEPAGE)
    // A hint: without it things are only slower, or larger.
    madvise(data_, mapped_, pages == Pages::large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
}

Region::~Region() {
    if (data_) munmap(data_, mapped_);
}

Region::Region(Region&& other) noexcept { *this = std::move(other); }

Region& Region::operator=(Region&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
    std::swap(page_, other.page_);
    return *this;
}

// Returning part of a large page would split it, which slows its readers, and the kernel would keep that part until memory
// is short.
void Region::release(size_t offset, size_t bytes) {
    const size_t first = round_up(offset, page_);
    const size_t last = offset + bytes == size_ ? mapped_ : (offset + bytes) / page_ * page_;
    if (first < last && madvise(data_ + first, last - first, MADV_DONTNEED) != 0)
        fail(errno, "the operating system did not take memory back");
}

void Region::prepare(size_t offset, size_t bytes, Team& team) {
    if (bytes == 0) return;
    const size_t page = usual_page(), begin = offset / kLargePage * kLargePage, end = offset + bytes;
    std::atomic<int> failed{0};
    const Turn turn(team);
    team.share(int64_t((end - begin + kLargePage - 1) / kLargePage), 1, [&](int, int64_t from, int64_t to) {
        const size_t first = std::max(offset, begin + size_t(from) * kLargePage);
        const size_t last = std::min(end, begin + size_t(to) * kLargePage);
        const size_t first_page = first / page * page;
        int error = 0;
        if (!populate(data_ + first_page, std::min(round_up(last, page), mapped_) - first_page, error))
            for (size_t at = first; at < last; at = at / page * page + page) data_[at] = 0;
        if (error) failed = error;
    });
    if (failed) fail(failed, "the operating system gave no memory");
}

size_t Region::resident() const {
    const size_t page = usual_page(), pages = mapped_ / page;
    std::vector<unsigned char> in_memory(std::min(kLookPages, pages));
    size_t count = 0;
    for (size_t first = 0; first < pages; first += kLookPages) {
        const size_t some = std::min(kLookPages, pages - first);
        if (mincore(data_ + first * page, some * page, in_memory.data()) != 0)
            fail(errno, "the operating system did not say what is in memory");
        for (size_t i = 0; i < some; ++i) count += in_memory[i] & 1;
    }
    return count * page;
}

uint8_t* WeightArena::take(size_t bytes) {
    const size_t rounded = (bytes + 63) / 64 * 64;
    if (regions_.empty() || regions_.back().size() - used_ < rounded) {
        regions_.emplace_back(std::max(kShelfRegion, round_up(rounded, kLargePage)));
        used_ = 0;
    }
    uint8_t* at = regions_.back().data() + used_;
    used_ += rounded;
    taken_ += bytes;
    return at;
}

}  // namespace cllm

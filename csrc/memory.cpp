#include "memory.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace kvik {
namespace {

constexpr size_t kHuge = size_t(2) << 20;

size_t rounded(size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }

}  // namespace

#if defined(__linux__)

void* allocate_pages(size_t bytes, bool huge) {
    const size_t size = rounded(bytes ? bytes : 1);
    char* start = static_cast<char*>(
        mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (start == MAP_FAILED) throw std::bad_alloc();
    const size_t before = (kHuge - reinterpret_cast<size_t>(start) % kHuge) % kHuge;
    if (before) munmap(start, before);
    munmap(start + before + size, kHuge - before);
    start += before;
    // Small allocations and the end of large ones stay on small pages: a huge page that is not filled
    // would take more memory than its speed is worth.
    const size_t filled = huge ? bytes / kHuge * kHuge : 0;
    if (filled) madvise(start, filled, MADV_HUGEPAGE);
    if (filled < size) madvise(start + filled, size - filled, MADV_NOHUGEPAGE);
    return start;
}

void free_pages(void* data, size_t bytes) { munmap(data, rounded(bytes ? bytes : 1)); }

size_t give_back(void* data, size_t bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), start = reinterpret_cast<size_t>(data);
    const size_t first = (start + page - 1) / page * page, end = (start + bytes) / page * page;
    if (end <= first) return 0;
    return madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED) == 0 ? end - first : 0;
}

#else

size_t give_back(void*, size_t) { return 0; }

void* allocate_pages(size_t bytes, bool) {
    void* data = std::aligned_alloc(kHuge, rounded(bytes ? bytes : 1));
    if (!data) throw std::bad_alloc();
    return std::memset(data, 0, rounded(bytes ? bytes : 1));
}

void free_pages(void* data, size_t) { std::free(data); }

#endif

void release_freed() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

}  // namespace kvik

#include "memory.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvik {
namespace {

constexpr size_t kHuge = size_t(2) << 20;

size_t rounded(size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }

}  // namespace

#if defined(__linux__)

void* allocate_huge(size_t bytes) {
    const size_t size = rounded(bytes ? bytes : 1);
    char* start = static_cast<char*>(
        mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (start == MAP_FAILED) throw std::bad_alloc();
    const size_t before = (kHuge - reinterpret_cast<size_t>(start) % kHuge) % kHuge;
    if (before) munmap(start, before);
    if (kHuge - before) munmap(start + before + size, kHuge - before);
    // Small things stay on small pages: a huge one would cost more memory than it saves time.
    if (bytes >= kHuge) madvise(start + before, size, MADV_HUGEPAGE);
    return start + before;
}

void free_huge(void* data, size_t bytes) { munmap(data, rounded(bytes ? bytes : 1)); }

#else

void* allocate_huge(size_t bytes) {
    void* data = std::aligned_alloc(kHuge, rounded(bytes ? bytes : 1));
    if (!data) throw std::bad_alloc();
    return std::memset(data, 0, rounded(bytes ? bytes : 1));
}

void free_huge(void* data, size_t) { std::free(data); }

#endif

}  // namespace kvik

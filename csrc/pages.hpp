// Copies between blocks of the KV cache and pages, which nn/pages.py describes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvik {

// Bytes that each block has of one tensor, and where they stand in a page.
struct PagePart {
    int64_t data;    // of block 0
    int64_t stride;  // bytes from block to block
    int64_t first;   // in a page
    int64_t bytes;
};

// Copy `count` blocks to rows of `pages`, `stride` bytes apart; `load`: from there.
void copy_pages(const PagePart* parts, size_t num_parts, uint8_t* pages, int64_t stride, const int64_t* blocks,
                const int64_t* rows, size_t count, bool load);

}  // namespace kvik

// Copies between blocks of the KV cache and pages, which nn/pages.py describes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvik {

// The bytes of one tensor in each block, and their place in a page.
struct PagePart {
    int64_t data;    // of block 0
    int64_t stride;  // bytes from block to block
    int64_t first;   // offset in a page
    int64_t bytes;
};

// Copies `count` blocks to rows of `pages`, `stride` bytes apart; with `load`, from there to the blocks.
void copy_pages(const PagePart* parts, size_t num_parts, uint8_t* pages, int64_t stride, const int64_t* blocks,
                const int64_t* rows, size_t count, bool load);

}  // namespace kvik

#include "pages.hpp"

#include <cstring>

namespace kvik {

void copy_pages(const PagePart* parts, size_t num_parts, uint8_t* pages, int64_t stride, const int64_t* blocks,
                const int64_t* rows, size_t count, bool load) {
    for (size_t i = 0; i < count; i++) {
        uint8_t* page = pages + rows[i] * stride;
        for (size_t j = 0; j < num_parts; j++) {
            const PagePart& part = parts[j];
            uint8_t* block = reinterpret_cast<uint8_t*>(part.data) + blocks[i] * part.stride;
            if (load)
                std::memcpy(block, page + part.first, size_t(part.bytes));
            else
                std::memcpy(page + part.first, block, size_t(part.bytes));
        }
    }
}

}  // namespace kvik

// zlib's CRC-32, several times as fast on machines with carry-less multiplication.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvik {

// Whether this machine has it.
bool has_crc32();

// Continues the checksum `start` over `bytes`. Only where `has_crc32`. `wide`: with
// 512-bit products, if the machine has them.
uint32_t crc32(const uint8_t* bytes, size_t count, uint32_t start, bool wide = true);

}  // namespace kvik

// CRC-32 as zlib has it, several times as fast where the machine multiplies without carries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvik {

// Whether this machine does.
bool has_crc32();

// The checksum of `bytes` behind what `start` is the checksum of. Only where `has_crc32`. `wide`: with
// products of 512 bits, if the machine has them.
uint32_t crc32(const uint8_t* bytes, size_t count, uint32_t start, bool wide = true);

}  // namespace kvik

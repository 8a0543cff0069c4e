// The processes that compute one model together share memory: tensors, and one `Meeting`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvik {

constexpr int kMaxRanks = 64;

// How often a process has arrived, and how many of the others sleep until it comes. Of a cache line each, as
// all others read it.
struct alignas(64) Arrivals {
    std::atomic<uint32_t> count;
    std::atomic<uint32_t> sleepers;
};

// Zeroed memory is a meeting without arrivals; `size` is to be set before the first.
struct Meeting {
    std::atomic<uint32_t> broken;  // not 0: one of the processes is gone, and no other waits any more
    uint32_t size;                 // processes
    Arrivals ranks[kMaxRanks];
};
static_assert(sizeof(Meeting) <= 8192);  // kernels/cpu/group.py puts tensors behind so many bytes

// Arrives, and waits until all others have arrived as often, or the meeting is broken. What a process wrote
// before it arrived is seen by all that have returned from this.
void meet(Meeting& meeting, int rank);

}  // namespace kvik

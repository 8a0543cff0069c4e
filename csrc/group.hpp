// The processes that compute one model together share memory: tensors, and one `Meeting`.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

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
    std::atomic<uint32_t> beats[kMaxRanks];  // of each process' `Heartbeat`
};
static_assert(sizeof(Meeting) <= 8192);  // kernels/cpu/group.py puts tensors behind so many bytes

// Arrives, and waits until all others have arrived as often, or the meeting is broken. What a process wrote
// before it arrived is seen by all that have returned from this.
void meet(Meeting& meeting, int rank);

// Beats five times a second while this process runs, so that another sees that it does: adds 1 to a number in
// shared memory, or sends a byte. It has a thread of its own: neither Python's lock nor a long kernel holds it
// up.
class Heartbeat {
   public:
    explicit Heartbeat(std::atomic<uint32_t>& beats);
    explicit Heartbeat(int socket);  // which stays open
    ~Heartbeat();
    Heartbeat(const Heartbeat&) = delete;

   private:
    void begin();
    void beat();

    std::function<void()> beat_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool ended_ = false;
    std::thread thread_;
};

}  // namespace kvik

// The processes that run one model together share memory: tensors, and one `Barrier`.
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

// How often a process has arrived, and how many of the others sleep until it arrives. Each has its own cache line,
// as all others read it.
struct alignas(64) Arrivals {
    std::atomic<uint32_t> count;
    std::atomic<uint32_t> sleepers;
};

// A barrier between processes. Zeroed memory is a barrier without arrivals; set `size` before the first arrival.
struct Barrier {
    std::atomic<uint32_t> broken;  // not 0: one of the processes has exited, and the others stop waiting
    uint32_t size;                 // processes
    Arrivals ranks[kMaxRanks];
    std::atomic<uint32_t> beats[kMaxRanks];  // heartbeats of each process: `Heartbeat`
};
static_assert(sizeof(Barrier) <= 8192);  // kernels/cpu/group.py puts tensors at this offset

// Arrives, and waits until all others have arrived as often, or the barrier is broken. Writes that a process made
// before it arrived are visible to all processes that have returned from this call.
void arrive_and_wait(Barrier& barrier, int rank);

// Signals five times a second that this process is alive: adds 1 to a number in shared memory, or sends a byte.
// It has its own thread, so neither Python's GIL nor a long kernel delays it.
class Heartbeat {
   public:
    explicit Heartbeat(std::atomic<uint32_t>& beats);
    explicit Heartbeat(int socket);  // does not close the socket
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

#include "group.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

#include <chrono>
#include <climits>
#include <ctime>
#include <thread>

#include "team.hpp"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvik {
namespace {

// How often a process polls before it yields its core: about ten microseconds, longer than the time between
// the arrivals of processes that do equal work. And how often it yields before it sleeps.
constexpr int kLooks = 512, kYields = 64;
#if defined(MSG_NOSIGNAL)
constexpr int kNoSignal = MSG_NOSIGNAL;
#else
constexpr int kNoSignal = 0;
#endif
constexpr long kSleep = 50'000'000;  // nanoseconds, after which it checks whether the barrier is broken
constexpr auto kBeat = std::chrono::milliseconds(200);

// Sleeps until the number is no longer `old`, or for a while. Not std::atomic::wait: other processes do not
// wake its futex.
void sleep_while(std::atomic<uint32_t>& number, uint32_t old) {
#if defined(__linux__)
    const timespec most{0, kSleep};
    syscall(SYS_futex, &number, FUTEX_WAIT, old, &most, nullptr, 0);
#else
    (void)number, (void)old;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake(std::atomic<uint32_t>& number) {
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)number;
#endif
}

void wait_for(const Barrier& barrier, Arrivals& other, uint32_t wanted) {
    const auto arrived = [&] { return int32_t(other.count.load(std::memory_order_acquire) - wanted) >= 0; };
    const auto broken = [&] { return barrier.broken.load(std::memory_order_relaxed) != 0; };
    for (int look = 0; look < kLooks; look++) {
        if (arrived()) return;
        pause();
    }
    for (int look = 0; look < kYields; look++) {
        if (arrived() || broken()) return;
        std::this_thread::yield();
    }
    // Sequentially consistent: the count changes before `arrive_and_wait` reads `sleepers`, so no sleeper misses a change.
    other.sleepers.fetch_add(1);
    while (!arrived() && !broken()) {
        const uint32_t now = other.count.load();
        if (int32_t(now - wanted) < 0) sleep_while(other.count, now);
    }
    other.sleepers.fetch_sub(1);
}

}  // namespace

void arrive_and_wait(Barrier& barrier, int rank) {
    Arrivals& own = barrier.ranks[rank];
    const uint32_t wanted = own.count.load(std::memory_order_relaxed) + 1;
    own.count.store(wanted);
    if (own.sleepers.load()) wake(own.count);
    for (uint32_t other = 0; other < barrier.size; other++)
        if (int(other) != rank) wait_for(barrier, barrier.ranks[other], wanted);
}

Heartbeat::Heartbeat(std::atomic<uint32_t>& beats)
    : beat_([&beats] { beats.fetch_add(1, std::memory_order_relaxed); }) {
    begin();
}

// A byte that does not fit is dropped: the other side has stopped reading.
Heartbeat::Heartbeat(int socket) : beat_([socket] { send(socket, "", 1, MSG_DONTWAIT | kNoSignal); }) { begin(); }

void Heartbeat::begin() {
    sigset_t all, before;  // this thread takes no signals
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread(&Heartbeat::beat, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Heartbeat::~Heartbeat() {
    {
        const std::lock_guard lock(mutex_);
        ended_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void Heartbeat::beat() {
    std::unique_lock lock(mutex_);
    do beat_();
    while (!changed_.wait_for(lock, kBeat, [&] { return ended_; }));
}

}  // namespace kvik

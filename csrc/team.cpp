#include "team.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvik {

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxThreads = 256;
// How often a thread polls before it sleeps until it is woken: about 20 microseconds, the time of a few
// tasks. A longer wait is for a thread that has lost its core, perhaps to the waiting thread.
constexpr int kSpins = 1024;
constexpr int kUntimedSpins = 32;
// How long a helper polls for the next loop: the time between the replays of a step.
constexpr auto kIdle = std::chrono::microseconds(500);

// The state of the loop in one number: how many threads are inside, whether more may join, and which loop it is.
constexpr uint32_t kInside = 0xff, kOpen = 0x100, kLoop = 0x200;
constexpr uint32_t kEnd = 0x7fffffff;  // makes the helpers exit

// A number that threads wait for.
struct alignas(64) Signal {
    std::atomic<int> value{0};
    std::atomic<int> sleepers{0};

    uint32_t read() const { return uint32_t(value.load(std::memory_order_acquire)); }
    // Sequentially consistent: the value changes before `sleepers` is read, so no sleeper misses a change.
    void wake() {
        if (sleepers.load()) value.notify_all();
    }
    void sleep_while(uint32_t old) {
        sleepers.fetch_add(1);
        value.wait(int(old));
        sleepers.fetch_sub(1);
    }
};

struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
};

struct Buffer {
    void* data = nullptr;
    size_t size = 0;

    void* at_least(size_t bytes) {
        if (bytes > size) {
            std::free(data);
            size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
            data = std::aligned_alloc(4096, size);
            if (!data) std::abort();  // no exception may leave a kernel
        }
        return data;
    }
    ~Buffer() { std::free(data); }
};

// Sets the name that `top -H` and debuggers show.
void name_thread() {
#if defined(__APPLE__)
    pthread_setname_np("kvik-team");
#else
    pthread_setname_np(pthread_self(), "kvik-team");
#endif
}

}  // namespace

struct TeamShared {
    Signal state;
    // Written by the caller before it opens a loop, and read by the threads inside.
    void (*body)(void*, Member&) = nullptr;
    void* context = nullptr;
    int64_t count = 0;
    int ranges = 1;
    Counter next[kMaxThreads];  // of each range
    Signal left;     // how many of the threads inside are done
    Signal working;  // ranks below it poll for loops; kEnd: all exit
    alignas(64) TeamTimes times{};
    const pid_t process = getpid();
    std::unique_ptr<std::vector<std::thread>> helpers = std::make_unique<std::vector<std::thread>>();
    Buffer common[2];
    Buffer own[kMaxThreads];
};

namespace {

// Whether the state, or the number of working ranks, changes while this helper polls.
bool changes_soon(const TeamShared& shared, uint32_t state, uint32_t working) {
    auto end = Clock::time_point();
    while (true) {
        for (int spin = 0; spin < 64; spin++) {
            if (shared.state.read() != state) return true;
            pause();
        }
        if (shared.working.read() != working) return true;
        const auto now = Clock::now();
        if (end == Clock::time_point()) end = now + kIdle;
        if (now >= end) return false;
    }
}

void help(TeamShared& shared, int rank) {
    uint32_t done = kEnd;  // the loop that this thread took part in last
    while (true) {
        const uint32_t working = shared.working.read();
        if (working == kEnd) return;
        if (uint32_t(rank) >= working) {
            shared.working.sleep_while(working);
            continue;
        }
        const uint32_t state = shared.state.read();
        if (!(state & kOpen) || state / kLoop == done) {
            if (!changes_soon(shared, state, working)) shared.state.sleep_while(state);
            continue;
        }
        int expected = int(state);
        if (!shared.state.value.compare_exchange_strong(expected, int(state + 1))) continue;
        done = state / kLoop;
        Member member{rank, &shared, false, shared.count, shared.ranges, 0, shared.ranges};
        shared.body(shared.context, member);
        shared.left.value.fetch_add(1);
        shared.left.wake();
    }
}

// Starts the missing threads. Returns how many there are.
int started(TeamShared& shared, int threads) {
    auto& helpers = *shared.helpers;
    if (int(helpers.size()) + 1 >= threads) return threads;
    // Helpers take no signals: a handler of Python must not run on a helper.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        while (int(helpers.size()) + 1 < threads)
            helpers.emplace_back([&shared, rank = int(helpers.size()) + 1] {
                name_thread();
                help(shared, rank);
            });
    } catch (const std::system_error&) {
        threads = int(helpers.size()) + 1;  // the system allows no more threads
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return threads;
}

// Waits until all threads that joined the loop are done.
void wait_for_all(TeamShared& shared, uint32_t inside) {
    const auto done = [&] { return shared.left.read() == inside; };
    for (int spin = 0; spin < kUntimedSpins; spin++) {
        if (done()) return;
        pause();
    }
    const auto begin = Clock::now();
    for (int spin = 0; spin < kSpins && !done(); spin++) pause();
    for (uint32_t left; (left = shared.left.read()) != inside;) shared.left.sleep_while(left);
    shared.times.waited += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
}

}  // namespace

int64_t Member::next() {
    for (; left_ranges > 0; left_ranges--) {
        const int range = (rank + ranges - left_ranges) % ranges;
        const int64_t task = alone ? drawn : shared->next[range].value.fetch_add(1, std::memory_order_relaxed);
        if (task < count * (range + 1) / ranges) {
            drawn++;
            return task;
        }
    }
    return -1;
}

void* Member::scratch(size_t bytes) { return shared->own[rank].at_least(bytes); }

void run_loop(Team& team, int64_t count, void (*body)(void*, Member&), void* context, bool in_ranges) {
    if (count <= 0) return;
    TeamShared& shared = *team.shared;
    const bool alone = count == 1 || team.size == 1;
    const int ranges = in_ranges && !alone ? team.size : 1;
    Member member{team.rank, &shared, alone, count, ranges, 0, ranges};
    if (alone) return body(context, member);
    shared.body = body;
    shared.context = context;
    shared.count = count;
    shared.ranges = ranges;
    for (int i = 0; i < ranges; i++) shared.next[i].value.store(count * i / ranges, std::memory_order_relaxed);
    shared.left.value.store(0, std::memory_order_relaxed);
    const uint32_t loop = (shared.state.read() / kLoop + 1) * kLoop;
    shared.state.value.store(int(loop | kOpen));
    shared.state.wake();
    body(context, member);
    wait_for_all(shared, uint32_t(shared.state.value.fetch_and(int(~kOpen))) & kInside);
    shared.times.drawn += member.drawn;
    shared.times.offered += count;
}

void* shared_scratch(Team& team, int slot, size_t bytes) { return team.shared->common[slot].at_least(bytes); }

TeamShared* make_team() { return new TeamShared; }

void free_team(TeamShared* shared) {
    if (shared->process == getpid()) {
        shared->working.value.store(int(kEnd));
        shared->working.wake();
        shared->state.value.fetch_add(int(kLoop));
        shared->state.wake();
        for (auto& helper : *shared->helpers) helper.join();
    } else {
        shared->helpers.release();  // threads do not survive a fork
    }
    delete shared;
}

Team gather(TeamShared* shared, int threads) {
    threads = threads < kMaxThreads ? threads : kMaxThreads;
    threads = threads > 1 && shared->process == getpid() ? started(*shared, threads) : 1;
    if (shared->working.read() != uint32_t(threads)) {
        shared->working.value.store(threads);
        shared->working.wake();
    }
    shared->times = {};
    return {threads, 0, shared};
}

TeamTimes times_of(const TeamShared* shared) { return shared->times; }

}  // namespace kvik

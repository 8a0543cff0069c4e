#include "team.hpp"

#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvik {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kCounters = 4;
// How a thread waits for another: it spins for some microseconds; then it yields its core, as the late
// thread may be waiting for it (a busy machine often puts both on one core, where each would wait for the
// other until the end of its time slice); and after a wait longer than any in a normal step, it sleeps.
constexpr int kSpins = 256;
constexpr int kYields = 256;

struct Buffer {
    void* data = nullptr;
    size_t size = 0;

    void* at_least(size_t bytes) {
        if (bytes > size) {
            std::free(data);
            size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
            data = std::aligned_alloc(4096, size);
            if (!data) std::abort();  // no exception may leave a parallel region
        }
        return data;
    }
    ~Buffer() { std::free(data); }
};

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
};

struct TeamShared {
    alignas(64) std::atomic<uint32_t> arrived{0};
    alignas(64) std::atomic<uint32_t> generation{0};
    Counter counters[kCounters];
    Buffer common;
    Buffer own[kMaxThreads];
};

void barrier(Team& team) {
    if (team.size == 1) return;
    TeamShared& shared = *team.shared;
    const uint32_t generation = shared.generation.load(std::memory_order_acquire);
    if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(team.size)) {
        shared.arrived.store(0, std::memory_order_relaxed);
        shared.generation.store(generation + 1, std::memory_order_release);
        shared.generation.notify_all();
        return;
    }
    for (int spin = 0; spin < kSpins; spin++) {
        if (shared.generation.load(std::memory_order_acquire) != generation) return;
        pause();
    }
    for (int turn = 0; turn < kYields; turn++) {
        if (shared.generation.load(std::memory_order_acquire) != generation) return;
        sched_yield();
    }
    while (shared.generation.load(std::memory_order_acquire) == generation)
        shared.generation.wait(generation, std::memory_order_acquire);
}

int64_t next_piece(Team& team, int64_t count) {
    auto& counter = team.shared->counters[team.phase % kCounters].value;
    const int64_t piece = counter.fetch_add(1, std::memory_order_relaxed);
    return piece < count ? piece : -1;
}

void end_pieces(Team& team) {
    // No thread uses the counter after next before it passes the barrier below.
    if (team.rank == 0)
        team.shared->counters[(team.phase + 2) % kCounters].value.store(0, std::memory_order_relaxed);
    team.phase++;
    barrier(team);
}

void* shared_scratch(Team& team, size_t bytes) {
    if (team.rank == 0) team.shared->common.at_least(bytes);
    barrier(team);
    return team.shared->common.data;
}

void* private_scratch(Team& team, size_t bytes) {
    return team.shared->own[team.rank].at_least(bytes);
}

TeamShared* make_team() { return new TeamShared; }

void free_team(TeamShared* shared) { delete shared; }

void run_team(TeamShared* shared, int threads, void (*body)(void*, Team&), void* context) {
    for (auto& counter : shared->counters) counter.value.store(0, std::memory_order_relaxed);
    threads = threads < kMaxThreads ? threads : kMaxThreads;
#if defined(__SANITIZE_THREAD__)
    // ThreadSanitizer does not see how the runtime of OpenMP starts and joins threads.
    std::vector<std::thread> others;
    for (int rank = 1; rank < threads; rank++)
        others.emplace_back([=] {
            Team team{rank, threads, shared, 0};
            body(context, team);
        });
    Team team{0, threads, shared, 0};
    body(context, team);
    for (auto& other : others) other.join();
#else
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            Team team{omp_get_thread_num(), omp_get_num_threads(), shared, 0};
            body(context, team);
        }
        return;
    }
#endif
    Team team{0, 1, shared, 0};
    body(context, team);
#endif
}

}  // namespace kvik

// The threads that run kernels together. One thread calls a kernel; where the kernel has a loop whose
// tasks do not depend on each other, the other threads of the team take tasks too. No thread waits for one
// that has lost its core to another process before it joined a loop: the others take its tasks.
// Which thread computes a task never changes a result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvik {

struct TeamShared;

// The team that a kernel receives: the maximum number of threads, and the calling one. Only plain data and functions
// of team.cpp: an inline function here would be compiled once per instruction set, and the linker
// might keep the wrong copy.
struct Team {
    int size;
    int rank;  // of the calling thread
    TeamShared* shared;
};

// One thread while it takes part in a loop.
struct Member {
    int rank;
    TeamShared* shared;
    bool alone;      // no other thread takes tasks of this loop
    int64_t count;   // tasks of the loop
    int ranges;      // into which they are divided
    int64_t drawn;   // tasks that this thread has taken
    int left_ranges;

    // The next task that no thread has taken, or -1. Tasks of a range are handed out in order.
    int64_t next();
    // Memory of this thread only, 64-byte aligned. Its content is undefined, and lost at the next call.
    void* scratch(size_t bytes);
};

// Runs a loop of `count` tasks: body(context, member) on the caller, and on each other thread that joins
// before all tasks are taken. Returns when every thread that joined has returned. The caller runs a single
// task itself. Loops of a team of one may be nested in another loop.
//
// in_ranges: the tasks are divided into one even range for each thread; each thread takes tasks from its own range
// first, then from the others. For neighbouring tasks that share cache lines, which then stay on one core.
void run_loop(Team& team, int64_t count, void (*body)(void* context, Member& member), void* context,
              bool in_ranges = false);

// Memory for one kernel call, for the caller and the loops it runs: `slot` 0 or 1. 64-byte aligned. Its
// content is undefined, and lost at the next call for the same slot.
void* shared_scratch(Team& team, int slot, size_t bytes);

// Pauses a polling thread for a moment, leaving the core's resources to its other hardware threads.
void pause();

TeamShared* make_team();
void free_team(TeamShared* shared);
// The team of up to `threads` threads that the caller may give to kernels until the next call. Threads are
// started when they are first needed. The team is smaller where the system allows no more threads, or in a
// forked process.
Team gather(TeamShared* shared, int threads);

// What happened since the team was gathered, as the caller saw it.
struct TeamTimes {
    int64_t nanoseconds;  // in total; the caller of `times_of` fills it in
    int64_t waited;       // nanoseconds in which the caller had nothing to do
    int64_t drawn;        // tasks that the caller took of loops for several threads
    int64_t offered;      // all tasks of these loops
};
TeamTimes times_of(const TeamShared* shared);

}  // namespace kvik

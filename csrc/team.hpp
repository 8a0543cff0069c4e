// The threads that run kernels together. One thread calls a kernel; where the kernel has a loop whose
// pieces do not depend on each other, the other threads of the team draw pieces too. A thread that is not
// there, because the system gave its core to somebody else, is not waited for: the others draw its pieces.
// Which thread computes a piece never changes a result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvik {

struct TeamShared;

// What a kernel gets: how many threads there may be, and the one that calls it. Plain data and functions
// of team.cpp only: an inline function here would be compiled once per instruction set, and the linker
// might keep the wrong copy.
struct Team {
    int size;
    int rank;  // of the thread that calls
    TeamShared* shared;
};

// One thread while it takes part in a loop.
struct Member {
    int rank;
    TeamShared* shared;
    bool alone;      // no other thread draws from this loop
    int64_t count;   // pieces of the loop
    int ranges;      // into which they are divided
    int64_t drawn;   // by this thread
    int left_ranges;

    // The next piece that no thread has drawn, or -1. Pieces of a range are handed out in order.
    int64_t next();
    // Memory of this thread alone, 64-byte aligned. The content is undefined, and gone with the next call.
    void* scratch(size_t bytes);
};

// Runs a loop of `count` pieces: body(context, member) on the caller, and on each other thread that comes
// before all pieces are drawn. Returns when every thread that came has returned. A single piece is the
// caller's. Loops of a team of one may stand within another loop.
//
// in_ranges: each thread draws from a range of its own first, one of as many even ones as there are threads, and
// then from those of the others: for neighbours that share cache lines, which the other cores then do not take away.
void run_loop(Team& team, int64_t count, void (*body)(void* context, Member& member), void* context,
              bool in_ranges = false);

// Memory for one kernel call, for the caller and the loops it runs: `slot` 0 or 1. 64-byte aligned. The
// content is undefined, and gone with the next call for the same slot.
void* shared_scratch(Team& team, int slot, size_t bytes);

// A moment in which a thread that looks out for something leaves its core to others.
void pause();

TeamShared* make_team();
void free_team(TeamShared* shared);
// The team of up to `threads` threads that the caller may give to kernels until the next call. Threads are
// started when they are first needed. Where the system gives no more threads, or in a process that was
// forked, the team is smaller.
Team gather(TeamShared* shared, int threads);

// What happened since the team was gathered, as the caller saw it.
struct TeamTimes {
    int64_t nanoseconds;  // of the whole; the caller of `times_of` fills it in
    int64_t waited;       // nanoseconds in which the caller had nothing to do
    int64_t drawn;        // pieces of loops for several threads that the caller drew
    int64_t offered;      // pieces that there were
};
TeamTimes times_of(const TeamShared* shared);

}  // namespace kvik

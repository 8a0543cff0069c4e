// The threads that run one kernel together: every thread calls the kernel, and the team says which
// part of the work is its own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvik {

struct TeamShared;

// One thread's view of its team. Plain data and functions of team.cpp only: an inline function here
// would be compiled once per instruction set, and the linker might keep the wrong copy.
struct Team {
    int rank;
    int size;
    TeamShared* shared;
    unsigned phase;
};

// Wait for all threads of the team. What was written before it is visible after it.
void barrier(Team& team);

// The next item of [0, count) that no thread has taken yet, or -1. Items are handed out in order.
// After -1 every thread must call `end_pieces`, which is a barrier.
int64_t next_piece(Team& team, int64_t count);
void end_pieces(Team& team);

// Memory of the team, the same for all its threads; of one thread alone. 64-byte aligned. The content
// is undefined, and gone with the next call. The shared one is a barrier (all threads must call it).
void* shared_scratch(Team& team, size_t bytes);
void* private_scratch(Team& team, size_t bytes);

TeamShared* make_team();
void free_team(TeamShared* shared);
// Run `body` on `threads` threads, the caller being one of them.
void run_team(TeamShared* shared, int threads, void (*body)(void* context, Team& team), void* context);

}  // namespace kvik

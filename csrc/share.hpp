// Loops that a team runs together: over tasks taken one by one, ranges of even work, columns of a result.
#pragma once

#include <cstdint>

#include "team.hpp"

namespace kvik {
namespace {

// Calls work(member) on the caller and on each thread that joins. See `run_loop`.
template <class Work>
void together(Team& team, int64_t count, const Work& work, bool in_ranges = false) {
    run_loop(
        team, count, [](void* work, Member& member) { (*static_cast<const Work*>(work))(member); },
        const_cast<void*>(static_cast<const void*>(&work)), in_ranges);
}

// Calls work(task) for each task.
template <class Work>
void each_task(Team& team, int64_t count, const Work& work) {
    together(team, count, [&](Member& member) {
        for (int64_t task; (task = member.next()) >= 0;) work(task);
    });
}

struct Range {
    int64_t begin, end;
};

// One of `parts` even parts of [0, count).
Range part_of(int64_t count, int64_t part, int64_t parts) {
    return {count * part / parts, count * (part + 1) / parts};
}

// The number of parts of at least `least` to divide [0, count) into, at most one for each thread: data
// that another core wrote must first be moved to the core that reads it.
int64_t parts_for(const Team& team, int64_t count, int64_t least) {
    const int64_t parts = count / (least > 1 ? least : 1);
    return parts < 1 ? 1 : parts < team.size ? parts : team.size;
}

// Calls work(begin, end) for ranges that make up [0, count).
template <class Work>
void each_range(Team& team, int64_t count, int64_t least, const Work& work) {
    const int64_t parts = parts_for(team, count, least);
    each_task(team, parts, [&](int64_t part) {
        const Range range = part_of(count, part, parts);
        work(range.begin, range.end);
    });
}

// Calls work(row, begin, end) for the columns of a [rows, columns] result whose elements do not depend on
// each other. Rows are divided between cache lines of the result, so that no two threads write to one.
// least: the number of elements that justifies a thread.
template <class Work>
void each_columns(Team& team, int64_t rows, int64_t columns, int64_t least, const Work& work) {
    constexpr int64_t kTask = 64;
    const int64_t tasks = (columns + kTask - 1) / kTask;  // of a row
    each_range(team, rows * tasks, least / kTask, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end;) {
            const int64_t row = at / tasks, first = at % tasks;
            const int64_t last = first + end - at < tasks ? first + end - at : tasks;
            work(row, first * kTask, last * kTask < columns ? last * kTask : columns);
            at += last - first;
        }
    });
}

}  // namespace
}  // namespace kvik

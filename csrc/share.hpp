// How the threads of a team share even work: by ranges, which every thread computes alike.
#pragma once

#include <cstdint>

#include "team.hpp"

namespace kvik {
namespace {

struct Range {
    int64_t begin, end;
};

// This thread's part of [0, count). No thread gets fewer than `least` (but for the last of them): the
// barrier is paid anyway, but data that another core wrote must first be moved to the core that reads it.
Range share(const Team& team, int64_t count, int64_t least) {
    int64_t threads = count / (least > 1 ? least : 1);
    threads = threads < 1 ? 1 : threads < team.size ? threads : team.size;
    if (team.rank >= threads) return {count, count};
    return {count * team.rank / threads, count * (team.rank + 1) / threads};
}

// Calls work(row, begin, end) for this thread's columns of a [rows, columns] result whose elements do
// not depend on each other. Rows are divided between cache lines of the result, so that no two threads
// write to one. least: elements that are worth a thread.
template <class Work>
void share_columns(const Team& team, int64_t rows, int64_t columns, int64_t least, Work work) {
    constexpr int64_t kPiece = 64;
    const int64_t pieces = (columns + kPiece - 1) / kPiece;  // of a row
    const Range mine = share(team, rows * pieces, least / kPiece);
    for (int64_t at = mine.begin; at < mine.end;) {
        const int64_t row = at / pieces, first = at % pieces;
        const int64_t last = first + mine.end - at < pieces ? first + mine.end - at : pieces;
        work(row, first * kPiece, last * kPiece < columns ? last * kPiece : columns);
        at += last - first;
    }
}

}  // namespace
}  // namespace kvik

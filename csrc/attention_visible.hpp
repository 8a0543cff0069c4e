// Which keys a query may see.
#pragma once

#include "arguments.hpp"

namespace kvik {
namespace {
namespace paged {

constexpr int kTile = 64;  // keys of one step of the softmax, at multiples of 64

// Bits [first, end) of a tile; both may lie outside.
inline uint64_t bits_between(int64_t first, int64_t end) {
    if (first < 0) first = 0;
    if (end > kTile) end = kTile;
    if (first >= end) return 0;
    return (~uint64_t(0) >> (kTile - (end - first))) << first;
}

// The queries of one sequence in this step: `count` of them behind `cached` keys.
struct Queries {
    int64_t cached, count;
    int64_t window;        // visible keys, 0: all
    const uint64_t* tree;  // [count][words], or null
    int64_t words;

    // In a tree the visible keys of this step are the ancestors, so their number takes the place of the
    // position: the window then reaches as far back into the cached keys as in a plain sequence. It
    // never hides a key of this step.
    int64_t first_key(int64_t query) const {
        if (window <= 0) return 0;
        int64_t end = cached + query + 1;
        if (tree) {
            end = cached;
            for (int64_t i = 0; i < words; i++) end += __builtin_popcountll(tree[query * words + i]);
        }
        const int64_t first = end > window ? end - window : 0;
        return tree && first > cached ? cached : first;
    }

    // The keys that queries [begin, end) see lie in [first, end) of these.
    struct Range {
        int64_t first, end;
    };
    Range range(int64_t begin, int64_t end) const {
        if (!tree) return {first_key(begin), cached + end};
        int64_t first = cached;
        for (int64_t i = begin; i < end; i++) {
            const int64_t key = first_key(i);
            if (key < first) first = key;
        }
        return {first, cached + count};
    }

    // Bit j: the query sees key tile + j.
    uint64_t bits(int64_t query, int64_t tile) const {
        if (!tree) return bits_between(first_key(query) - tile, cached + query + 1 - tile);
        return bits_between(first_key(query) - tile, cached - tile) | tree_bits(query, tile - cached);
    }

private:
    // 64 bits of the query's row from bit `from` on, which may be negative.
    uint64_t tree_bits(int64_t query, int64_t from) const {
        const uint64_t* row = tree + query * words;
        const auto word = [&](int64_t i) { return i >= 0 && i < words ? row[i] : 0; };
        const int64_t index = from >> 6;
        const int shift = int(from & 63);
        uint64_t bits = word(index) >> shift;
        if (shift) bits |= word(index + 1) << (64 - shift);
        return bits & bits_between(-from, count - from);
    }
};

}  // namespace paged
}  // namespace
}  // namespace kvik

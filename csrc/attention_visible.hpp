// Which keys a query may see.
#pragma once

#include "arguments.hpp"

namespace kvik {
namespace {
namespace paged {

constexpr int kTile = 64;  // keys of one step of the softmax, at multiples of 64

// Bits [first, end) of a tile; both may be outside the tile.
inline uint64_t bits_between(int64_t first, int64_t end) {
    if (first < 0) first = 0;
    if (end > kTile) end = kTile;
    if (first >= end) return 0;
    return (~uint64_t(0) >> (kTile - (end - first))) << first;
}

// The queries of one sequence in this step: `count` of them after `cached` keys. Keys are identified by their
// positions. A node of a tree has its own sequence: the cached keys, then the path to it.
struct Queries {
    int64_t cached, count;
    int64_t window;        // the most visible keys, 0: all
    bool chunked;          // they begin at a multiple of the window
    int64_t sinks;         // the first keys, which are visible too but handled separately
    const uint64_t* tree;  // the path to each query, or null
    int64_t reach;         // visible keys on either side; 0: all keys up to the query's own
    int64_t least;         // the first key that any query sees, except for sinks
    // [count, chosen_words]: a bit for each visible key that a query reads; null: all. Each kv head has head_words of
    // them; 0: all heads share them.
    const uint64_t* chosen;
    int64_t chosen_words, head_words;

    // A query sees the keys [first_key, end_key), and sinks up to sinks_end.
    int64_t end_key(int64_t query) const {
        if (reach) return query + 1 + reach < count ? cached + query + 1 + reach : cached + count;
        return cached + (tree ? __builtin_popcountll(tree[query]) : query + 1);
    }
    int64_t first_key(int64_t query) const {
        if (reach) return cached + query > reach ? cached + query - reach : 0;
        const int64_t end = end_key(query);
        if (window <= 0 || end <= window) return least;
        const int64_t first = end - (chunked ? (end - 1) % window + 1 : window);
        return first > least ? first : least;
    }
    int64_t sinks_end(int64_t query) const { return end_key(query) < sinks ? end_key(query) : sinks; }

    // The position of a query, relative to which its keys have theirs. Sinks are followed by the window.
    int64_t position(int64_t query, bool of_sinks) const {
        if (reach) return cached + query;
        const int64_t last = end_key(query) - 1;
        return of_sinks && last >= window + sinks ? window + sinks - 1 : last;
    }

    // All keys that queries [begin, end) see, except for sinks, are in [first, end), which may be empty.
    struct Range {
        int64_t first, end;
    };
    Range range(int64_t begin, int64_t end) const {
        if (!tree) return {first_key(begin), end_key(end - 1)};
        Range found{first_key(begin), 0};
        for (int64_t i = begin; i < end; i++) {
            if (first_key(i) < found.first) found.first = first_key(i);
            if (end_key(i) > found.end) found.end = end_key(i);
        }
        return found;
    }

    Range sinks_range(const Range& found) const { return {0, found.end < sinks ? found.end : sinks}; }

    // Bit j: the query sees key tile + j, among sinks or among the others, for a kv head.
    uint64_t bits(int64_t query, int64_t tile, bool of_sinks, int64_t head) const {
        if (of_sinks) return bits_between(-tile, sinks_end(query) - tile);
        const uint64_t bits = bits_between(first_key(query) - tile, end_key(query) - tile);
        return chosen && bits ? bits & chosen[query * chosen_words + head * head_words + tile / kTile] : bits;
    }

    // Whether every query finds the keys of the tile where the block table says.
    bool in_place(int64_t tile) const { return !tree || tile + kTile <= cached; }
};

}  // namespace paged
}  // namespace
}  // namespace kvik

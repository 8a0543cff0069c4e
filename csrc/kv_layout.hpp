// The layout of keys and values in the paged cache. The same for every instruction set.
//
// A block holds all its kv heads one after another, so that a task over the heads of a block reads long
// runs. A head's tokens come in strips of 16. Keys of a strip: [head_dim / P][16 tokens][P], so that
// lanes are tokens and scores need no horizontal sum. Values: [16 / P][head_dim][P tokens], so that lanes
// are columns of the output. P is 2 for 16-bit and 8-bit elements (a lane multiplies pairs), 1 for fp32.
//
// int4 has two numbers to a byte, both of one token, so that no two tokens write to one byte. Keys of a
// strip: [head_dim / 2][16 tokens], columns 2i and 2i + 1 in a byte. Values: [8 pairs of tokens]
// [head_dim / 16][8 columns][2 tokens], columns c and c + 8 in a byte. The lower column is in the low bits.
#pragma once

#include "arguments.hpp"

namespace kvik {
namespace {

constexpr int kStrip = 16;  // tokens; block_size is a multiple of it

struct KvLayout {
    int64_t kv_heads, head_dim, block_size;

    // Where a token's scale word is. The strips' elements follow the same order, head_dim to a token.
    int64_t token(int64_t block, int64_t head, int64_t offset) const {
        return (block * kv_heads + head) * block_size + offset;
    }
    // First element of the strip that the token is in.
    int64_t strip(int64_t block, int64_t head, int64_t offset) const {
        return token(block, head, offset / kStrip * kStrip) * head_dim;
    }
};

// Places within a strip; t: token of the strip, d: column.
template <int P>
int64_t key_place(int64_t t, int64_t d) {
    return (d / P * kStrip + t) * P + d % P;
}
template <int P>
int64_t value_place(int64_t t, int64_t d, int64_t head_dim) {
    return (t / P * head_dim + d) * P + t % P;
}

// Bytes of int4; d: the lower of the two columns.
inline int64_t key_byte(int64_t t, int64_t d) { return d / 2 * kStrip + t; }
inline int64_t value_byte(int64_t t, int64_t d, int64_t head_dim) {
    return (t / 2 * (head_dim / 16) + d / 16) * 16 + d % 8 * 2 + t % 2;
}

}  // namespace
}  // namespace kvik

// Indexers, which choose the keys that queries read (DeepSeek Sparse Attention, arXiv 2512.02556, section 2.1), or
// blocks of keys (MiniMax-M3).
//
// A score comes from one query and one key, and heads are added in their order, so that a choice has the same
// bits for any other content of the step. Queries are rotated and rounded as the cached keys were.
#pragma once

#include <algorithm>

#include "attention.hpp"
#include "kv_layout.hpp"
#include "sampling_cut.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {
namespace indexer {

using paged::kStrips;
using paged::kTile;

constexpr int64_t kKeysPerTask = 1024;
constexpr int64_t kFewQueries = 64;  // with more, a task is a query with all its keys (config/step_memory.py plans this)

KVIK_INLINE float widened(float value) { return value; }
KVIK_INLINE float widened(bf16 value) { return to_float(value); }
KVIK_INLINE void put_number(float* to, float value) { *to = value; }
KVIK_INLINE void put_number(bf16* to, float value) { *to = to_bf16(value); }

// Calls put(channel, value) for the channels of a head, of which the first `rope` are rotated: neighbours together
// if interleaved, else those of two halves. Pairs are put as halves.
template <class T, class Put>
KVIK_INLINE void rotated(const T* x, int64_t dim, const float* rotation, int64_t rope, bool interleaved, Put put) {
    const int64_t half = rope / 2, next = interleaved ? 1 : half, step = interleaved ? 2 : 1;
    for (int64_t i = 0; i < half; i++) {
        const float a = widened(x[i * step]), b = widened(x[i * step + next]);
        const float cosine = rotation[i], sine = rotation[half + i];
        put(i, a * cosine - b * sine);
        put(half + i, b * cosine + a * sine);
    }
    for (int64_t i = rope; i < dim; i++) put(i, widened(x[i]));
}

// The same with the last `rope` channels, neighbours together, each in its own place. direction -1: rotated back.
template <class T, class Put>
KVIK_INLINE void rotated_last(const T* x, int64_t dim, const float* rotation, int64_t rope, Put put,
                              float direction = 1.0f) {
    const int64_t half = rope / 2, first = dim - rope;
    for (int64_t i = 0; i < first; i++) put(i, widened(x[i]));
    for (int64_t i = 0; i < half; i++) {
        const float a = widened(x[first + 2 * i]), b = widened(x[first + 2 * i + 1]);
        const float cosine = rotation[i], sine = direction * rotation[half + i];
        put(first + 2 * i, a * cosine - b * sine);
        put(first + 2 * i + 1, b * cosine + a * sine);
    }
}

// Lays out words of 32 bits of kStrip rows in the order of a strip: [words][kStrip].
inline void strip_of_rows(void* to, const void* const* rows, int64_t words) {
    int64_t done = 0;
#if defined(__AVX512BW__)
    for (; done + 16 <= words; done += 16) {  // transposes 16 x 16 words
        __m512i v[16], w[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_si512(static_cast<const int32_t*>(rows[i]) + done);
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) {
            w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
            w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {  // then quarter l of v[i + j] has word 4 l + j of rows i to i + 3
            v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
            v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
            v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
            v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m512i even = _mm512_shuffle_i32x4(v[j], v[j + 4], 0x88);
            const __m512i odd = _mm512_shuffle_i32x4(v[j], v[j + 4], 0xdd);
            const __m512i even_8 = _mm512_shuffle_i32x4(v[j + 8], v[j + 12], 0x88);
            const __m512i odd_8 = _mm512_shuffle_i32x4(v[j + 8], v[j + 12], 0xdd);
            int32_t* at = static_cast<int32_t*>(to) + (done + j) * kStrip;
            _mm512_storeu_si512(at, _mm512_shuffle_i32x4(even, even_8, 0x88));
            _mm512_storeu_si512(at + 4 * kStrip, _mm512_shuffle_i32x4(odd, odd_8, 0x88));
            _mm512_storeu_si512(at + 8 * kStrip, _mm512_shuffle_i32x4(even, even_8, 0xdd));
            _mm512_storeu_si512(at + 12 * kStrip, _mm512_shuffle_i32x4(odd, odd_8, 0xdd));
        }
    }
#endif
    for (int t = 0; t < kStrip; t++)
        for (int64_t i = done; i < words; i++)
            std::memcpy(static_cast<int32_t*>(to) + i * kStrip + t, static_cast<const int32_t*>(rows[t]) + i, 4);
}

template <class T>
void store(const store_index_args& a, Team& team) {
    const KvLayout layout{1, a.dim, a.block_size};
    const auto* slots = static_cast<const int64_t*>(a.slot_mapping);
    each_range(team, a.rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            if (slots[row] < 0) continue;
            const int64_t block = slots[row] / a.block_size, offset = slots[row] % a.block_size;
            T* strip = static_cast<T*>(a.cache) + layout.strip(block, 0, offset);
            rotated(static_cast<const T*>(a.k) + row * a.k_stride, a.dim,
                    static_cast<const float*>(a.rotation) + row * a.rope, a.rope, a.interleaved != 0,
                    [&](int64_t d, float value) KVIK_INLINED {
                        put_number(strip + key_place<cache::kPair<T>>(offset % kStrip, d), value);
                    });
        }
    });
}

// Products of a tile of keys with kRows heads of a query.
template <class Format>
KVIK_INLINE void products(const paged::Unit<Format>& unit, const typename Format::Factor* q, float (*to)[kTile]) {
    constexpr int kWide = kLanes == 16 ? paged::kVectors : 1;
    for (int s = 0; s < kStrips; s += kWide) paged::scores_of<Format, Format::kRows, kWide>(unit, s, q, to, false);
}
#if defined(__AMX_TILE__) || defined(KVIK_EMULATE_AMX)
KVIK_INLINE void products(const paged::Unit<paged::RegisterPairs>& unit, const bf16* q, float (*to)[kTile]) {
    paged::Ahead none(unit, false);
    paged::register_scores(unit, q, to, none);
}
#endif

// Chooses keys for one query after another.
template <class Format, class T>
class Chooser {
    using Factor = typename Format::Factor;

public:
    // Heads, filled up with zeros to whole groups of rows.
    static int64_t rows_of(const choose_keys_args& a) {
        return (a.heads + Format::kRows - 1) / Format::kRows * Format::kRows;
    }
    // keys: most of a query.
    static size_t scratch_bytes(const choose_keys_args& a, int64_t keys) {
        const size_t tile = a.every ? size_t(kTile * a.dim) * sizeof(T) : 0;
        const size_t query = size_t(rows_of(a) * a.dim) * sizeof(Factor);
        return tile + query + size_t(rows_of(a) + 2 * keys + kTile) * sizeof(float);
    }

    Chooser(const choose_keys_args& args, char* scratch, int64_t keys)
        : a(args), rows(rows_of(args)), shapes(args.dim), layout{1, args.dim, args.block_size} {
        packed = reinterpret_cast<T*>(scratch);
        factors = reinterpret_cast<Factor*>(packed + (a.every ? kTile * a.dim : 0));
        weights = reinterpret_cast<float*>(factors + rows * a.dim);
        orders = reinterpret_cast<uint32_t*>(weights + rows);
        scores = reinterpret_cast<float*>(orders + keys);
    }

    void take(int64_t query) {
        token = query;
        const auto* starts = static_cast<const int32_t*>(a.query_start_loc);
        int64_t sequence = 0;
        while (starts[sequence + 1] <= token) sequence++;
        const int64_t first_token = starts[sequence], count = starts[sequence + 1] - first_token;
        const auto* words = static_cast<const uint64_t*>(a.tree);
        words = words && words[first_token] ? words + first_token : nullptr;
        place = token - first_token;
        queries = {static_cast<const int32_t*>(a.seq_lens)[sequence] - count, count, 0, false, 0, words, 0,
                   a.first_keys ? static_cast<const int32_t*>(a.first_keys)[sequence] : 0, nullptr, 0, 0};
        table = static_cast<const int32_t*>(a.block_table) + sequence * a.table_stride;
    }
    int64_t first_key() const { return queries.first_key(place); }
    int64_t end_key() const { return a.every ? queries.end_key(place) / a.every : queries.end_key(place); }
    int64_t num_keys() const { return end_key() - first_key(); }
    // The keys to be scored: those of a tree's other paths too.
    int64_t end_scored() const { return queries.tree ? queries.cached + queries.count : end_key(); }
    // The end of those whose place does not depend on a tree.
    int64_t end_cached() const { return queries.tree ? queries.cached : end_key(); }

    void pack_query() {
        const float scale = 1.0f / std::sqrt(float(a.heads * a.dim));
        const auto* own_weights = a.weights ? static_cast<const T*>(a.weights) + token * a.weights_stride : nullptr;
        std::memset(factors, 0, size_t(rows * a.dim) * sizeof(Factor));
        for (int64_t h = 0; h < rows; h++)
            weights[h] = own_weights && h < a.heads ? widened(own_weights[h]) * scale : 0.0f;
        for (int64_t h = 0; h < a.heads; h++) {
            constexpr int P = Format::kPair, R = Format::kRows;
            Factor* to = factors + h / R * R * a.dim + h % R * (Format::kRegisters ? a.dim : P);
            const auto put = [&](int64_t d, float value) KVIK_INLINED {
                T rounded;
                put_number(&rounded, value);
                put_number(to + (Format::kRegisters ? d : d / P * (R * P) + d % P), widened(rounded));
            };
            const T* q = static_cast<const T*>(a.q) + token * a.q_stride + h * a.dim;
            const float* rotation = static_cast<const float*>(a.rotation) + token * a.rope;
            if (a.every)
                rotated_last(q, a.dim, rotation, a.rope, put);
            else
                rotated(q, a.dim, rotation, a.rope, a.interleaved != 0, put);
        }
    }

    // Calls use(tile, row, products) for tiles of the keys [begin, end), by place in the block table, begin a multiple of
    // kTile, and for the heads row .. row + kRows.
    template <class Use>
    void each_products(int64_t begin, int64_t end, Use use) const {
        paged::Unit<Format> unit{};
        unit.head_dim = a.dim;
        alignas(64) float of_heads[Format::kRows][kTile];
        for (int64_t tile = begin; tile < end; tile += kTile) {
            for (int s = 0; s < kStrips; s++) {  // strips after the last key may have no block
                if (a.every) {
                    unit.keys[s] = entries_of(tile + s * kStrip, end, packed + s * kStrip * a.dim);
                    continue;
                }
                const int64_t key = tile + s * kStrip < end ? tile + s * kStrip : tile;
                const int64_t block = table[key / a.block_size];
                unit.keys[s] = static_cast<const T*>(a.cache) + layout.strip(block, 0, key % a.block_size);
            }
            for (int64_t row = 0; row < rows; row += Format::kRows) {
                products(unit, factors + row * a.dim, of_heads);
                use(tile, row, of_heads);
            }
        }
    }

    // Writes the scores of the keys [begin, end).
    void score(int64_t begin, int64_t end, float* to) const {
        F32 sums[kTile / kLanes];
        each_products(begin, end, [&](int64_t tile, int64_t row, const float (*of_heads)[kTile]) {
            if (row == 0)
                for (F32& sum : sums) sum = zero();
            for (int r = 0; r < Format::kRows; r++) {
                const F32 weight = broadcast(weights[row + r]);
                for (int n = 0; n < kTile / kLanes; n++)
                    sums[n] = fma(max(zero(), load(of_heads[r] + n * kLanes)), weight, sums[n]);
            }
            for (int n = 0; n < kTile / kLanes; n++) kvik::store(to + tile + n * kLanes, sums[n]);
        });
    }

    // Raises best [heads, blocks] to the largest products of the keys [begin, end). A node of a tree has its own place.
    void score_blocks(int64_t begin, int64_t end, float* best, int64_t blocks) const {
        const int64_t width = a.span < kTile ? a.span : kTile;  // keys of a block in a tile
        const int64_t whole = a.span < kStrip ? 0 : queries.tree && queries.cached < end ? queries.cached : end;
        each_products(begin, end, [&](int64_t tile, int64_t row, const float (*of_heads)[kTile]) {
            if (tile + kTile <= whole) {
                for (int64_t r = 0; r < Format::kRows && row + r < a.heads; r++)
                    for (int64_t i = 0; i < kTile; i += width) {
                        float& most = best[(row + r) * blocks + (tile + i) / a.span];
                        F32 found = broadcast(most);
                        for (int64_t n = i; n < i + width; n += kLanes) found = max(load(of_heads[r] + n), found);
                        most = largest(found);  // NaN is never the largest
                    }
                return;
            }
            const int64_t last = end - tile < kTile ? end - tile : kTile;
            for (int64_t i = 0; i < last; i++) {
                const int64_t place = place_of(tile + i);
                if (place < 0) continue;
                for (int64_t r = 0; r < Format::kRows && row + r < a.heads; r++) {
                    float& most = best[(row + r) * blocks + place / a.span];
                    if (of_heads[r][i] > most) most = of_heads[r][i];
                }
            }
        });
    }

    // Sets the bits of the blocks that each head reads. ranks: scratch, two for each block.
    void choose_blocks(const float* best, int64_t blocks, uint64_t* ranks) {
        const int64_t end = queries.end_key(place), count = (end + a.span - 1) / a.span, words = a.out_stride / a.heads;
        uint64_t* sorted = ranks + blocks;
        // Not std::greater: clang emits code for it that the linker would share among all instruction sets.
        const auto descending = [](uint64_t x, uint64_t y) { return x > y; };
        for (int64_t h = 0; h < a.heads; h++) {
            auto* to = static_cast<uint64_t*>(a.out) + token * a.out_stride + h * words;
            for (int64_t at = 0; at < end; at += kTile)
                to[at / kTile] = count <= a.top ? paged::bits_between(-at, end - at) : 0;
            if (count <= a.top) continue;
            for (int64_t b = 0; b < count; b++)
                ranks[b] = sorted[b] = ranked(b + a.local >= count ? INFINITY : best[h * blocks + b], b);
            std::nth_element(sorted, sorted + a.top - 1, sorted + count, descending);
            for (int64_t b = 0; b < count; b++) {
                if (ranks[b] < sorted[a.top - 1]) continue;
                const int64_t first = b * a.span, last = first + a.span < end ? first + a.span : end;
                for (int64_t at = first / kTile * kTile; at < last; at += kTile)
                    to[at / kTile] |= paged::bits_between(first - at, last - at);
            }
        }
    }

    // Sets the bits of the keys that the query reads; with pools of those of the chosen pools, and after the last one.
    void choose(float* of_keys) {
        choose_scored(of_keys);
        if (!a.pools) return;
        auto* words = static_cast<uint64_t*>(a.out) + token * a.out_stride;
        const int64_t pools = end_key(), seen = queries.end_key(place), of_pools = (pools + kTile - 1) / kTile;
        std::memcpy(orders, words, size_t(of_pools) * sizeof(uint64_t));
        std::memset(words, 0, size_t((seen + kTile - 1) / kTile) * sizeof(uint64_t));
        const auto add = [&](int64_t first, int64_t last) {
            for (int64_t at = first / kTile * kTile; at < last; at += kTile)
                words[at / kTile] |= paged::bits_between(first - at, last - at);
        };
        for (int64_t first = 0; first < pools; first += kTile) {
            uint64_t kept;
            std::memcpy(&kept, orders + first / kTile * 2, sizeof kept);
            for (kept &= paged::bits_between(0, pools - first); kept; kept &= kept - 1) {
                const int64_t pool = first + __builtin_ctzll(kept);
                add(pool * a.every, (pool + 1) * a.every);
            }
        }
        add(pools * a.every, seen);
    }

    float* scores;  // of a query that one thread scores

private:
    // The same of what is scored. A node of a tree finds the keys of its path after the cached.
    void choose_scored(float* of_keys) {
        const int64_t first = first_key(), count = num_keys(), end = first + count;
        auto* words = static_cast<uint64_t*>(a.out) + token * a.out_stride;
        if (count <= a.top) {
            for (int64_t at = first / kTile * kTile; at < end; at += kTile)
                words[at / kTile] = paged::bits_between(first - at, end - at);
            return;
        }
        if (queries.tree) {
            int64_t to = queries.cached;
            for (uint64_t path = queries.tree[place]; path; path &= path - 1)
                of_keys[to++] = of_keys[queries.cached + __builtin_ctzll(path)];
        }
        const uint32_t lowest = lowest_of(of_keys + first, count);
        const float cut = value_of(uint64_t(lowest) << 32);
        int64_t left = a.top;
        for (int64_t at = first / kTile * kTile; at < end; at += kTile) {
            const uint64_t above = above_cut(of_keys + at, cut) & paged::bits_between(first - at, end - at);
            left -= __builtin_popcountll(above);
            words[at / kTile] = above;
        }
        for (int64_t i = first; left > 0; i++) {
            const bool equals = ordered(of_keys[i]) == lowest;
            words[i / kTile] |= uint64_t(equals) << i % kTile;
            left -= equals;
        }
    }

    // Lays out the entries from `first` on as a strip; those after the last one repeat it.
    const T* entries_of(int64_t first, int64_t end, T* to) const {
        const void* of_keys[kStrip];
        for (int t = 0; t < kStrip; t++) {
            const int64_t entry = first + t < end ? first + t : end - 1, last = (entry + 1) * a.every - 1;
            const int64_t slot = table[last / a.block_size] * a.block_size + last % a.block_size;
            of_keys[t] = static_cast<const T*>(a.cache) + slot / a.entry_tokens * a.cache_stride;
        }
        strip_of_rows(to, of_keys, a.dim / cache::kPair<T>);
        return to;
    }

    // The place in the query's own sequence of a key; below 0: it is not on the path to it.
    int64_t place_of(int64_t key) const {
        if (!queries.tree || key < queries.cached) return key;
        const uint64_t path = queries.tree[place], node = uint64_t(1) << (key - queries.cached);
        return path & node ? queries.cached + __builtin_popcountll(path & (node - 1)) : -1;
    }

    // The smallest of the `top` largest scores, as `ordered`. They are sorted into buckets of equal width, one of which
    // has it; its members are sorted into narrower buckets. `lowest_kept` does the same with 28 bytes a key, not 8.
    uint32_t lowest_of(const float* of_keys, int64_t count) const {
        constexpr int64_t kBuckets = 2048;
        for (int64_t i = 0; i < count; i++) orders[i] = ordered(of_keys[i]);
        for (int64_t left = a.top;;) {
            uint32_t least = orders[0], most = orders[0];
            for (int64_t i = 1; i < count; i++) {
                least = orders[i] < least ? orders[i] : least;
                most = orders[i] > most ? orders[i] : most;
            }
            int shift = 0;
            while ((most - least) >> shift >= kBuckets) shift++;
            int32_t counts[kBuckets] = {};
            for (int64_t i = 0; i < count; i++) counts[(orders[i] - least) >> shift]++;
            uint32_t bucket = (most - least) >> shift;
            for (; counts[bucket] < left; bucket--) left -= counts[bucket];
            if (shift == 0) return least + bucket;
            int64_t kept = 0;
            for (int64_t i = 0; i < count; i++) {
                const uint32_t order = orders[i];
                orders[kept] = order;
                kept += (order - least) >> shift == bucket;
            }
            count = kept;
        }
    }

    // A bit for each score of a tile above the cut. NaN is above infinity.
    static uint64_t above_cut(const float* of_keys, float cut) {
        uint64_t above = 0;
        for (int n = 0; n < kTile; n += kLanes)
            above |= uint64_t(bits(not_le(load(of_keys + n), broadcast(cut)))) << n;
        return is_nan(cut) ? 0 : above;
    }

    const choose_keys_args& a;
    const int64_t rows;
    const typename Format::Shapes shapes;
    const KvLayout layout;
    float* weights;
    T* packed;  // a tile of entries
    Factor* factors;
    uint32_t* orders;  // of scores

    int64_t token, place;  // of the query in the step, in its sequence
    paged::Queries queries{};
    const int32_t* table;
};

// The keys of the longest sequence, up to whole tasks so that memory seldom grows.
inline int64_t longest_of(const choose_keys_args& a) {
    const auto* lengths = static_cast<const int32_t*>(a.seq_lens);
    int64_t longest = 0;
    for (int64_t s = 0; s < a.num_seqs; s++)
        if (lengths[s] > longest) longest = lengths[s];
    if (a.every) longest /= a.every;
    return (longest + kKeysPerTask - 1) / kKeysPerTask * kKeysPerTask;
}

template <class Format, class T>
void choose(const choose_keys_args& a, Team& team) {
    const auto* starts = static_cast<const int32_t*>(a.query_start_loc);
    const int64_t tokens = starts[a.num_seqs];
    const int64_t longest = longest_of(a);
    const size_t scratch = Chooser<Format, T>::scratch_bytes(a, longest);
    const bool few = longest > a.top && tokens <= kFewQueries;
    const int64_t parts = few ? longest / kKeysPerTask : 1, row = longest + kTile;
    float* shared = few ? static_cast<float*>(shared_scratch(team, 0, size_t(tokens * row) * sizeof(float))) : nullptr;
    if (few)
        together(team, tokens * parts, [&](Member& member) {
            Chooser<Format, T> chooser(a, static_cast<char*>(member.scratch(scratch)), longest);
            for (int64_t task; (task = member.next()) >= 0;) {
                chooser.take(task / parts);
                const int64_t begin = task % parts * kKeysPerTask, last = chooser.end_scored();
                if (chooser.num_keys() <= a.top || begin >= last) continue;
                chooser.pack_query();
                const int64_t end = begin + kKeysPerTask < last ? begin + kKeysPerTask : last;
                chooser.score(begin, end, shared + task / parts * row);
            }
        });
    together(team, tokens, [&](Member& member) {
        Chooser<Format, T> chooser(a, static_cast<char*>(member.scratch(scratch)), longest);
        for (int64_t token; (token = member.next()) >= 0;) {
            chooser.take(token);
            float* scores = few ? shared + token * row : chooser.scores;
            if (!few && chooser.num_keys() > a.top) {
                chooser.pack_query();
                chooser.score(chooser.first_key() / kTile * kTile, chooser.end_scored(), scores);
            }
            chooser.choose(scores);
        }
    });
}

// The same for blocks of keys, whose best products take the place of scores.
template <class Format, class T>
void choose_blocks(const choose_keys_args& a, Team& team) {
    const auto* starts = static_cast<const int32_t*>(a.query_start_loc);
    const int64_t tokens = starts[a.num_seqs];
    const int64_t longest = longest_of(a);
    const int64_t blocks = longest / a.span, row = a.heads * blocks;
    const size_t own = Chooser<Format, T>::scratch_bytes(a, 0), best_bytes = size_t(row) * sizeof(float);
    const size_t scratch = (own + best_bytes + 63) / 64 * 64 + size_t(2 * blocks) * sizeof(uint64_t);
    const bool few = blocks > a.top && tokens <= kFewQueries;
    const int64_t parts = few ? longest / kKeysPerTask : 1;
    float* shared = few ? static_cast<float*>(shared_scratch(team, 0, size_t(tokens) * best_bytes)) : nullptr;
    if (few)
        together(team, tokens * parts, [&](Member& member) {
            Chooser<Format, T> chooser(a, static_cast<char*>(member.scratch(scratch)), 0);
            for (int64_t task; (task = member.next()) >= 0;) {
                chooser.take(task / parts);
                float* best = shared + task / parts * row;
                const int64_t begin = task % parts * kKeysPerTask, last = chooser.end_cached();
                for (int64_t h = 0; h < a.heads; h++)
                    std::fill_n(best + h * blocks + begin / a.span, kKeysPerTask / a.span, -INFINITY);
                if (begin >= last) continue;
                chooser.pack_query();
                chooser.score_blocks(begin, begin + kKeysPerTask < last ? begin + kKeysPerTask : last, best, blocks);
            }
        });
    together(team, tokens, [&](Member& member) {
        char* memory = static_cast<char*>(member.scratch(scratch));
        Chooser<Format, T> chooser(a, memory, 0);
        float* mine = reinterpret_cast<float*>(memory + own);
        auto* ranks = reinterpret_cast<uint64_t*>(memory + (own + best_bytes + 63) / 64 * 64);
        for (int64_t token; (token = member.next()) >= 0;) {
            chooser.take(token);
            float* best = few ? shared + token * row : mine;
            const int64_t end = chooser.end_scored(), first = few ? chooser.end_cached() / kTile * kTile : 0;
            if (!few) std::fill_n(best, row, -INFINITY);
            if ((chooser.num_keys() + a.span - 1) / a.span > a.top && end > (few ? chooser.end_cached() : 0)) {
                chooser.pack_query();
                chooser.score_blocks(first, end, best, blocks);
            }
            chooser.choose_blocks(best, blocks, ranks);
        }
    });
}

}  // namespace indexer

void store_index(const store_index_args& a, Team& team) {
    a.dtype == kF32 ? indexer::store<float>(a, team) : indexer::store<bf16>(a, team);
}

void choose_keys(const choose_keys_args& a, Team& team) {
    if (a.span) {
        a.dtype == kF32 ? indexer::choose_blocks<paged::Floats, float>(a, team)
                        : indexer::choose_blocks<paged::PairsOfBF16, bf16>(a, team);
        return;
    }
    a.dtype == kF32 ? indexer::choose<paged::Floats, float>(a, team)
                    : indexer::choose<paged::PairsOfBF16, bf16>(a, team);
}

}  // namespace
}  // namespace kvik

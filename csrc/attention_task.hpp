// The part of attention that one thread computes as a task: some queries of one sequence, some kv heads, some splits.
//
// Keys are taken in splits of 512 at absolute positions. Each split starts with empty sums, and splits
// are combined in order. So a result does not depend on whether one thread walked all splits or many
// threads one each. Sinks of a window are a separate split, before the others. A node of a tree sees its
// path at the positions that the path would have in a plain sequence: where its nodes are stored elsewhere, they
// are first copied into new strips.
#pragma once

#include "attention_tile.hpp"
#include "kv_latent.hpp"
#include "kv_move.hpp"
#include "kv_widen.hpp"
#include "team.hpp"

namespace kvik {
namespace {
namespace paged {

constexpr int64_t kSplit = 512;
constexpr int64_t kSinks = -1;  // the split of the sinks
// Up to this many rows of a kv head (queries x heads of its group), memory limits the speed.
constexpr int64_t kThinRows = 16;

struct Task {
    Queries queries;
    int64_t first_token;  // of the sequence, in q and out
    const int32_t* table;
    int64_t query, num_queries, head, num_heads, split, num_splits;  // heads: kv heads
    bool sinks;  // the split of the sinks comes before these
    // Where to leave the records, for a single split: row r of head h at
    // (h * part_rows + r) * Record::size. Null: combine the splits and write the output.
    float* parts;
    int64_t part_rows;
};

// total += part, both of them records; the total's weights are a single sum, in the first lane.
inline void combine(float* total, float* part, int64_t value_dim) {
    float* total_largest = Record::largest(total, value_dim);
    const float part_largest = *Record::largest(part, value_dim);
    const float now = part_largest > *total_largest ? part_largest : *total_largest;
    float shrinks[kLanes];
    const F32 fall = broadcast(*total_largest - base_of(now)), fall_part = broadcast(part_largest - base_of(now));
    store(shrinks, weight_of(select(lanes_of(1), fall, fall_part)));
    const float shrink = shrinks[0], shrink_part = shrinks[1];
    *total_largest = now;
    float* total_sum = Record::weights(total, value_dim);
    *total_sum = *total_sum * shrink + sum(load(Record::weights(part, value_dim))) * shrink_part;
    for (int64_t d = 0; d < value_dim; d += kLanes)
        store(total + d, fma(load(part + d), broadcast(shrink_part), mul(load(total + d), broadcast(shrink))));
}

// Rescales total's weights to a sink's score where that is larger, and adds the sink's weight to their sum.
inline void add_sink(float* total, float sink, int64_t head_dim) {
    const float scaled = sink * kPerLn2, most = *Record::largest(total, head_dim), now = scaled > most ? scaled : most;
    float weights[kLanes];
    store(weights, weight_of(select(lanes_of(1), broadcast(most - now), broadcast(scaled - now))));
    for (int64_t d = 0; d < head_dim; d += kLanes) store(total + d, mul(load(total + d), broadcast(weights[0])));
    float* sum = Record::weights(total, head_dim);
    *sum = *sum * weights[0] + weights[1];
}

// Writes the result of a row. A row that saw no key gives zeros.
inline void write_out(const attention_args& a, float* total, int64_t token, int64_t head) {
    if (a.sinks) add_sink(total, static_cast<const float*>(a.sinks)[head], a.value_dim);
    const float sum = *Record::weights(total, a.value_dim);
    const int64_t at = token * a.out_stride + head * a.out_dim;
    const F32 divisor = broadcast(sum == 0.0f ? 1.0f : sum);
    for (int64_t d = 0; d < a.out_dim; d += kLanes) {
        // + 0: a masked key may or may not have added +0 to a sum that underflowed to -0
        const F32 result = add(div(load(total + d), divisor), zero());
        if (a.dtype == kF32)
            store(static_cast<float*>(a.out) + at + d, result);
        else
            store(static_cast<bf16*>(a.out) + at + d, result);
    }
}

inline void read_query(const void* q, int64_t, int64_t at, bf16* to) { *to = static_cast<const bf16*>(q)[at]; }
inline void read_query(const void* q, int64_t dtype, int64_t at, float* to) {
    *to = dtype == kF32 ? static_cast<const float*>(q)[at] : to_float(static_cast<const bf16*>(q)[at]);
}

// Runs tasks. Stored: the element type of the cache; rounded numbers are widened, tile by tile, to the type
// that the format computes with.
template <class Format, class Stored>
class Worker {
    using Cache = typename Format::Cache;
    using Factor = typename Format::Factor;
    static constexpr bool kWiden = cache::kScaled<Stored>;

public:
    // Bytes of scratch for tasks of `rows` rows, over all their heads.
    static int64_t scratch_bytes(const attention_args& a, int64_t rows) {
        const int64_t packings = (a.tree ? 2 : 1) * (a.sink_q ? 2 : 1);
        const int64_t packed_rows = packings * rows + Format::kRows;
        const int64_t path_bytes = a.tree ? 2 * kTile * (a.head_dim * int64_t(sizeof(Stored)) + 2) : 0;
        return rows * (2 * Record::size(a.value_dim) * int64_t(sizeof(float)) +
                       int64_t(sizeof(uint64_t) + sizeof(Bias))) +
               packed_rows * a.head_dim * int64_t(sizeof(Factor)) +
               2 * kTile * a.head_dim * int64_t(sizeof(Cache)) + path_bytes + 64;
    }

    Worker(const attention_args& args, char* scratch, int64_t rows)
        : a(args), layout{a.kv_heads, a.head_dim, a.block_size}, group(a.heads / a.kv_heads), shapes(a.head_dim) {
        latent = !a.v_cache;  // then a vector is key and value at once
        value_cache = static_cast<const Stored*>(latent ? a.k_cache : a.v_cache);
        value_scales_of = static_cast<const uint16_t*>(latent ? a.k_scales : a.v_scales);
        record_size = Record::size(a.value_dim);
        records = reinterpret_cast<float*>(scratch);
        totals = records + rows * record_size;
        keys = reinterpret_cast<Cache*>(totals + rows * record_size);
        values = keys + kTile * a.head_dim;
        factors = reinterpret_cast<Factor*>(values + kTile * a.head_dim);
        sink_factors = a.sink_q ? factors + rows * a.head_dim : factors;
        visible = reinterpret_cast<uint64_t*>(sink_factors + rows * a.head_dim);
        biases = reinterpret_cast<Bias*>(visible + rows);
        path_keys = reinterpret_cast<Stored*>(biases + rows);
        path_values = path_keys + kTile * a.head_dim;
        path_key_words = reinterpret_cast<uint16_t*>(path_values + kTile * a.head_dim);
        path_value_words = path_key_words + kTile;
        path_factors = reinterpret_cast<Factor*>(path_value_words + kTile);
        sink_path_factors = a.sink_q ? path_factors + rows * a.head_dim : path_factors;
        if (latent) path_value_words = path_key_words;
    }

    void run(const Task& given) {
        task = &given;
        rows = task->num_queries * group;
        range = task->queries.range(task->query, task->query + task->num_queries);
        pack_queries(a.q, a.q_stride, factors, rows);
        if (task->queries.tree) pack_queries(a.q, a.q_stride, path_factors, group);
        if (a.sink_q) {
            pack_queries(a.sink_q, a.sink_q_stride, sink_factors, rows);
            if (task->queries.tree) pack_queries(a.sink_q, a.sink_q_stride, sink_path_factors, group);
        }
        if (task->parts) {
            walk_split(task->split, task->parts + task->head * task->part_rows * record_size,
                       task->part_rows * record_size);
            return;
        }
        for (int64_t r = 0; r < task->num_heads * rows; r++) Record::reset(totals + r * record_size, a.value_dim);
        if (task->sinks) add_split(kSinks);
        for (int64_t split = task->split; split < task->split + task->num_splits; split++) add_split(split);
        for (int64_t h = 0; h < task->num_heads; h++)
            for (int64_t r = 0; r < rows; r++)
                write_out(a, totals + (h * rows + r) * record_size, task->first_token + task->query + r / group,
                          (task->head + h) * group + r % group);
    }

private:
    void add_split(int64_t split) {
        walk_split(split, records, rows * record_size);
        for (int64_t r = 0; r < task->num_heads * rows; r++)
            combine(totals + r * record_size, records + r * record_size, a.value_dim);
    }

    // Rows of a head are its queries times the heads of the group. Each `part` consecutive rows
    // are packed by kRows, in the layout for scores: [head_dim / pair][rows][pair]. Tile registers need
    // [rows][head_dim], and load rows past the last one too.
    void pack_queries(const void* q, int64_t stride, Factor* packed, int64_t part) {
        constexpr int P = Format::kPair;
        for (int64_t h = 0; h < task->num_heads; h++)
            for (int64_t r = 0; r < rows; r++) {
                const int64_t inner = r % part, first = Format::kRegisters ? inner : inner / kRows * kRows;
                const int64_t width = Format::kRegisters ? 1 : part - first < kRows ? part - first : kRows;
                Factor* to = packed + (h * rows + r - inner + first) * a.head_dim + (inner - first) * P;
                const int64_t token = task->first_token + task->query + r / group;
                const int64_t head = (task->head + h) * group + r % group;
                const int64_t own = a.value_dim, at = token * stride + head * own;
                for (int64_t i = 0; i < own / P; i++)
                    for (int p = 0; p < P; p++) read_query(q, a.dtype, at + i * P + p, to + i * width * P + p);
                if (!latent) continue;
                const int64_t rope_at = token * a.q_rope_stride + head * (a.head_dim - own) - own;
                for (int64_t i = own / P; i < a.head_dim / P; i++)
                    for (int p = 0; p < P; p++)
                        read_query(a.q_rope, a.dtype, rope_at + i * P + p, to + i * width * P + p);
            }
    }

    // Where the strips of a tile are, for kv head 0. Strips that no query of the task sees are not
    // looked up, as their blocks may be released or not yet allocated; they get the place of a valid strip.
    struct Strips {
        int64_t token[kStrips];
        unsigned present;
    };
    Strips find(int64_t tile, const Queries::Range& seen) const {
        Strips strips{};
        int64_t any = 0;
        for (int s = kStrips - 1; s >= 0; s--) {
            const int64_t position = tile + s * kStrip;
            if (position >= seen.end || position + kStrip <= seen.first) continue;
            any = layout.token(task->table[position / a.block_size], 0, position % a.block_size);
            strips.token[s] = any;
            strips.present |= 1u << s;
        }
        for (int s = 0; s < kStrips; s++)
            if (!(strips.present >> s & 1)) strips.token[s] = any;
        return strips;
    }

    void walk_split(int64_t split, float* to, int64_t head_stride) {
        for (int64_t h = 0; h < task->num_heads; h++)
            for (int64_t r = 0; r < rows; r++) Record::reset(to + h * head_stride + r * record_size, a.value_dim);
        const bool of_sinks = split == kSinks;
        const Queries::Range seen = of_sinks ? task->queries.sinks_range(range) : range;
        const Factor* own = of_sinks ? sink_factors : factors;
        const Factor* own_paths = of_sinks ? sink_path_factors : path_factors;
        int64_t tile = of_sinks ? 0 : split * kSplit, end = of_sinks ? seen.end : tile + kSplit;
        if (tile < seen.first) tile = seen.first / kTile * kTile;
        if (end > seen.end) end = seen.end;
        if (tile >= end) return;
        Strips next = find(tile, seen);
        for (; tile < end; tile += kTile) {
            const Strips strips = next;
            if (tile + kTile < end) next = find(tile + kTile, seen);
            const bool apart = task->queries.head_words > 0;  // each kv head reads keys of its own
            if (!apart && !see(tile, of_sinks, 0)) continue;
            for (int64_t h = 0; h < task->num_heads; h++) {
                if (apart && !see(tile, of_sinks, task->head + h)) continue;
                if (a.biases) take_biases(task->head + h, tile, of_sinks);
                const bool last = h + 1 == task->num_heads;
                const Places places = places_of(strips, task->head + h);
                const Places then = places_of(last ? next : strips, last ? task->head : task->head + h + 1);
                if (task->queries.in_place(tile)) {
                    walk_rows(places, then, own + h * rows * a.head_dim, visible, to + h * head_stride, rows);
                    continue;
                }
                for (int64_t i = 0; i < task->num_queries; i++) {
                    if (!visible[i * group]) continue;
                    walk_rows(along_path(places, i, tile, task->head + h), then,
                              own_paths + (h * rows + i * group) * a.head_dim, visible + i * group,
                              to + h * head_stride + i * group * record_size, group);
                }
            }
        }
    }

    // Takes the keys of a tile that the queries of a kv head read; whether there are any.
    bool see(int64_t tile, bool of_sinks, int64_t head) {
        uint64_t any = 0;
        for (int64_t i = 0; i < task->num_queries; i++) {
            const uint64_t bits = task->queries.bits(task->query + i, tile, of_sinks, head);
            for (int64_t j = 0; j < group; j++) visible[i * group + j] = bits;
            any |= bits;
        }
        return any != 0;
    }

    void take_biases(int64_t kv_head, int64_t tile, bool of_sinks) {
        const int64_t reach = a.bias_reach, size = reach ? 1 + 2 * reach : 1;
        const float* of_heads = static_cast<const float*>(a.biases) + kv_head * group * size;
        for (int64_t i = 0; i < task->num_queries; i++) {
            const int64_t after = tile - task->queries.position(task->query + i, of_sinks);
            for (int64_t j = 0; j < group; j++)
                biases[i * group + j] = {reach ? of_heads + j * size + reach : nullptr, of_heads[j], int32_t(after)};
        }
    }

    // Where a kv head finds the strips of a tile.
    struct Places {
        const Stored* keys[kStrips];
        const Stored* values[kStrips];
        const uint16_t* key_words[kStrips];  // of scale
        const uint16_t* value_words[kStrips];
    };
    Places places_of(const Strips& strips, int64_t head) const {
        Places places;
        for (int s = 0; s < kStrips; s++) {
            const int64_t token = strips.token[s] + head * a.block_size;
            places.keys[s] = static_cast<const Stored*>(a.k_cache) + token * a.head_dim / cache::kNumbers<Stored>;
            places.values[s] = value_cache + token * a.head_dim / cache::kNumbers<Stored>;
            if constexpr (kWiden) {
                places.key_words[s] = static_cast<const uint16_t*>(a.k_scales) + token;
                places.value_words[s] = value_scales_of + token;
            }
        }
        return places;
    }

    // The same for a node of a tree: strips after the cached keys are assembled from its path.
    Places along_path(Places places, int64_t query, int64_t tile, int64_t head) {
        const Queries& queries = task->queries;
        uint64_t path = queries.tree[task->query + query];
        if (!(path & (path + 1))) return places;  // the first nodes are already there
        const int64_t end = queries.end_key(task->query + query);
        const int64_t size = kStrip * a.head_dim / cache::kNumbers<Stored>;
        for (int s = 0; s < kStrips; s++) {
            const int64_t first = tile + s * kStrip;
            if (first + kStrip <= queries.cached || first >= end) continue;
            if (first < queries.cached) {
                std::memcpy(path_keys + s * size, places.keys[s], size_t(size) * sizeof(Stored));
                if constexpr (kWiden) std::memcpy(path_key_words + s * kStrip, places.key_words[s], kStrip * 2);
                if (!latent) {
                    std::memcpy(path_values + s * size, places.values[s], size_t(size) * sizeof(Stored));
                    if constexpr (kWiden)
                        std::memcpy(path_value_words + s * kStrip, places.value_words[s], kStrip * 2);
                }
            }
            places.keys[s] = path_keys + s * size;
            places.values[s] = path_values + s * size;
            places.key_words[s] = path_key_words + s * kStrip;
            places.value_words[s] = path_value_words + s * kStrip;
        }
        for (int64_t i = queries.cached - tile; path && i < kTile; i++, path &= path - 1) {
            if (i < 0) continue;
            const int64_t position = queries.cached + __builtin_ctzll(path), offset = position % a.block_size;
            const int64_t block = task->table[position / a.block_size], t = offset % kStrip;
            const int64_t from = layout.strip(block, head, offset) / cache::kNumbers<Stored>;
            const int64_t to = i / kStrip * size;
            cache::copy_key(path_keys + to, i % kStrip, static_cast<const Stored*>(a.k_cache) + from, t, a.head_dim);
            const int64_t word = layout.token(block, head, offset);
            if constexpr (kWiden) path_key_words[i] = static_cast<const uint16_t*>(a.k_scales)[word];
            if (latent) continue;
            cache::copy_value(path_values + to, i % kStrip, static_cast<const Stored*>(a.v_cache) + from, t, a.head_dim);
            if constexpr (kWiden) path_value_words[i] = static_cast<const uint16_t*>(a.v_scales)[word];
        }
        return places;
    }

    // A tile for `count` consecutive rows, whose visible keys are `seen`. next: what to prefetch meanwhile.
    void walk_rows(const Places& places, const Places& next, const Factor* q, const uint64_t* seen, float* to,
                   int64_t count) {
        Unit<Format> unit;
        unit.head_dim = a.head_dim;
        unit.value_dim = a.value_dim;
        unit.scale = float(a.scale);
        unit.softcap = float(a.softcap);
        unit.bias_reach = int32_t(a.bias_reach);
        unit.key_scales = unit.value_scales = nullptr;
        alignas(64) float key_scales[kTile], value_scales[kTile];
        unit.fetch = rows <= kThinRows;
        unit.narrow = kWiden ? (cache::kNumbers<Stored> == 2 ? 2 : 1) : 0;
        if constexpr (kWiden) {
            const F32 scale = broadcast(unit.scale);
            for (int s = 0; s < kStrips; s++) {
                cache::read_scales<Stored>(key_scales + s * kStrip, places.key_words[s], scale);
                cache::read_scales<Stored>(value_scales + s * kStrip, places.value_words[s], broadcast(1.0f));
            }
            unit.key_scales = key_scales;
            unit.value_scales = value_scales;
            widen_tile(places, next);
        }
        // Numbers that are widened or gathered first are needed at the start of the next tile, so all of them are
        // prefetched during this one. Tile registers are too fast to fetch the values meanwhile.
        constexpr bool kNext = kWiden || Format::kRegisters;
        for (int s = 0; s < kStrips; s++) {
            unit.during_values[s] = reinterpret_cast<const char*>(kNext ? next.values[s] : next.keys[s]);
            unit.during_scores[s] = reinterpret_cast<const char*>(kNext || latent ? next.keys[s] : places.values[s]);
            if constexpr (kWiden) {
                unit.keys[s] = keys + s * kStrip * a.head_dim;
                unit.values[s] = values + s * kStrip * a.head_dim;
            } else {
                unit.keys[s] = places.keys[s];
                unit.values[s] = places.values[s];
            }
            if (latent) {
                cache::values_of_keys(values + s * kStrip * a.value_dim, unit.keys[s], a.value_dim);
                unit.values[s] = values + s * kStrip * a.value_dim;
            }
        }
        if constexpr (Format::kRegisters) {
            uint64_t any = 0, common = ~uint64_t(0);
            for (int64_t r = 0; r < count; r++) {
                any |= seen[r];
                common &= seen[r];
            }
            for (int s = 0; s < kStrips; s++) {
                bf16* strip = values + s * kStrip * a.value_dim;
                const unsigned bits = any >> (s * kStrip) & 0xffff;
                if (strip != unit.values[s] || bits != 0xffff)
                    Format::take_values(strip, unit.values[s], bits, a.value_dim);
            }
            unit.values[0] = values;
            // A weight of zero cancels a value only if the value is finite.
            if (any != common && !Format::all_finite(values, kTile * a.value_dim)) {
                for (int64_t r = 0; r < count; r++)
                    walk_rows(places, next, q + r * a.head_dim, seen + r, to + r * record_size, 1);
                return;
            }
        }
        for (int64_t r = 0; r < count; r += Format::kRows) {
            unit.biases = a.biases ? biases + (seen - visible) + r : nullptr;
            attend_rows(unit, q + r * a.head_dim, seen + r, to + r * record_size,
                        count - r < Format::kRows ? count - r : Format::kRows, r == 0);
        }
    }

    void widen_tile(const Places& places, const Places& next) const {
        for (int s = 0; s < kStrips; s++) {
            cache::widen_keys(keys + s * kStrip * a.head_dim, places.keys[s], places.key_words[s], a.head_dim);
        }
        for (int s = 0; s < kStrips; s++) {
            prefetch(next.key_words[s]);
            if (latent) continue;
            cache::widen_values(values + s * kStrip * a.head_dim, places.values[s], places.value_words[s], a.head_dim);
            prefetch(next.value_words[s]);
        }
    }
    const attention_args& a;
    const KvLayout layout;
    const int64_t group;
    const typename Format::Shapes shapes;
    bool latent;  // the values are columns of the keys
    const Stored* value_cache;
    const uint16_t* value_scales_of;
    int64_t record_size;
    float *records, *totals;
    Cache *keys, *values;  // a tile, where the numbers of the cache are rounded; values of latents
    Factor *factors, *sink_factors;
    // Of each row in the current tile.
    uint64_t* visible;
    Bias* biases;  // where scores have any
    // Of a tree: a tile of the cache as a node finds it, and the rows packed node by node.
    Stored *path_keys, *path_values;
    uint16_t *path_key_words, *path_value_words;
    Factor *path_factors, *sink_path_factors;

    const Task* task;
    int64_t rows;  // of one kv head
    Queries::Range range;
};

}  // namespace paged
}  // namespace
}  // namespace kvik

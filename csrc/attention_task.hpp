// A piece of attention for one thread: some queries of one sequence, some kv heads, some splits.
//
// Keys are taken in splits of 512 at absolute positions. Each split starts from nothing, and splits
// are combined in order. So a result does not depend on whether one thread walked all splits or many
// threads one each.
#pragma once

#include "attention_tile.hpp"
#include "kv_widen.hpp"
#include "team.hpp"

namespace kvik {
namespace {
namespace paged {

constexpr int64_t kSplit = 512;
// Up to so many rows of a kv head (queries x heads of its group), memory is what counts.
constexpr int64_t kThinRows = 16;

struct Task {
    Queries queries;
    int64_t first_token;  // of the sequence, in q and out
    const int32_t* table;
    int64_t query, num_queries, head, num_heads, split, num_splits;  // heads: kv heads
    // Where to leave the records, for a single split: row r of head h at
    // (h * part_rows + r) * Record::size. Null: combine the splits and write the output.
    float* parts;
    int64_t part_rows;
};

// total += part, where both are records; the total's weights are one sum, in their first lane.
inline void combine(float* total, float* part, int64_t head_dim) {
    float* total_largest = Record::largest(total, head_dim);
    const float part_largest = *Record::largest(part, head_dim);
    const float now = part_largest > *total_largest ? part_largest : *total_largest;
    float shrinks[kLanes];
    const F32 fall = all(*total_largest - base_of(now)), fall_part = all(part_largest - base_of(now));
    store(shrinks, weight_of(select(lanes_of(1), fall, fall_part)));
    const float shrink = shrinks[0], shrink_part = shrinks[1];
    *total_largest = now;
    float* total_sum = Record::weights(total, head_dim);
    *total_sum = *total_sum * shrink + sum(load(Record::weights(part, head_dim))) * shrink_part;
    for (int64_t d = 0; d < head_dim; d += kLanes)
        store(total + d, fma(load(part + d), all(shrink_part), mul(load(total + d), all(shrink))));
}

// The result of a row. A row that saw no key at all gives zeros.
inline void write_out(const attention_args& a, float* total, int64_t token, int64_t head) {
    const float sum = *Record::weights(total, a.head_dim);
    const int64_t at = token * a.out_stride + head * a.head_dim;
    const F32 divisor = all(sum == 0.0f ? 1.0f : sum);
    for (int64_t d = 0; d < a.head_dim; d += kLanes) {
        // + 0: a sum that underflowed to -0 may have met a masked key's +0 or not
        const F32 result = add(div(load(total + d), divisor), zero());
        if (a.dtype == kF32)
            store(static_cast<float*>(a.out) + at + d, result);
        else
            store(static_cast<bf16*>(a.out) + at + d, result);
    }
}

inline void read_query(const attention_args& a, int64_t at, bf16* to) { *to = static_cast<const bf16*>(a.q)[at]; }
inline void read_query(const attention_args& a, int64_t at, float* to) {
    *to = a.dtype == kF32 ? static_cast<const float*>(a.q)[at] : to_float(static_cast<const bf16*>(a.q)[at]);
}

// Runs tasks. Stored: what the cache holds; rounded numbers are widened to what the format computes with,
// tile by tile.
template <class Format, class Stored>
class Worker {
    using Cache = typename Format::Cache;
    using Factor = typename Format::Factor;
    static constexpr bool kWiden = cache::kScaled<Stored>;

public:
    // Bytes of scratch for tasks of so many rows, over all their heads.
    static int64_t scratch_bytes(const attention_args& a, int64_t rows) {
        return rows * (2 * Record::size(a.head_dim) * int64_t(sizeof(float)) + a.head_dim * int64_t(sizeof(Factor)) +
                       int64_t(sizeof(uint64_t))) +
               2 * kTile * a.head_dim * int64_t(sizeof(Cache)) + 64;
    }

    Worker(const attention_args& args, char* scratch, int64_t rows)
        : a(args), layout{a.kv_heads, a.head_dim, a.block_size}, group(a.heads / a.kv_heads) {
        record_size = Record::size(a.head_dim);
        records = reinterpret_cast<float*>(scratch);
        totals = records + rows * record_size;
        keys = reinterpret_cast<Cache*>(totals + rows * record_size);
        values = keys + kTile * a.head_dim;
        factors = reinterpret_cast<Factor*>(values + kTile * a.head_dim);
        visible = reinterpret_cast<uint64_t*>(factors + rows * a.head_dim);
    }

    void run(const Task& given) {
        task = &given;
        rows = task->num_queries * group;
        range = task->queries.range(task->query, task->query + task->num_queries);
        pack_queries();
        if (task->parts) {
            walk_split(task->split, task->parts + task->head * task->part_rows * record_size,
                       task->part_rows * record_size);
            return;
        }
        for (int64_t r = 0; r < task->num_heads * rows; r++) Record::reset(totals + r * record_size, a.head_dim);
        for (int64_t split = task->split; split < task->split + task->num_splits; split++) {
            walk_split(split, records, rows * record_size);
            for (int64_t r = 0; r < task->num_heads * rows; r++)
                combine(totals + r * record_size, records + r * record_size, a.head_dim);
        }
        for (int64_t h = 0; h < task->num_heads; h++)
            for (int64_t r = 0; r < rows; r++)
                write_out(a, totals + (h * rows + r) * record_size, task->first_token + task->query + r / group,
                          (task->head + h) * group + r % group);
    }

private:
    // Rows of a head are its queries times the heads of the group; each kRows of them are packed as the
    // scores want them: [head_dim / pair][rows][pair].
    void pack_queries() {
        constexpr int P = Format::kPair;
        for (int64_t h = 0; h < task->num_heads; h++)
            for (int64_t r = 0; r < rows; r++) {
                const int64_t first = r / kRows * kRows, width = rows - first < kRows ? rows - first : kRows;
                Factor* to = factors + (h * rows + first) * a.head_dim + (r - first) * P;
                const int64_t at = (task->first_token + task->query + r / group) * a.q_stride +
                                   ((task->head + h) * group + r % group) * a.head_dim;
                for (int64_t i = 0; i < a.head_dim / P; i++)
                    for (int p = 0; p < P; p++) read_query(a, at + i * P + p, to + i * width * P + p);
            }
    }

    // Where the strips of a tile are, for kv head 0. Strips that no query of the task sees are not
    // looked up, as their blocks may be gone or not given yet; they get the place of one that is.
    struct Strips {
        int64_t token[kStrips];
        unsigned present;
    };
    Strips find(int64_t tile) const {
        Strips strips{};
        int64_t any = 0;
        for (int s = kStrips - 1; s >= 0; s--) {
            const int64_t position = tile + s * kStrip;
            if (position >= range.end || position + kStrip <= range.first) continue;
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
            for (int64_t r = 0; r < rows; r++) Record::reset(to + h * head_stride + r * record_size, a.head_dim);
        int64_t tile = split * kSplit, end = tile + kSplit;
        if (tile < range.first) tile = range.first / kTile * kTile;
        if (end > range.end) end = range.end;
        if (tile >= end) return;
        Strips next = find(tile);
        for (; tile < end; tile += kTile) {
            const Strips strips = next;
            if (tile + kTile < end) next = find(tile + kTile);
            for (int64_t i = 0; i < task->num_queries; i++) {
                const uint64_t bits = task->queries.bits(task->query + i, tile);
                for (int64_t j = 0; j < group; j++) visible[i * group + j] = bits;
            }
            for (int64_t h = 0; h < task->num_heads; h++) {
                const bool last = h + 1 == task->num_heads;
                walk_rows(strips, task->head + h, last ? next : strips, last ? task->head : task->head + h + 1,
                          factors + h * rows * a.head_dim, to + h * head_stride);
            }
        }
    }

    const Stored* at(const void* cache, const Strips& strips, int s, int64_t head) const {
        const int64_t first = (strips.token[s] + head * a.block_size) * a.head_dim;
        return static_cast<const Stored*>(cache) + first / cache::kNumbers<Stored>;
    }

    void walk_rows(const Strips& strips, int64_t head, const Strips& next, int64_t next_head, const Factor* q,
                   float* to) {
        Unit<Format> unit;
        unit.head_dim = a.head_dim;
        unit.scale = float(a.scale);
        unit.key_scales = unit.value_scales = nullptr;
        alignas(64) float key_scales[kTile], value_scales[kTile];
        unit.fetch = rows <= kThinRows && !kWiden;
        if constexpr (kWiden) {
            const F32 scale = all(unit.scale);
            for (int s = 0; s < kStrips; s++) {
                const int64_t place = word_at(strips, s, head);
                cache::read_scales<Stored>(key_scales + s * kStrip, words(a.k_scales) + place, scale);
                cache::read_scales<Stored>(value_scales + s * kStrip, words(a.v_scales) + place, all(1.0f));
            }
            unit.key_scales = key_scales;
            unit.value_scales = value_scales;
            widen_tile(strips, head, next, next_head);
        }
        for (int s = 0; s < kStrips; s++) {
            unit.next_keys[s] = reinterpret_cast<const char*>(at(a.k_cache, next, s, next_head));
            if constexpr (kWiden) {
                unit.keys[s] = keys + s * kStrip * a.head_dim;
                unit.values[s] = values + s * kStrip * a.head_dim;
            } else {
                unit.keys[s] = at(a.k_cache, strips, s, head);
                unit.values[s] = at(a.v_cache, strips, s, head);
            }
        }
        for (int64_t r = 0; r < rows; r += kRows) {
            const Factor* block = q + r * a.head_dim;
            float* record = to + r * record_size;
            switch (rows - r) {
                case 1: attend_tile<Format, 1>(unit, block, visible + r, record, r == 0); break;
                case 2: attend_tile<Format, 2>(unit, block, visible + r, record, r == 0); break;
                case 3: attend_tile<Format, 3>(unit, block, visible + r, record, r == 0); break;
                default: attend_tile<Format, 4>(unit, block, visible + r, record, r == 0);
            }
        }
    }

    // Words of scale; of absent strips too, as they have the place of another one.
    int64_t word_at(const Strips& strips, int s, int64_t head) const { return strips.token[s] + head * a.block_size; }
    static const uint16_t* words(const void* scales) { return static_cast<const uint16_t*>(scales); }

    // Each strip while another one is fetched.
    void widen_tile(const Strips& strips, int64_t head, const Strips& next, int64_t next_head) const {
        for (int s = 0; s < kStrips; s++) {
            fetch(at(a.v_cache, strips, s, head));
            cache::widen_keys(keys + s * kStrip * a.head_dim, at(a.k_cache, strips, s, head),
                              words(a.k_scales) + word_at(strips, s, head), a.head_dim);
        }
        for (int s = 0; s < kStrips; s++) {
            fetch(at(a.k_cache, next, s, next_head));
            cache::widen_values(values + s * kStrip * a.head_dim, at(a.v_cache, strips, s, head),
                                words(a.v_scales) + word_at(strips, s, head), a.head_dim);
            prefetch(words(a.k_scales) + word_at(next, s, next_head));
            prefetch(words(a.v_scales) + word_at(next, s, next_head));
        }
    }
    void fetch(const Stored* strip) const {
        const int64_t bytes = kStrip * a.head_dim / cache::kNumbers<Stored>;
        for (int64_t i = 0; i < bytes; i += 64) prefetch(strip + i);
    }

    const attention_args& a;
    const KvLayout layout;
    const int64_t group;
    int64_t record_size;
    float *records, *totals;
    Cache *keys, *values;  // a tile of a cache of rounded numbers
    Factor* factors;
    uint64_t* visible;  // of each row in the current tile

    const Task* task;
    int64_t rows;  // of one kv head
    Queries::Range range;
};

}  // namespace paged
}  // namespace
}  // namespace kvik

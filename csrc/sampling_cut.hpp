// How many of its most likely tokens a row keeps: selection without a sort.
#pragma once

#include "logits.hpp"

namespace kvik {
namespace {

// Tokens by their rank (`ranked`: distinct integers, the most likely token has the largest) and weight.
struct Candidates {
    uint64_t* ranks;
    float* weights;
    int64_t count;

    // Without a branch, which would often be mispredicted. The arrays must always have room for one more.
    void add_if(bool wanted, const Candidates& from, int64_t i) {
        ranks[count] = from.ranks[i];
        weights[count] = from.weights[i];
        count += wanted;
    }
};

// A number as an integer of the same order: NaN before infinity before all others, 0 and -0 equal.
KVIK_INLINE uint32_t ordered(float value) {
    const float x = value + 0.0f;  // -0 becomes 0
    uint32_t order = bits_of(x);
    order ^= (0u - (order >> 31)) | 0x80000000u;  // no branch: signs are hard to predict
    return is_nan(x) ? 0xffffffffu : order;
}

// A number and its place as one integer, the larger the more likely: ties by ascending id.
KVIK_INLINE uint64_t ranked(float value, int64_t id) {
    return uint64_t(ordered(value)) << 32 | (0xffffffffu - uint32_t(id));
}
KVIK_INLINE int64_t id_of(uint64_t ranked) { return int64_t(0xffffffffu - uint32_t(ranked)); }

// The number passed to `ranked`.
float value_of(uint64_t rank) {
    const uint32_t order = uint32_t(rank >> 32);
    return float_of(order >> 31 ? order & 0x7fffffffu : ~order);
}

// The quantity that is added up until it reaches a target.
enum class Measure { kCount, kWeight };

// In descending order.
void sort_few(Candidates few) {
    for (int64_t i = 1; i < few.count; i++) {
        const uint64_t rank = few.ranks[i];
        const float weight = few.weights[i];
        int64_t at = i;
        for (; at > 0 && few.ranks[at - 1] < rank; at--) {
            few.ranks[at] = few.ranks[at - 1];
            few.weights[at] = few.weights[at - 1];
        }
        few.ranks[at] = rank;
        few.weights[at] = weight;
    }
}

// The rank down to which candidates must be taken, from the most likely one, until their number or weight
// reaches `target`; the lowest rank if they never do. spare: scratch for as many candidates.
//
// Ranks are sorted into buckets of equal width, one of which has the answer; its members are sorted into
// narrower buckets, until few are left. Ranks are distinct, so each round separates the least from the largest.
uint64_t lowest_kept(Candidates all, Candidates spare, Measure measure, double target) {
    constexpr int64_t kBuckets = 2048, kFew = 32;
    double sums[kBuckets];
    double above = 0;  // number or weight of the candidates that are certainly kept
    const auto measured = [&](float weight) { return measure == Measure::kCount ? 1.0 : double(weight); };
    while (all.count > kFew) {
        uint64_t least = all.ranks[0], most = all.ranks[0];
        for (int64_t i = 1; i < all.count; i++) {
            least = all.ranks[i] < least ? all.ranks[i] : least;
            most = all.ranks[i] > most ? all.ranks[i] : most;
        }
        int shift = 0;
        while ((most - least) >> shift >= kBuckets) shift++;
        int64_t bucket = int64_t((most - least) >> shift);
        for (int64_t i = 0; i <= bucket; i++) sums[i] = 0;
        for (int64_t i = 0; i < all.count; i++) sums[(all.ranks[i] - least) >> shift] += measured(all.weights[i]);
        for (; bucket > 0 && !(above + sums[bucket] >= target); bucket--) above += sums[bucket];
        spare.count = 0;
        for (int64_t i = 0; i < all.count; i++)
            spare.add_if(int64_t((all.ranks[i] - least) >> shift) == bucket, all, i);
        all = spare;  // from now on in place: kept candidates move forward
    }
    spare.count = 0;
    for (int64_t i = 0; i < all.count; i++) spare.add_if(true, all, i);
    sort_few(spare);
    for (int64_t i = 0; i < spare.count; i++) {
        above += measured(spare.weights[i]);
        if (above >= target) return spare.ranks[i];
    }
    return spare.count > 0 ? spare.ranks[spare.count - 1] : 0;
}

// Drops candidates of lower rank; the others stay in order.
void keep_down_to(Candidates& all, uint64_t lowest) {
    Candidates kept{all.ranks, all.weights, 0};
    for (int64_t i = 0; i < all.count; i++) kept.add_if(all.ranks[i] >= lowest, all, i);
    all = kept;
}

}  // namespace
}  // namespace kvik

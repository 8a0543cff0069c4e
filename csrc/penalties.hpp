// The changes that a request's rules make to its row of logits.
//
// Penalties for tokens that it has seen: these are few, so whole runs of the tables are skipped, and
// the lower bound is the time to read the tables' 5 bytes per token. A mask of the allowed tokens: the
// lower bound is the time to write the others.
#pragma once

#include <limits>

#include "arguments.hpp"
#include "share.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace kvik {
namespace {

constexpr int64_t kPenalizedPerThread = 16384;
constexpr int64_t kPassedOver = 64;  // tokens that are tested together
constexpr int64_t kWord = 32;        // tokens in a word of a mask
constexpr int64_t kMaskedWordsPerThread = 4096;

// Whether any of `kPassedOver` tokens was seen.
KVIK_INLINE bool any_seen(const uint8_t* in_prompt, const int32_t* counts) {
    uint8_t prompt = 0;
    uint32_t output = 0;
    for (int64_t i = 0; i < kPassedOver; i++) {
        prompt |= in_prompt[i];
        output |= uint32_t(counts[i]);
    }
    return prompt || output;
}

void penalize(const penalize_args& a, Team& team) {
    const auto* rows = static_cast<const int64_t*>(a.rows);
    const auto* seen = static_cast<const int64_t*>(a.seen);
    each_columns(team, a.count, a.vocab, kPenalizedPerThread, [&](int64_t i, int64_t begin, int64_t end) {
        float* x = static_cast<float*>(a.logits) + rows[i] * a.logits_stride;
        const auto* in_prompt = static_cast<const uint8_t*>(a.in_prompt) + seen[i] * a.seen_stride;
        const auto* counts = static_cast<const int32_t*>(a.counts) + seen[i] * a.seen_stride;
        const float repetition = static_cast<const float*>(a.repetition)[i];
        const float frequency = static_cast<const float*>(a.frequency)[i];
        const float presence = static_cast<const float*>(a.presence)[i];
        for (int64_t first = begin; first < end; first += kPassedOver) {
            const int64_t last = first + kPassedOver < end ? first + kPassedOver : end;
            if (last - first == kPassedOver && !any_seen(in_prompt + first, counts + first)) continue;
            for (int64_t id = first; id < last; id++) {
                if (!in_prompt[id] && !counts[id]) continue;
                float y = x[id];
                y = y > 0 ? y / repetition : y * repetition;
                if (counts[id]) y = y - frequency * float(counts[id]) - presence;
                x[id] = y;
            }
        }
    });
}

void mask(const mask_args& a, Team& team) {
    const auto* rows = static_cast<const int64_t*>(a.rows);
    const int64_t used = (a.vocab + kWord - 1) / kWord;
    each_columns(team, a.count, used, kMaskedWordsPerThread, [&](int64_t i, int64_t begin, int64_t end) {
        float* x = static_cast<float*>(a.logits) + rows[i] * a.logits_stride;
        const auto* words = static_cast<const uint32_t*>(a.words) + i * a.words_stride;
        for (int64_t w = begin; w < end; w++) {
            const uint32_t word = words[w];
            if (word == ~uint32_t(0)) continue;
            const int64_t first = w * kWord;
            const int64_t last = first + kWord < a.vocab ? first + kWord : a.vocab;
            for (int64_t id = first; id < last; id++) {
                if (!(word >> (id - first) & 1)) x[id] = -std::numeric_limits<float>::infinity();
            }
        }
    });
}

}  // namespace
}  // namespace kvik

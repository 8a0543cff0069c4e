// One token for each row of logits, by inverse CDF among the tokens that the row's rules keep; and the
// probability of each token in such draws.
#pragma once

#include "arguments.hpp"
#include "sampling_kept.hpp"

namespace kvik {
namespace {

// A place in a row of weights: the first at which their running sum exceeds `point`.
struct Place {
    int64_t chunk;
    double before;  // sum of the chunks before
    double point;
};

Place chunk_of(const double* sums, int64_t chunks, double uniform) {
    Place place{0, 0, uniform * sum_of_chunks(sums, chunks)};
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        if (!(sums[chunk] > 0)) continue;
        place.chunk = chunk;
        place.before = sum;
        sum += sums[chunk];
        if (sum > place.point) break;
    }
    return place;
}

// The place within the chunk. Rounding may leave the chunk's end below the point: then the last with any weight.
int64_t place_in(const float* weights, int64_t count, const Place& place) {
    double sum = place.before;
    for (int64_t i = 0; i < count; i++) {
        sum += double(weights[i]);
        if (sum > place.point) return i;
    }
    while (count > 1 && !(weights[count - 1] > 0)) count--;
    return count - 1;
}

// A token of the candidates.
int64_t draw_candidate(const DrawScratch& scratch, double uniform) {
    const Candidates& found = scratch.found;
    const Place place = chunk_of(scratch.sums, sum_candidates(scratch), uniform);
    const int64_t first = place.chunk * kDrawChunk;
    const int64_t last = end_of_chunk(place.chunk, found.count);
    return last > first ? id_of(found.ranks[first + place_in(found.weights + first, last - first, place)]) : 0;
}

int64_t draw_token(const DrawnRow& row, const DrawScratch& scratch, double uniform) {
    alignas(64) float weights[kDrawChunk];
    const Place place = chunk_of(scratch.sums, row.chunks(), uniform);
    row.weigh_chunk(place.chunk, weights);
    return place.chunk * kDrawChunk + place_in(weights, row.in_chunk(place.chunk), place);
}

void draw(const draw_args& a, Team& team) {
    each_drawn_row(a, team, [&](DrawnRow row, int64_t index, DrawScratch& scratch, Team& helpers) {
        const double uniform = static_cast<const double*>(a.uniforms)[index];
        find_kept(row, scratch, helpers);
        static_cast<int64_t*>(a.ids)[index] =
            row.truncated() ? draw_candidate(scratch, uniform) : draw_token(row, scratch, uniform);
    });
}

// ------------------------------------------------------------------------------------ the shares

// A row that keeps every token.
void share_tokens(const DrawnRow& row, const DrawScratch& scratch, Team& team, float* shares) {
    const F32 total = broadcast(float(sum_of_chunks(scratch.sums, row.chunks())));
    each_chunk(team, row.chunks(), [&](int64_t chunk) {
        alignas(64) float weights[kDrawChunk];
        const int64_t count = row.in_chunk(chunk);
        float* to = shares + chunk * kDrawChunk;
        row.weigh_chunk(chunk, weights);
        each_vector(0, count, [&](int64_t i, auto n) KVIK_INLINED { store(to + i, div(load(weights + i), total), n); });
    });
}

void share_candidates(const DrawnRow& row, const DrawScratch& scratch, Team& team, float* shares) {
    each_chunk(team, row.chunks(), [&](int64_t chunk) {
        std::memset(shares + chunk * kDrawChunk, 0, size_t(row.in_chunk(chunk)) * sizeof(float));
    });
    const Candidates& found = scratch.found;
    const float total = float(sum_of_chunks(scratch.sums, sum_candidates(scratch)));
    for (int64_t i = 0; i < found.count; i++) shares[id_of(found.ranks[i])] = found.weights[i] / total;
}

void probabilities(const probabilities_args& a, Team& team) {
    each_drawn_row(a, team, [&](DrawnRow row, int64_t index, DrawScratch& scratch, Team& helpers) {
        float* shares = static_cast<float*>(a.shares) + index * a.shares_stride;
        find_kept(row, scratch, helpers);
        row.truncated() ? share_candidates(row, scratch, helpers, shares)
                        : share_tokens(row, scratch, helpers, shares);
    });
}

}  // namespace
}  // namespace kvik

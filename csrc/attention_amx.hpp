// Attends to a tile of 64 keys with the AMX tile registers: always 16 rows at a time, so that here too
// the result of a row does not depend on the other rows.
//
// A strip of 16 keys is a right operand as the cache stores it: one instruction multiplies 32 columns of q with
// those of 16 keys. Values are gathered first, so that an instruction takes 32 keys; values that no row sees
// become zero in the gathering, and values that some row sees have been written in this step or before.
#pragma once

#include "amx.hpp"
#include "attention_tile.hpp"

namespace kvik {
namespace {
namespace paged {

// bf16 in the cache, q and weights: rows of q and of weights are left operands.
struct RegisterPairs {
    using Cache = bf16;
    using Factor = bf16;
    static constexpr int kPair = 2;
    static constexpr int kRows = 16;
    static constexpr bool kRegisters = true;

    static constexpr int kSums = 0, kLeft = 4, kRight = 5, kLastLeft = 6, kLastRight = 7;
    static constexpr int kSteps = 16;  // pairs of columns or keys in a product

    // sums += left x right; rows of the operands are `stride` bytes apart
    template <int kTo, int kX, int kW>
    static void add(const bf16* right, int64_t stride) {
        tile_load<kW>(right, stride);
        tile_dot_bf16<kTo, kX, kW>();
    }

    // The shapes of this thread's registers: for whole products, and for the last one of a row of q.
    class Shapes {
    public:
        explicit Shapes(int64_t head_dim) {
            TileConfig config = {};
            config.palette = 1;
            const int64_t rest = head_dim / kPair % kSteps;
            for (int tile = 0; tile < 8; tile++) {
                config.rows[tile] = uint8_t(tile == kLastRight && rest ? rest : kRows);
                config.row_bytes[tile] = uint16_t(tile == kLastLeft && rest ? 4 * rest : 64);
            }
            tile_config(config);
        }
        Shapes(const Shapes&) = delete;
        Shapes& operator=(const Shapes&) = delete;
        ~Shapes() { tile_release(); }
    };

    // The values of a strip, in place or to another one: [8 pairs of keys][value_dim][2].
    // Keys that no row sees, whose bits in `seen` are 0, become zero.
    static void take_values(bf16* to, const bf16* from, unsigned seen, int64_t value_dim) {
        for (int t = 0; t < kStrip; t += 2) {
            const unsigned bits = seen >> t;
            const I32 mask = ibroadcast(int32_t((bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u)));
            for (int64_t i = 0; i < 2 * value_dim; i += 2 * kLanes, to += 2 * kLanes, from += 2 * kLanes)
                istore(to, iand(iload(from), mask));
        }
    }
    static bool all_finite(const bf16* values, int64_t count) {
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        __mmask32 found = 0;
        for (int64_t i = 0; i < count; i += 32)
            found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(values + i), exponent), exponent);
        return found == 0;
    }
};

// Prefetches the strips of the next tile during the work on this one, a line of each of four strips at a time.
// All at once would stall until memory has answered.
class Ahead {
public:
    Ahead(const Unit<RegisterPairs>& unit, bool fetch)
        : unit_(unit), strip_lines_((unit.head_dim * kStrip * 2 >> unit.narrow) / 64),
          lines_(fetch ? 2 * strip_lines_ : 0) {}
    // Lines for one of `parts` parts of the work.
    int64_t share(int64_t parts) const { return lines_ / parts; }
    void fetch(int64_t lines) {
        for (; lines > 0 && line_ < lines_; lines--, line_++) {
            const bool keys = line_ < strip_lines_;
            const char* const* wanted = keys ? unit_.during_scores : unit_.during_values;
            const int64_t at = (keys ? line_ : line_ - strip_lines_) * 64;
            for (int s = 0; s < kStrips; s++) prefetch_near(wanted[s] + at);
        }
    }

private:
    const Unit<RegisterPairs>& unit_;
    const int64_t strip_lines_, lines_;
    int64_t line_ = 0;
};

// q [16][head_dim]; scores [16][kTile]
KVIK_INLINE void register_scores(const Unit<RegisterPairs>& unit, const bf16* q, float (*scores)[kTile],
                                 Ahead& ahead) {
    using F = RegisterPairs;
    static_assert(kStrips == 4);
    constexpr int64_t kBytes = F::kSteps * kStrip * 4;  // of a strip in a product
    const int64_t stride = unit.head_dim * 2, whole = unit.head_dim / (2 * F::kSteps);
    const int64_t lines = ahead.share(4 * (whole ? whole : 1));
    const bf16 *k0 = unit.keys[0], *k1 = unit.keys[1], *k2 = unit.keys[2], *k3 = unit.keys[3];
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t i = 0; i < whole; i++) {
        const int64_t at = i * kBytes / 2;
        tile_load<F::kLeft>(q + i * 2 * F::kSteps, stride);
        F::add<0, F::kLeft, F::kRight>(k0 + at, 64);
        F::add<1, F::kLeft, F::kRight>(k1 + at, 64);
        F::add<2, F::kLeft, F::kRight>(k2 + at, 64);
        F::add<3, F::kLeft, F::kRight>(k3 + at, 64);
        ahead.fetch(lines);
    }
    const int64_t done = whole * 2 * F::kSteps;
    if (done < unit.head_dim) {
        const int64_t at = whole * kBytes / 2;
        tile_load<F::kLastLeft>(q + done, stride);
        F::add<0, F::kLastLeft, F::kLastRight>(k0 + at, 64);
        F::add<1, F::kLastLeft, F::kLastRight>(k1 + at, 64);
        F::add<2, F::kLastLeft, F::kLastRight>(k2 + at, 64);
        F::add<3, F::kLastLeft, F::kLastRight>(k3 + at, 64);
    }
    tile_store<0>(scores[0], kTile * 4);
    tile_store<1>(scores[0] + kStrip, kTile * 4);
    tile_store<2>(scores[0] + 2 * kStrip, kTile * 4);
    tile_store<3>(scores[0] + 3 * kStrip, kTile * 4);
}

// sums [16][64]: N times 16 columns of the values from `values` on, [32 pairs of keys][value_dim][2].
// halves: bit h says whether some row sees one of the keys [32 h, 32 h + 32).
template <int N>
KVIK_INLINE void register_values(const bf16* values, int64_t value_dim, const bf16 (*weights)[kTile], unsigned halves,
                                 float (*sums)[kTile]) {
    using F = RegisterPairs;
    tile_zero<0>();
    if constexpr (N > 1) tile_zero<1>();
    if constexpr (N > 2) tile_zero<2>();
    if constexpr (N > 3) tile_zero<3>();
    for (int h = 0; h < 2; h++) {
        if (!(halves >> h & 1)) continue;
        const bf16* right = values + h * 2 * F::kSteps * value_dim;
        tile_load<F::kLeft>(weights[0] + h * 2 * F::kSteps, kTile * 2);
        F::add<0, F::kLeft, F::kRight>(right, value_dim * 4);
        if constexpr (N > 1) F::add<1, F::kLeft, F::kRight>(right + 32, value_dim * 4);
        if constexpr (N > 2) F::add<2, F::kLeft, F::kRight>(right + 64, value_dim * 4);
        if constexpr (N > 3) F::add<3, F::kLeft, F::kRight>(right + 96, value_dim * 4);
    }
    tile_store<0>(sums[0], kTile * 4);
    if constexpr (N > 1) tile_store<1>(sums[0] + 16, kTile * 4);
    if constexpr (N > 2) tile_store<2>(sums[0] + 32, kTile * 4);
    if constexpr (N > 3) tile_store<3>(sums[0] + 48, kTile * 4);
}

// A tile for up to 16 rows; unit.values: those of four strips, one after another.
void attend_rows(const Unit<RegisterPairs>& unit, const bf16* q, const uint64_t* visible, float* records, int64_t rows,
                 bool first) {
    uint64_t any = 0;
    for (int64_t r = 0; r < rows; r++) any |= visible[r];
    if (!any) return;
    Ahead ahead(unit, unit.fetch && first);
    const unsigned halves = (uint32_t(any) ? 1 : 0) | (any >> 32 ? 2 : 0);
    alignas(64) float scores[RegisterPairs::kRows][kTile];
    alignas(64) bf16 weights[RegisterPairs::kRows][kTile];
    float shrink[RegisterPairs::kRows];
    const int64_t stride = Record::size(unit.value_dim);
    register_scores(unit, q, scores, ahead);
    ahead.fetch(ahead.share(4));
    if (unit.adjusts()) adjust_scores(unit, scores, rows);
    for (int64_t r = 0; r < rows; r += paged::kRows) {
        float* record = records + r * stride;
        switch (rows - r) {
            case 1: soften<RegisterPairs, 1>(unit, scores + r, weights + r, visible + r, record, shrink + r); break;
            case 2: soften<RegisterPairs, 2>(unit, scores + r, weights + r, visible + r, record, shrink + r); break;
            case 3: soften<RegisterPairs, 3>(unit, scores + r, weights + r, visible + r, record, shrink + r); break;
            default: soften<RegisterPairs, 4>(unit, scores + r, weights + r, visible + r, record, shrink + r);
        }
    }
    for (int64_t column = 0; column < unit.value_dim; column += kTile) {
        const int64_t left = unit.value_dim - column, columns = left < kTile ? left : kTile;
        const bf16* values = unit.values[0] + column * 2;
        ahead.fetch(ahead.share(2) * columns / unit.value_dim + 1);
        switch (columns / kStrip) {
            case 1: register_values<1>(values, unit.value_dim, weights, halves, scores); break;
            case 2: register_values<2>(values, unit.value_dim, weights, halves, scores); break;
            case 3: register_values<3>(values, unit.value_dim, weights, halves, scores); break;
            default: register_values<4>(values, unit.value_dim, weights, halves, scores);
        }
        for (int64_t r = 0; r < rows; r++) {
            float* sums = records + r * stride + column;
            for (int64_t i = 0; i < columns; i += kLanes)
                store(sums + i, fma(load(sums + i), broadcast(shrink[r]), load(scores[r] + i)));
        }
    }
}

}  // namespace paged
}  // namespace
}  // namespace kvik

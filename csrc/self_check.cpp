#include "self_check.hpp"

#include <cmath>
#include <vector>

namespace kvik {
namespace {

// Odd sizes: the last tile of outputs, the last step of inputs and the last rows are partly filled.
constexpr int64_t kInputs = 203, kOutputs = 45;
constexpr float kTolerance = 1e-2f;  // for bf16

template <class Arguments>
void run(Kernel kernel, const Arguments& arguments) {
    TeamShared* shared = make_team();
    Team team = gather(shared, 1);
    kernel(reinterpret_cast<const Word*>(&arguments), team);
    free_team(shared);
}

// Numbers of both signs, without a pattern that could cancel errors in sums.
std::vector<float> numbers(int64_t count, int64_t seed) {
    std::vector<float> some;
    for (int64_t i = 0; i < count; i++) some.push_back(float((i * i + seed * i + 3 * seed) % 251 - 125) / 128);
    return some;
}

struct Matrix {
    int64_t kind;
    std::vector<char> weight;
    std::vector<float> scales;
};

// Packed by `trusted`: the layout is the same for all instruction sets.
Matrix random_matrix(int64_t kind, const Table& trusted) {
    Matrix m = {kind, std::vector<char>(kInputs * 256), std::vector<float>(64)};
    std::vector<float> floats = numbers(kOutputs * kInputs, 7), scales = numbers(kOutputs, 5);
    std::vector<int8_t> integers;
    for (float value : floats) integers.push_back(int8_t(value * 128));
    pack_matrix_args pack = {};
    pack.values = kind == kMatrixI8 ? static_cast<void*>(integers.data()) : floats.data();
    pack.values_stride = pack.inputs = kInputs;
    pack.scales = scales.data();
    pack.count = pack.outputs = kOutputs;
    pack.kind = kind;
    pack.weight = m.weight.data();
    pack.packed_scales = m.scales.data();
    run(trusted.pack_matrix, pack);
    return m;
}

std::vector<float> product(const Table& table, Matrix& m, int64_t rows) {
    std::vector<float> x = numbers(rows * kInputs, 11), y(size_t(rows * kOutputs), NAN);
    linear_args a = {};
    a.x = x.data();
    a.x_stride = a.inputs = kInputs;
    a.rows = rows;
    a.weight = m.weight.data();
    a.scales = m.scales.data();
    a.kind = m.kind;
    a.outputs = a.y_stride = kOutputs;
    a.y = y.data();
    run(table.linear, a);
    return y;
}

}  // namespace

bool products_agree(const Table& table, const Table& trusted) {
    for (int64_t kind : {kMatrixBF16, kMatrixI8}) {
        Matrix m = random_matrix(kind, trusted);
        for (int64_t rows : {1, 17}) {
            const std::vector<float> expected = product(trusted, m, rows), got = product(table, m, rows);
            for (size_t i = 0; i < got.size(); i++) {
                const float tolerance = kind == kMatrixI8 ? 0.0f : kTolerance * (1.0f + std::fabs(expected[i]));
                if (!(std::fabs(got[i] - expected[i]) <= tolerance)) return false;
            }
        }
    }
    return true;
}

}  // namespace kvik

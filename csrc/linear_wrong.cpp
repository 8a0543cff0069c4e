// Products with one wrong number for one kind of matrix, to test that the self-check rejects them.
#include "table.hpp"

namespace kvik {

extern const TiledKernels kernels_amx_emulated;
extern const Kernel linear_wrong_bf16, linear_wrong_i8;

namespace {

template <MatrixKind kKind>
void linear(const Word* words, Team& team) {
    kernels_amx_emulated.linear(words, team);
    const auto& a = *reinterpret_cast<const linear_args*>(words);
    if (a.kind == kKind) static_cast<float*>(a.y)[(a.rows - 1) * a.y_stride + a.outputs / 2] += 0.5f;
}

}  // namespace

const Kernel linear_wrong_bf16 = linear<kMatrixBF16>;
const Kernel linear_wrong_i8 = linear<kMatrixI8>;

}  // namespace kvik

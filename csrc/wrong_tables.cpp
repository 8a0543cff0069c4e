// Tables that are wrong in one number of one kind of product, to test that the self-check rejects them.
#include "table.hpp"

namespace kvik {

extern const Table table_amx_emulated, table_wrong_bf16, table_wrong_i8;

namespace {

template <MatrixKind kKind>
void linear(const Word* words, Team& team) {
    table_amx_emulated.linear(words, team);
    const auto& a = *reinterpret_cast<const linear_args*>(words);
    if (a.kind == kKind) static_cast<float*>(a.y)[(a.rows - 1) * a.y_stride + a.outputs / 2] += 0.5f;
}

Table with_linear(const char* name, Kernel kernel) {
    Table table = table_amx_emulated;
    table.name = name;
    table.linear = kernel;
    return table;
}

}  // namespace

const Table table_wrong_bf16 = with_linear("wrong_bf16", linear<kMatrixBF16>);
const Table table_wrong_i8 = with_linear("wrong_i8", linear<kMatrixI8>);

}  // namespace kvik

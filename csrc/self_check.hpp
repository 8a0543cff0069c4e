// Checks that the products of an instruction set are correct on this machine before they are used.
#pragma once

#include "table.hpp"

namespace kvik {

// A small product of bf16 and one of int8, for one row and for several, compared with those of `trusted`.
bool products_agree(const Table& table, const Table& trusted);

}  // namespace kvik

// Where the processes of a group meet between two kernels, so that each finds what the others have written.
#pragma once

#include "arguments.hpp"
#include "group.hpp"
#include "team.hpp"

namespace kvik {
namespace {

void exchange(const exchange_args& a, Team&) { meet(*static_cast<Meeting*>(a.meeting), int(a.rank)); }

}  // namespace
}  // namespace kvik

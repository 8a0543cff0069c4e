// How many threads a team has while other processes want the cores too.
#pragma once

#include <algorithm>

#include "team.hpp"

namespace kvik {

// Shrinks a team whose runs take longer than one thread fewer would have taken, and tries the larger one
// again later. What trials lose is bounded: 1 / kRepay of the time between them. It has no clock: it is
// told what each run took, so equal runs give equal sizes.
class TeamSize {
public:
    explicit TeamSize(int most) : most_(most), working_(most) {}

    int working() const { return working_; }

    // After each run on `working` threads.
    void ran(const TeamTimes& times) {
        const double taken = double(times.nanoseconds);
        if (working_ > 1 && times.offered > 0) {
            runs_++;
            taken_ += taken;
            fewer_ += taken_alone(times) / (working_ - 1);
            if (runs_ < kRuns || taken_ < kWindow) return;
            if (fewer_ < kWorth * taken_) {
                owed_ = kRepay * (taken_ - fewer_);
                return change_to(working_ - 1);
            }
            taken_ /= 2;
            fewer_ /= 2;
        }
        owed_ -= taken;
        if (working_ < most_ && owed_ <= 0) change_to(working_ + 1);
    }

private:
    // A size is judged by this much time and this many runs: in less, one slice of time that the system gives
    // to another process decides.
    static constexpr double kWindow = 50e6;  // nanoseconds
    static constexpr int kRuns = 2;
    static constexpr double kWorth = 0.97;  // of the time taken, that one thread fewer must take at least
    static constexpr double kRepay = 32;

    // The caller's busy time, had it drawn all pieces. It counts what the caller did outside of loops as if
    // others had had a part in it, and memory as slow as when all read it: too much, so a team that is
    // worth nothing is shrunk late, and one that is worth something stays.
    static double taken_alone(const TeamTimes& times) {
        const double busy = double(times.nanoseconds - times.waited);
        return busy * double(times.offered) / std::max(0.5, double(times.drawn));
    }

    void change_to(int working) {
        working_ = working;
        runs_ = 0;
        taken_ = fewer_ = 0;
    }

    int most_, working_;
    int runs_ = 0;                  // at this size
    double taken_ = 0, fewer_ = 0;  // nanoseconds: of the last runs, and what one thread fewer would have taken
    double owed_ = 0;               // nanoseconds to work before the next trial
};

}  // namespace kvik

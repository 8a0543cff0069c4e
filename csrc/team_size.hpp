// The number of threads of a team while other processes use the cores too.
#pragma once

#include <algorithm>

#include "team.hpp"

namespace kvik {

// Shrinks a team whose runs take longer than with one thread fewer, and tries the larger team
// again later. The loss from trials is at most 1 / kRepay of the time between them. It reads no clock: the
// caller passes the time of each run, so equal runs give equal sizes.
class TeamSize {
public:
    explicit TeamSize(int most) : most_(most), working_(most) {}

    int working() const { return working_; }

    // To be called after each run on `working` threads.
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
    // A size is judged over at least this much time and this many runs: in less, a single time slice of
    // another process would decide.
    static constexpr double kWindow = 50e6;  // nanoseconds
    static constexpr int kRuns = 2;
    static constexpr double kWorth = 0.97;  // shrink if one thread fewer takes less than this share of the time
    static constexpr double kRepay = 32;

    // The caller's busy time if it had taken all tasks. This is an overestimate: it treats the caller's work outside
    // of loops as shared with others, and memory as slow as when all threads read it. So a useless
    // team is shrunk late, and a useful one stays.
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
    double taken_ = 0, fewer_ = 0;  // nanoseconds of the last runs, as measured and with one thread fewer
    double owed_ = 0;               // nanoseconds to work before the next trial
};

}  // namespace kvik

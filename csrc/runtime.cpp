#include "runtime.hpp"

#include <algorithm>
#include <chrono>

namespace kvik {

void Tape::append(int kernel, const std::vector<Word>& words, const std::vector<Input>& inputs) {
    const auto start = uint32_t(words_.size());
    calls_.push_back(kernel);
    starts_.push_back(start);
    words_.insert(words_.end(), words.begin(), words.end());
    for (const Input& input : inputs) {
        inputs_.push_back({start + input.word, input.input});
        num_inputs_ = std::max<size_t>(num_inputs_, input.input + 1);
    }
}

void Runtime::run(int kernel, const std::vector<Word>& words) {
    Team team = gather(team_, working());
    kernel_of(table_, kernel)(words.data(), team);
}

void Runtime::replay(Tape& tape, const std::vector<Word>& inputs, int64_t* nanoseconds) {
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point before, Clock::time_point after) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(after - before).count();
    };
    for (const auto& input : tape.inputs_) tape.words_[input.word] = inputs[input.input];
    Team team = gather(team_, std::min(working(), limit_));
    const auto begin = Clock::now();
    auto before = begin;
    for (size_t i = 0; i < tape.calls_.size(); i++) {
        kernel_of(table_, tape.calls_[i])(tape.words_.data() + tape.starts_[i], team);
        if (!nanoseconds) continue;
        const auto after = Clock::now();
        nanoseconds[i] = since(before, after);
        before = after;
    }
    if (!adapt_ || team.size != working()) return;
    TeamTimes times = times_of(team_);
    times.nanoseconds = since(begin, Clock::now());
    size_.ran(times);
}

}  // namespace kvik

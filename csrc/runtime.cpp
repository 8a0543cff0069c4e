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
    struct Context {
        Kernel kernel;
        const Word* words;
    } context{kernel_of(table_, kernel), words.data()};
    run_team(
        team_, threads_,
        [](void* c, Team& team) {
            const auto& context = *static_cast<Context*>(c);
            context.kernel(context.words, team);
        },
        &context);
}

void Runtime::replay(Tape& tape, const std::vector<Word>& inputs, int64_t* nanoseconds) {
    for (const auto& input : tape.inputs_) tape.words_[input.word] = inputs[input.input];
    struct Context {
        const Table& table;
        const Tape& tape;
        int64_t* nanoseconds;
    } context{table_, tape, nanoseconds};
    run_team(
        team_, threads_,
        [](void* c, Team& team) {
            using Clock = std::chrono::steady_clock;
            const auto& [table, tape, nanoseconds] = *static_cast<Context*>(c);
            const bool timed = nanoseconds && team.rank == 0;
            auto before = timed ? Clock::now() : Clock::time_point();
            for (size_t i = 0; i < tape.calls_.size(); i++) {
                kernel_of(table, tape.calls_[i])(tape.words_.data() + tape.starts_[i], team);
                barrier(team);
                if (timed) {
                    const auto after = Clock::now();
                    nanoseconds[i] =
                        std::chrono::duration_cast<std::chrono::nanoseconds>(after - before).count();
                    before = after;
                }
            }
        },
        &context);
}

}  // namespace kvik

// Runs kernels: one at a time, or a tape of them in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "table.hpp"
#include "team_size.hpp"

namespace kvik {

// The instruction sets that were compiled in and run on this machine, best first; and those
// that failed the self-check and are not used. Detected at the first call.
struct Tables {
    std::vector<const Table*> available, rejected;
};
const Tables& tables();

// A recorded sequence of kernel calls. Some of the words are inputs, filled in at each replay.
class Tape {
public:
    struct Input {
        uint32_t word;   // position among the words of the tape
        uint32_t input;  // index into the inputs of a replay
    };

    void append(int kernel, const std::vector<Word>& words, const std::vector<Input>& inputs);
    size_t num_calls() const { return calls_.size(); }
    size_t num_inputs() const { return num_inputs_; }
    const std::vector<int>& calls() const { return calls_; }

private:
    friend class Runtime;
    std::vector<int> calls_;         // kernel ids
    std::vector<uint32_t> starts_;   // first word of each call
    std::vector<Word> words_;
    std::vector<Input> inputs_;
    size_t num_inputs_ = 0;
};

// A table and a team. Not thread-safe.
class Runtime {
public:
    // adapt: replays run on fewer threads while other processes use the cores.
    Runtime(const Table& table, int threads, bool adapt = false)
        : table_(table), adapt_(adapt), size_(threads), limit_(threads), team_(make_team()) {}
    ~Runtime() { free_team(team_); }
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    int working() const { return size_.working(); }
    // The next replays run on at most this many threads.
    void limit(int threads) { limit_ = threads; }

    void run(int kernel, const std::vector<Word>& words);
    // `nanoseconds`: null, or room for the time of each call.
    void replay(Tape& tape, const std::vector<Word>& inputs, int64_t* nanoseconds = nullptr);

private:
    const Table& table_;
    bool adapt_;
    TeamSize size_;
    int limit_;
    TeamShared* team_;
};

}  // namespace kvik

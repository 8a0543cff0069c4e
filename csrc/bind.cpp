// The Python bindings: runtimes, tapes, memory. Words are passed as plain numbers; callers check them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "checksum.hpp"
#include "group.hpp"
#include "memory.hpp"
#include "runtime.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvik;

namespace {

struct Signature {
    const char* name;
    std::vector<std::pair<std::string, char>> arguments;  // name; p, i or f
};

const std::vector<Signature>& signatures() {
#define KVIK_P(name) {#name, 'p'},
#define KVIK_I(name) {#name, 'i'},
#define KVIK_F(name) {#name, 'f'},
#define KVIK_SIGNATURE(kernel) {#kernel, {KVIK_ARGS_##kernel(KVIK_P, KVIK_I, KVIK_F)}},
    static const std::vector<Signature> all = {KVIK_KERNELS(KVIK_SIGNATURE)};
    return all;
}

// Integers stay integers and floats stay floats: a float where a kernel reads an integer would be garbage.
std::vector<Word> words_of(int kernel, const nb::sequence& values) {
    if (kernel < 0 || kernel >= kNumKernels) throw std::invalid_argument("no such kernel");
    const auto& arguments = signatures()[size_t(kernel)].arguments;
    if (nb::len(values) != arguments.size())
        throw std::invalid_argument(std::string(signatures()[size_t(kernel)].name) + ": wrong number of arguments");
    std::vector<Word> words(arguments.size());
    size_t i = 0;
    for (nb::handle value : values) {
        if (arguments[i].second == 'f')
            words[i].f = nb::cast<double>(value);
        else
            words[i].i = nb::cast<int64_t>(value);
        i++;
    }
    return words;
}

std::vector<Word> inputs_of(const Tape& tape, const std::vector<int64_t>& values) {
    if (values.size() < tape.num_inputs()) throw std::invalid_argument("too few inputs");
    std::vector<Word> inputs;
    for (int64_t value : values) inputs.push_back({.i = value});
    return inputs;
}

const Table& table_named(const std::string& isa) {
    for (const Table* table : tables().available)
        if (isa == table->name) return *table;
    throw std::invalid_argument("this machine or build has no kernels for " + isa);
}

std::vector<std::string> names_of(const std::vector<const Table*>& some) {
    std::vector<std::string> names;
    for (const Table* table : some) names.push_back(table->name);
    return names;
}

template <int Dims>
using Int64s = nb::ndarray<const int64_t, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

}  // namespace

NB_MODULE(_native, m) {
    // An engine may live until the process exits, when Python does not clean up: that is not a leak.
    nb::set_leak_warnings(false);
    m.def("instruction_sets", [] { return names_of(tables().available); });
    m.def("rejected_instruction_sets", [] { return names_of(tables().rejected); });
    m.def("kernels", [] {
        std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>> out;
        for (const auto& s : signatures()) {
            out.emplace_back(s.name, std::vector<std::pair<std::string, std::string>>());
            for (const auto& [name, kind] : s.arguments)
                out.back().second.emplace_back(name, std::string(1, kind));
        }
        return out;
    });
    m.def(
        "allocate",
        [](size_t bytes, bool huge) {
            void* data = allocate_pages(bytes, huge);
            struct Owner {
                void* data;
                size_t bytes;
            };
            nb::capsule owner(new Owner{data, bytes}, [](void* p) noexcept {
                auto* owner = static_cast<Owner*>(p);
                free_pages(owner->data, owner->bytes);
                delete owner;
            });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes}, owner);
        },
        "bytes"_a, "huge"_a);
    m.def("release_freed", &release_freed);
    m.def("has_crc32", &has_crc32);
    m.def(
        "crc32",
        [](const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& bytes, uint32_t start,
           bool wide) {
            nb::gil_scoped_release release;
            return crc32(bytes.data(), bytes.shape(0), start, wide);
        },
        "bytes"_a, "start"_a, "wide"_a = true);
    m.def(
        "copy_pages",
        [](const Int64s<2>& parts, int64_t num_blocks, const Int64s<1>& blocks,
           const nb::ndarray<uint8_t, nb::ndim<2>, nb::device::cpu>& pages, const Int64s<1>& rows, bool load) {
            if (parts.shape(1) != 4 || blocks.shape(0) != rows.shape(0) || pages.stride(1) != 1)
                throw std::invalid_argument("copy_pages: shapes do not fit");
            for (size_t i = 0; i < blocks.shape(0); i++)
                if (blocks(i) < 0 || blocks(i) >= num_blocks || rows(i) < 0 || size_t(rows(i)) >= pages.shape(0))
                    throw std::out_of_range("copy_pages: no such block or row");
            for (size_t i = 0; i < parts.shape(0); i++)
                if (parts(i, 2) < 0 || parts(i, 3) < 0 || size_t(parts(i, 2) + parts(i, 3)) > pages.shape(1))
                    throw std::out_of_range("copy_pages: a page is too short");
            nb::gil_scoped_release release;
            for (size_t i = 0; i < blocks.shape(0); i++)
                for (size_t j = 0; j < parts.shape(0); j++) {
                    uint8_t* block = reinterpret_cast<uint8_t*>(parts(j, 0)) + blocks(i) * parts(j, 1);
                    uint8_t* page = pages.data() + rows(i) * pages.stride(0) + parts(j, 2);
                    std::memcpy(load ? block : page, load ? page : block, size_t(parts(j, 3)));
                }
        },
        "parts"_a, "num_blocks"_a, "blocks"_a, "pages"_a, "rows"_a, "load"_a);
    m.def(
        "give_back", [](uintptr_t data, size_t bytes) { return give_back(reinterpret_cast<void*>(data), bytes); },
        "data"_a, "bytes"_a);

    m.attr("BEATS") = offsetof(Barrier, beats);
    nb::class_<Heartbeat>(m, "Heartbeat")
        .def(
            "__init__",
            [](Heartbeat* self, nb::ndarray<uint32_t, nb::shape<1>, nb::device::cpu> beats) {
                new (self) Heartbeat(*reinterpret_cast<std::atomic<uint32_t>*>(beats.data()));
            },
            "beats"_a.noconvert(), nb::keep_alive<1, 2>())
        .def(nb::init<int>(), "socket"_a);

    nb::class_<Tape>(m, "Tape")
        .def(nb::init<>())
        .def(
            "append",
            [](Tape& tape, int kernel, const nb::sequence& values,
               const std::vector<std::pair<uint32_t, uint32_t>>& inputs) {
                const auto words = words_of(kernel, values);
                std::vector<Tape::Input> found;
                for (const auto& [word, input] : inputs) {
                    if (word >= words.size()) throw std::invalid_argument("no such argument");
                    found.push_back({word, input});
                }
                tape.append(kernel, words, found);
            },
            "kernel"_a, "values"_a, "inputs"_a)
        .def_prop_ro("calls", [](const Tape& tape) { return tape.calls(); });

    nb::class_<TeamSize>(m, "TeamSize")
        .def(nb::init<int>(), "most"_a)
        .def_prop_ro("working", &TeamSize::working)
        .def(
            "ran",
            [](TeamSize& size, int64_t nanoseconds, int64_t waited, int64_t drawn, int64_t offered) {
                size.ran({nanoseconds, waited, drawn, offered});
            },
            "nanoseconds"_a, "waited"_a, "drawn"_a, "offered"_a);

    nb::class_<Runtime>(m, "Runtime")
        .def(
            "__init__",
            [](Runtime* self, const std::string& isa, int threads, bool adapt) {
                if (threads < 1) throw std::invalid_argument("threads must be at least 1");
                new (self) Runtime(table_named(isa), threads, adapt);
            },
            "isa"_a, "threads"_a, "adapt"_a = false)
        .def_prop_ro("working", &Runtime::working)
        .def("limit", &Runtime::limit, "threads"_a)
        .def(
            "run",
            [](Runtime& runtime, int kernel, const nb::sequence& values) {
                const auto words = words_of(kernel, values);
                nb::gil_scoped_release unlocked;
                runtime.run(kernel, words);
            },
            "kernel"_a, "values"_a)
        .def(
            "replay",
            [](Runtime& runtime, Tape& tape, const std::vector<int64_t>& values) {
                const auto inputs = inputs_of(tape, values);
                nb::gil_scoped_release unlocked;
                runtime.replay(tape, inputs);
            },
            "tape"_a, "inputs"_a)
        .def(
            "replay_timed",
            [](Runtime& runtime, Tape& tape, const std::vector<int64_t>& values) {
                const auto inputs = inputs_of(tape, values);
                std::vector<int64_t> times(tape.num_calls());
                nb::gil_scoped_release unlocked;
                runtime.replay(tape, inputs, times.data());
                return times;
            },
            "tape"_a, "inputs"_a);
}

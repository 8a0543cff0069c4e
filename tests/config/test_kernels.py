"""Which kernels run where, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvik.config.config import Decision, EngineConfig
from kvik.config.errors import ConfigError
from kvik.config.hardware import NATIVE_ISAS, Hardware
from kvik.config.kernels import choose_attention, choose_kernels
from kvik.config.model_source import find_model
from kvik.config.model_spec import read_model_spec

AVX2 = frozenset(("avx2", "fma"))
LAPTOP = Hardware("CPU", 4, 1 << 34, "RAM", isa=AVX2, native=True)
OLD = replace(LAPTOP, isa=frozenset())
ARM = replace(LAPTOP, isa=frozenset(("asimd",)))
BARE = replace(LAPTOP, native=False)


class Notes(list[Decision]):
    def add(self, name: str, value: str, reason: str) -> str:
        self.append(Decision(name, value, reason))
        return value


@pytest.mark.parametrize(
    ("hardware", "device", "dtype", "kernels", "reason"),
    [
        (LAPTOP, "cpu", "bfloat16", "native", "C++; this CPU has avx2"),
        (LAPTOP, "cpu", "float32", "native", "C++; this CPU has avx2"),
        (ARM, "cpu", "bfloat16", "native", "C++"),
        (LAPTOP, "cpu", "float16", "torch", "native kernels have no float16"),
        (LAPTOP, "cuda:0", "bfloat16", "torch", "native kernels are for CPUs"),
        (OLD, "cpu", "bfloat16", "torch", "not known to have AVX2"),
        (BARE, "cpu", "bfloat16", "torch", "was there a C++20 compiler?"),
    ],
)
def test_chosen_by_facts(hardware, device, dtype, kernels, reason) -> None:
    notes = Notes()
    assert choose_kernels(EngineConfig(), hardware, device, dtype, notes.add) == kernels
    assert notes[0].name == "kernels" and reason in notes[0].reason


def test_asked_for_is_used_even_where_it_is_slow() -> None:
    notes = Notes()
    config = EngineConfig(kernels="native")
    assert choose_kernels(config, OLD, "cpu", "float32", notes.add) == "native"
    config = EngineConfig(kernels="torch")
    assert choose_kernels(config, LAPTOP, "cpu", "float32", notes.add) == "torch"
    assert {note.reason for note in notes} == {"as asked"}


@pytest.mark.parametrize(
    ("hardware", "device", "dtype", "match"),
    [
        (BARE, "cpu", "float32", "installed without"),
        (LAPTOP, "cpu", "float16", "no float16"),
        (LAPTOP, "cuda:0", "float32", "for CPUs"),
    ],
)
def test_asked_for_and_impossible(hardware, device, dtype, match) -> None:
    config = EngineConfig(kernels="native")
    with pytest.raises(ConfigError, match=match) as error:
        choose_kernels(config, hardware, device, dtype, Notes().add)
    assert error.value.field == "kernels"


@pytest.mark.parametrize(
    ("kernels", "block_size", "head_dim", "backend", "reason"),
    [
        ("native", 16, 64, "cpu", "native kernels"),
        ("native", 48, 256, "cpu", "native kernels"),
        ("native", 8, 64, "sdpa", "block_size 8"),
        ("native", 16, 40, "sdpa", "head_dim 40"),
        ("native", 16, 272, "sdpa", "head_dim 272"),
        ("torch", 16, 64, "sdpa", "the fastest of torch"),
    ],
)
def test_attention_goes_with_the_kernels(kernels, block_size, head_dim, backend, reason) -> None:
    spec = replace(read_model_spec(find_model("")), head_dim=head_dim)
    notes = Notes()
    config = EngineConfig(block_size=block_size)
    assert choose_attention(config, spec, kernels, notes.add) == backend
    assert reason in notes[0].reason
    asked = replace(config, attention_backend="cpu")
    if backend == "cpu":
        assert choose_attention(asked, spec, kernels, notes.add) == "cpu"
    else:
        with pytest.raises(ConfigError) as error:
            choose_attention(asked, spec, kernels, notes.add)
        assert error.value.field == "attention_backend"


def test_the_best_instruction_set_of_a_cpu() -> None:
    for name, flags in NATIVE_ISAS.items():
        assert replace(LAPTOP, isa=flags).native_isa == name
    assert OLD.native_isa == ARM.native_isa == "portable"

"""Adapters that are loaded and unloaded while the engine runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.adapters import draw_pairs, linear_layers, write_adapter
from helpers.faults import fail
from helpers.served_columns import played_again
from helpers.served_engine import engine_request
from helpers.waiting import eventually

from kvik import LLM, AsyncLLM, SamplingParams
from kvik.config.config import EngineConfig
from kvik.engine.output import RequestOutput
from kvik.engine.remote import EngineState
from kvik.errors import KvikError, ModelError, ParamError, UnavailableError
from kvik.files import ADAPTER_FILES
from kvik.launch import resolve_config, start
from kvik.nn.safetensors import Stored

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 256,
    "num_blocks": 64,
    "max_adapters": 2,
    "max_adapter_rank": 8,
}
PROMPT = list(range(5, 45))
FIXED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}


def asked(adapter: str = "", **changes: Any) -> SamplingParams:
    return SamplingParams(**{**FIXED, "adapter": adapter, **changes})


def answer(llm: LLM, adapter: str = "", **changes: Any) -> RequestOutput:
    (output,) = llm.generate([PROMPT], asked(adapter, **changes))
    return output


def bits(output: RequestOutput) -> object:
    """Return tokens and log probabilities."""
    (completion,) = output.outputs
    assert completion.error is None
    return completion.token_ids, completion.logprobs


def agree(output: RequestOutput, other: RequestOutput, *, exactly: bool) -> bool:
    """Return whether two answers have the same tokens, and the same log probabilities or nearly."""
    if exactly:
        return bits(output) == bits(other)
    pairs = zip(output.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True)
    return output.outputs[0].token_ids == other.outputs[0].token_ids and all(
        one.logprob == pytest.approx(two.logprob, abs=1e-4) for one, two in pairs
    )


@pytest.fixture(scope="module")
def layers() -> dict[str, tuple[int, int]]:
    return linear_layers(resolve_config(EngineConfig()).model)


@pytest.fixture(scope="module")
def folders(layers: dict[str, tuple[int, int]], tmp_path_factory: Any) -> dict[str, Path]:
    """Adapters of ranks 2 to 4; the second one changes some of the layers."""
    folder = tmp_path_factory.mktemp("adapters")
    some = {name: size for i, (name, size) in enumerate(layers.items()) if i % 3}
    drawn = {
        "one": draw_pairs(layers, 2, seed=0),
        "two": draw_pairs(some, 3, seed=1),
        "three": draw_pairs(layers, 4, seed=2),
    }
    return {name: write_adapter(folder / name, pairs) for name, pairs in drawn.items()}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, object]:
    """The answer of each adapter by an engine that was started with all of them, and without."""
    with LLM(**OPTIONS, adapters=folders) as llm:
        found = {name: bits(answer(llm, name)) for name in ("", *folders)}
    assert len({str(one) for one in found.values()}) == 4
    return found


def test_they_answer_as_those_of_the_start(
    folders: dict[str, Path], expected: dict[str, object]
) -> None:
    with LLM(**OPTIONS) as llm:
        assert bits(answer(llm)) == expected[""]
        for name in ("one", "two"):
            llm.load_adapter(name, folders[name])
        names = ("one", "", "two", "one")
        together = llm.generate([PROMPT] * 4, [asked(name) for name in names])
        assert [bits(output) for output in together] == [expected[name] for name in names]
        llm.unload_adapter("one")
        llm.load_adapter("three", str(folders["three"]))  # into the same slot
        assert bits(answer(llm, "three")) == expected["three"]
        assert bits(answer(llm, "two")) == expected["two"]
        with pytest.raises(ParamError, match=r"engine's \('two', 'three'\), not 'one'"):
            answer(llm, "one")


def test_other_weights_of_the_same_name_answer_for_themselves(
    folders: dict[str, Path], expected: dict[str, object], tmp_path: Path
) -> None:
    """Also where prefixes of the first ones are in the cache, or in a tier."""
    tiers = {"kv_tiers": f"disk:{tmp_path / 'kv'}:64MiB", "num_blocks": 16}
    mine = shutil.copytree(folders["one"], tmp_path / "mine")
    with LLM(**{**OPTIONS, **tiers}) as llm:
        cached = []
        for files in ("one", "two", "one", "two"):
            for file in ADAPTER_FILES:  # at the same place
                shutil.copy(folders[files] / file, mine / file)
            llm.load_adapter("mine", mine)
            for _ in range(2):
                output = answer(llm, "mine")
                assert bits(output) == expected[files]
                cached.append(output.num_cached_tokens)
            llm.unload_adapter("mine")
            if files == "two":
                llm.generate([list(range(100, 340))], asked())  # prefixes leave the cache
        loaded = llm.stats().moves
    assert cached == [0, 32, 0, 32, 32, 32, 32, 32] and loaded and loaded.totals.loaded_tokens


def test_requests_of_an_unloaded_one_are_finished(
    folders: dict[str, Path], expected: dict[str, object]
) -> None:
    with LLM(**{**OPTIONS, "max_adapters": 1}, adapters={"mine": folders["one"]}) as llm:
        long = answer(llm, "mine", max_tokens=100)
        with llm.stream(PROMPT, asked("mine", max_tokens=100)) as stream:
            next(stream)
            llm.unload_adapter("mine")
            with pytest.raises(ParamError, match=r"adapter: must be one of the engine's \(none\)"):
                answer(llm, "mine")
            with pytest.raises(UnavailableError, match=r"have not ended.*\(max_adapters 1\)"):
                llm.load_adapter("mine", folders["two"])
            for _ in stream:
                pass
            assert stream.output is not None and bits(stream.output) == bits(long)
        llm.load_adapter("mine", folders["two"])
        assert bits(answer(llm, "mine")) == expected["two"]


def test_both_of_one_name_run_side_by_side(
    folders: dict[str, Path], expected: dict[str, object]
) -> None:
    """Requests of the first one also continue with it after a preemption."""
    squeezed = {"num_blocks": 24, "max_num_seqs": 6}
    with LLM(**{**OPTIONS, **squeezed}, adapters={"mine": folders["one"]}) as llm:
        long = answer(llm, "mine", max_tokens=60)
        streams = [llm.stream(PROMPT, asked("mine", max_tokens=60)) for _ in range(5)]
        next(streams[0])
        llm.unload_adapter("mine")
        llm.load_adapter("mine", folders["two"])
        assert bits(answer(llm, "mine")) == expected["two"]
        for stream in streams:
            for _ in stream:
                pass
            assert stream.output is not None and bits(stream.output) == bits(long)
        assert sum(stream.output.num_preemptions for stream in streams if stream.output)


def changed(change: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    """Return a function that copies an adapter and changes the copy."""
    return lambda source, folder: change(Path(shutil.copytree(source, folder)))


def other(pairs: dict[str, tuple[int, int]], **how: Any) -> Callable[[Path, Path], object]:
    return lambda source, folder: write_adapter(folder, draw_pairs(pairs, **how))


LAYER = "model.layers.0.mlp.down_proj"
WRONG: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no folder": (lambda source, folder: None, "adapters: there is no folder"),
    "no weights": (
        changed(lambda folder: (folder / ADAPTER_FILES[1]).unlink()),
        "adapters: 'mine': adapter_model.safetensors cannot be read",
    ),
    "broken weights": (
        changed(lambda folder: os.truncate(folder / ADAPTER_FILES[1], 1000)),
        "adapters: 'mine': adapter_model.safetensors",
    ),
    "broken JSON": (
        changed(lambda folder: (folder / ADAPTER_FILES[0]).write_text("{")),
        "adapters: 'mine': adapter_config.json",
    ),
    "an unknown layer": (
        other({"model.layers.9.q": (8, 8)}),
        "9.q', whose outputs",
    ),
    "another shape": (other({LAYER: (8, 8)}), r"of shape \[8, 8\], the model's is"),
    "a higher rank": (
        lambda source, folder: write_adapter(
            folder, draw_pairs(linear_layers(resolve_config(EngineConfig()).model), 9)
        ),
        r"adapters: 'mine' has rank 9 for '.*': at most 8 fits \(max_adapter_rank\)",
    ),
}


@pytest.fixture(scope="module")
def started(folders: dict[str, Path]) -> Any:
    with LLM(**OPTIONS, adapters={"one": folders["one"]}) as llm:
        yield llm


@pytest.mark.parametrize("case", WRONG)
def test_one_that_does_not_fit_changes_nothing(
    started: LLM,
    folders: dict[str, Path],
    expected: dict[str, object],
    case: str,
    tmp_path: Path,
) -> None:
    make, message = WRONG[case]
    make(folders["two"], tmp_path / "mine")
    with pytest.raises(KvikError, match=message):
        started.load_adapter("mine", tmp_path / "mine")
    assert [adapter.name for adapter in started.resolved.runner.adapters] == ["one"]
    assert bits(answer(started, "one")) == expected["one"]
    started.load_adapter("mine", folders["two"])
    assert bits(answer(started, "mine")) == expected["two"]
    started.unload_adapter("mine")


def test_a_fault_while_it_is_read_leaves_nothing(
    started: LLM,
    folders: dict[str, Path],
    expected: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for count in (1, 4, 9):
        reads = iter(range(count))
        with monkeypatch.context() as patch:
            error = ModelError(ADAPTER_FILES[1], "became shorter while it was read")
            fail(patch, Stored, "read", error, lambda *_, reads=reads: next(reads, None) is None)
            with pytest.raises(
                ParamError, match="adapters: 'mine': adapter_model.* became shorter"
            ):
                started.load_adapter("mine", folders["three"])
        assert bits(answer(started, "one")) == expected["one"]
    started.load_adapter("mine", folders["two"])  # does not change all layers
    assert bits(answer(started, "mine")) == expected["two"]
    started.unload_adapter("mine")


def test_names_and_slots(started: LLM, folders: dict[str, Path]) -> None:
    two = folders["two"]
    for name in ("", "a=b", "n" * 257, "\0"):
        with pytest.raises(KvikError, match="name: must be 1 to 256 characters without '='"):
            started.load_adapter(name, two)
    with pytest.raises(ParamError, match="name: must be another one: 'one' is loaded"):
        started.load_adapter("one", two)
    with pytest.raises(ParamError, match=r"name: must be one of the engine's \('one'\), not 'two'"):
        started.unload_adapter("two")
    started.load_adapter("two", two)
    with pytest.raises(ParamError, match=r"adapters: must be at most 2 \(max_adapters\)"):
        started.load_adapter("three", two)
    started.unload_adapter("two")


def test_without_options_the_first_ones_make_the_room(folders: dict[str, Path]) -> None:
    fixed = {name: value for name, value in OPTIONS.items() if not name.startswith("max_adapter")}
    with LLM(**fixed, adapters={"two": folders["two"]}) as llm:
        with pytest.raises(ParamError, match=r"at most 1 \(max_adapters\)"):
            llm.load_adapter("one", folders["one"])
        llm.unload_adapter("two")
        with pytest.raises(ParamError, match=r"has rank 2 for '.*': at most 0 fits"):
            llm.load_adapter("one", folders["one"])  # changes more layers
        llm.load_adapter("two", folders["two"])
    with LLM(**fixed) as llm, pytest.raises(ParamError, match=r"at most 0 \(max_adapters\)"):
        llm.load_adapter("one", folders["one"])
    with pytest.raises(KvikError, match="max_adapter_rank: must be left out, or max_adapters be"):
        resolve_config(EngineConfig(max_adapter_rank=8))


def test_memory_is_planned_for_all_slots(folders: dict[str, Path]) -> None:
    def planned(**options: Any) -> int:
        config = EngineConfig(device="cpu", dtype="float32", threads=1, **options)
        return resolve_config(config).memory.weights

    named = (f"one={folders['one']}",)
    plain, four = planned(), planned(max_adapters=4)
    two, three = planned(max_adapters=2), planned(max_adapters=3)
    assert four - three == three - two > 0
    assert planned(adapters=named, max_adapters=4) == four
    assert (
        planned(max_adapters=4, max_adapter_rank=16)
        == four
        < planned(max_adapters=4, max_adapter_rank=64)
    )
    assert plain < planned(adapters=named) < planned(adapters=named, max_adapters=1) < four


def test_a_recording_has_them(folders: dict[str, Path], tmp_path: Path) -> None:
    resolved = resolve_config(EngineConfig(**OPTIONS, adapters=(f"one={folders['one']}",)))
    engine = start(resolved, record=tmp_path / "flight")
    loop, three = (
        engine.loop,
        resolve_config(
            EngineConfig(**OPTIONS, adapters=(f"three={folders['three']}",))
        ).runner.adapters[0],
    )
    loop.add(engine_request("a", PROMPT, adapter="one", max_tokens=20, ignore_eos=True))
    for _ in range(3):
        loop.poll()
    loop.load_adapter(three)
    loop.unload_adapter("one")
    loop.add(engine_request("b", PROMPT, adapter="three", max_tokens=20, ignore_eos=True))
    while loop.has_work:
        loop.poll()
    loop.close()
    played = played_again(resolved, tmp_path / "flight")
    assert played.difference is None and played.tokens == 40


def test_changed_files_are_not_taken_for_the_named_ones(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    mine = shutil.copytree(folders["one"], tmp_path / "mine")
    config = resolve_config(EngineConfig(**OPTIONS, adapters=(f"mine={mine}",)))
    shutil.copy(folders["one"] / ADAPTER_FILES[1], mine)
    start(config).loop.close()  # the same content
    shutil.copy(folders["two"] / ADAPTER_FILES[1], mine)
    with pytest.raises(ModelError, match="adapters: 'mine': its files have changed"):
        start(config)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "threads": 2},
        {"tensor_parallel_size": 2, "threads": 2, "kernels": "torch"},
        {"pipeline_parallel_size": 2, "threads": 2},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "threads": 4},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_in_a_group_all_processes_load_or_none(
    folders: dict[str, Path],
    layers: dict[str, tuple[int, int]],
    options: dict[str, Any],
    tmp_path: Path,
    forked: None,
) -> None:
    # The sums of torch's products may depend on where in memory an adapter's slot lies.
    same = partial(agree, exactly=options.get("kernels") != "torch")
    with LLM(**{**OPTIONS, **options}, adapters={"one": folders["one"]}) as llm:
        right = answer(llm, "one")
    pairs = {name: draw_pairs({name: size}, 9)[name] for name, size in list(layers.items())[:1]}
    first = write_adapter(tmp_path / "first", pairs)  # does not fit into the first layer
    with LLM(**{**OPTIONS, **options}) as llm:
        plain = answer(llm)
        with pytest.raises(ParamError, match="has rank 9"):
            llm.load_adapter("first", first)
        llm.load_adapter("one", folders["one"])
        assert same(answer(llm, "one"), right) and not same(right, plain)
        llm.unload_adapter("one")
        llm.load_adapter("two", folders["two"])
        llm.load_adapter("one", folders["one"])
        assert same(answer(llm, "one"), right) and same(answer(llm), plain)


async def tokens_of(engine: AsyncLLM, adapter: str = "", **changes: Any) -> list[int]:
    output = await engine.generate(PROMPT, asked(adapter, **changes)).result()
    return output.outputs[0].token_ids


async def killed(engine: AsyncLLM, number: int) -> None:
    """Kill an engine, and wait for the next one."""
    link = engine.client.links[number]
    starts = link.num_starts
    os.kill(link.source.pid, signal.SIGKILL)
    await eventually(lambda: link.num_starts > starts and link.state is EngineState.READY, 60.0)


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
async def test_a_restarted_engine_has_the_current_ones(
    folders: dict[str, Path], expected: Any, count: int, forked: None
) -> None:
    options = {**OPTIONS, "threads": count, "data_parallel_size": count}
    async with AsyncLLM(**options, adapters={"one": folders["one"]}) as engine:
        await eventually(lambda: all(link.num_starts for link in engine.client.links), 60.0)
        await engine.load_adapter("two", folders["two"])
        await engine.unload_adapter("one")
        await killed(engine, 0)
        for _ in range(2 * count):
            found = await asyncio.gather(*(tokens_of(engine, "two") for _ in range(4)))
            assert found == [expected["two"][0]] * 4
        with pytest.raises(ParamError, match=r"must be one of the engine's \('two'\), not 'one'"):
            await tokens_of(engine, "one")
        await engine.load_adapter("one", folders["three"])
        assert await tokens_of(engine, "one") == expected["three"][0]
        await engine.sleep()
        assert await tokens_of(engine, "one") == expected["three"][0]


def test_an_engine_that_has_slept_has_the_current_ones(
    folders: dict[str, Path], expected: Any
) -> None:
    with LLM(**OPTIONS, adapters={"one": folders["one"]}) as llm:
        llm.load_adapter("two", folders["two"])
        llm.unload_adapter("one")
        llm.sleep()
        assert bits(answer(llm, "two"))[0] == expected["two"][0]
        with pytest.raises(ParamError, match="adapter"):
            answer(llm, "one")


@pytest.mark.full
async def test_replicas_load_all_or_none(
    folders: dict[str, Path], expected: Any, forked: None
) -> None:
    options = {**OPTIONS, "max_adapters": 1, "data_parallel_size": 2, "threads": 2}
    async with AsyncLLM(**options) as engine:
        await eventually(lambda: all(link.num_starts for link in engine.client.links), 60.0)
        await engine.load_adapter("mine", folders["one"])
        stream = engine.generate(PROMPT, asked("mine", max_tokens=200))
        await anext(stream)
        await engine.unload_adapter("mine")
        busy = "^engine: requests of unloaded adapters have not ended"  # in one of them
        with pytest.raises(UnavailableError, match=busy):
            await engine.load_adapter("mine", folders["two"])
        with pytest.raises(ParamError, match="adapter: must be one of the engine's"):
            await tokens_of(engine, "mine")
        output = await stream.result()
        assert output.outputs[0].token_ids[:8] == expected["one"][0]
        await engine.load_adapter("mine", folders["two"])
        found = await asyncio.gather(*(tokens_of(engine, "mine") for _ in range(8)))
        assert found == [expected["two"][0]] * 8


async def test_an_engine_in_a_thread(folders: dict[str, Path], expected: Any) -> None:
    async with AsyncLLM(**OPTIONS, engine="thread") as engine:
        await engine.load_adapter("one", folders["one"])
        assert await tokens_of(engine, "one") == expected["one"][0]
        with pytest.raises(ParamError, match="name: must be another one"):
            await engine.load_adapter("one", folders["two"])
        await engine.unload_adapter("one")
        with pytest.raises(ParamError, match="adapter: must be one of"):
            await tokens_of(engine, "one")

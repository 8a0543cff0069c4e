"""Processes with torch's kernels say what one says: the same greedy tokens in fp32, and log
probabilities that differ in the last digits alone.

Most groups and stages here are threads of one process, which saves starting others for each.
"""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers.calibrated import FAMILIES as CALIBRATED
from helpers.captured import captured_groups
from helpers.drafted_columns import EAGER, METHODS
from helpers.eagle3 import save_eagle3
from helpers.matrix import (
    BOTH,
    CONTEXT,
    DISK_TIER,
    SQUEEZED,
    STAGES,
    TIGHT,
    Column,
    make_model,
    params_with_logprobs,
    possible,
    run,
    run_column,
)
from helpers.optional_native import needs_native
from helpers.predicting import save_predicting
from helpers.stored_models import CONFIGS as STORED
from helpers.stored_models import SIZES, save_quantised
from helpers.thread_ranks import use_threads
from helpers.tiny_models import COMPRESSED, save_tiny, tokens

from kvik import LLM, SamplingParams
from kvik.config.model_source import BUNDLED
from kvik.engine.output import RequestOutput
from kvik.model_files import model_files
from kvik.worker.captures import MIN_MISSES

pytestmark = needs_native  # whose module has the beats

TORCH = {"kernels": "torch", "dtype": "float32"}
ALONE = Column("reference", alone=True)
TWO = {"tensor_parallel_size": 2, "threads": 2}
FAST = {**TWO, "tensor_parallel_cut": "fast"}
COLUMNS = [
    Column("exact", TWO),
    Column("exact, four", {**TWO, "tensor_parallel_size": 4, "threads": 4}),
    Column("exact, hits, chunks", {**TWO, "max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("exact, preemption, siblings", {**TWO, **SQUEEZED}, siblings=2, must="preemptions"),
    Column("exact, reference attention", {**TWO, "attention_backend": "reference"}),
    Column("fast", FAST),
    Column("fast, three", {**FAST, "tensor_parallel_size": 3, "threads": 3}),
    Column("fast, wire", FAST, way="wire"),
    Column("whole experts", {**TWO, "expert_parallel": True}),
    Column("fast, two steps in flight", FAST, in_flight=2),
    Column(
        "fast, preemption, chunks",
        {**FAST, **SQUEEZED, "max_num_batched_tokens": 16},
        must="preemptions",
    ),
    Column("exact, memory tier", {**TIGHT, **TWO}, rounds=2, must="loads"),
    Column("fast, disk tier", {**TIGHT, **DISK_TIER, **FAST}, rounds=2, must="loads"),
    *(
        Column(f"fast, drafts by {method}", {**FAST, "spec_method": method, **EAGER, **more})
        for method, more in METHODS.items()
    ),
    Column("stages", STAGES),
    Column("stages of groups", {**BOTH, "tensor_parallel_cut": "fast"}),
    Column("stages, hits, chunks", {**STAGES, "max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column(
        "stages of groups, preemption, siblings",
        {**BOTH, **SQUEEZED},
        siblings=2,
        must="preemptions",
    ),
    Column(
        "stages, disk tier",
        {**TIGHT, **DISK_TIER, **STAGES, "max_num_seqs": 4},
        rounds=2,
        must="loads",
    ),
    *(
        Column(f"stages, drafts by {method}", {**STAGES, "spec_method": method, **EAGER, **more})
        for method, more in METHODS.items()
    ),
]
BY_NAME = {column.name: column for column in COLUMNS}
# Each column in one way: in processes, in threads whose steps are replayed, or in threads.
IN_PROCESSES = ("exact, hits, chunks", "fast, three", "fast, wire", "fast, drafts by draft_model")
IN_PROCESSES += ("stages, hits, chunks", "stages of groups, preemption, siblings")
REPLAYED = ("exact", "fast", "fast, two steps in flight", "fast, preemption, chunks")
REPLAYED += ("stages", "stages of groups")
ELSEWHERE = (*IN_PROCESSES, *REPLAYED, "whole experts")
CASES = [("bundled", column) for column in COLUMNS if column.name not in ELSEWHERE]
CASES += [
    (name, BY_NAME["whole experts"]) for name in ("windowed", "chunked", "entries", "shortcuts")
]
CASES += [
    (name, BY_NAME[column])
    for name in (
        *("windowed", "capped", "narrow", "chunked", "latent", "indexed", "adapted windowed"),
        *("alibi", "streams", "blocks", "entries", "decays", "turns", "shortcuts"),
    )
    for column in ("exact", "fast")
    if column == "fast" or name in ("windowed", "latent", "adapted windowed", "entries")
]
CASES += [
    ("states", BY_NAME[column])
    for column in ("exact", "fast, drafts by ngram", "stages, drafts by ngram", "stages, disk tier")
]
CASES += [
    (name, BY_NAME["stages of groups"])
    for name in ("capped", "latent", "indexed", "streams", "blocks", "entries", "adapted capped")
]


@pytest.mark.full
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_processes_say_what_one_says(name, tmp_path) -> None:
    compare("bundled", BY_NAME[name], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "column"), [pytest.param(*case, id=f"{case[0]}, {case[1].name}") for case in CASES]
)
def test_tokens_are_those_of_one(name, column, tmp_path, monkeypatch) -> None:
    use_threads(monkeypatch)
    compare(name, column, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("bundled", name) for name in REPLAYED),
        *(("adapted windowed", "fast"), ("windowed", "whole experts")),
    ],
)
def test_replayed_steps_of_all_processes(model, name, tmp_path, monkeypatch) -> None:
    alone_of(model)  # is not captured
    use_threads(monkeypatch)
    column = BY_NAME[name]
    with captured_groups(1, 2, 4, 8, 16, max_context=CONTEXT) as made:
        compare(model, column, tmp_path)
    sizes = (f"{way}_parallel_size" for way in ("tensor", "pipeline"))
    assert len(made) == prod(column.config.get(size, 1) for size in sizes)
    assert len({(*graphs.captured, again.replayed) for graphs, again in made}) == 1
    assert all(again.replayed > MIN_MISSES and graphs.captured for graphs, again in made)


def batch_on_torch(model: Path = BUNDLED, **options: object) -> list[list[int]]:
    common = {"device": "cpu", "max_model_len": CONTEXT, "max_num_seqs": 4, **TORCH}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(model), **{**common, **options}) as llm:
        loop = llm._loop
        while loop.idle_step():
            pass
        outputs = llm.generate([tokens(24, seed) for seed in range(4)], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("failing", [None, 0, pytest.param(1, marks=pytest.mark.full)])
def test_a_size_is_captured_by_all_processes_or_by_none(failing, monkeypatch, caplog) -> None:
    """While the engine is idle, after all processes have made the calls of the warm-up."""
    expected = batch_on_torch(threads=1)
    use_threads(monkeypatch)
    with captured_groups(1, 4, max_context=CONTEXT, failing=failing) as made:
        assert batch_on_torch(**FAST) == expected
    captured = [{size.rows for size in graphs.captured} for graphs, _ in made]
    replays = {again.replayed for _, again in made}
    if failing is None:
        assert captured == [{1, 4}, {1, 4}] and len(replays) == 1 and min(replays) > MIN_MISSES
    else:
        assert captured == [set(), set()] and replays == {0}
        assert "not all steps can be captured" in caplog.text


@pytest.mark.parametrize(("options", "failing"), [(STAGES, 0), (BOTH, None)])
def test_each_stage_captures_alone(options, failing, monkeypatch) -> None:
    """If one cannot, the others still do."""
    expected = batch_on_torch(threads=1)
    use_threads(monkeypatch)
    with captured_groups(1, 4, max_context=CONTEXT, failing=failing) as made:
        assert batch_on_torch(**options) == expected
    captured = sorted(len(graphs.captured) for graphs, _ in made)
    assert captured == ([2] * 4 if failing is None else [0, 2])
    assert all((again.replayed > MIN_MISSES) == bool(graphs.captured) for graphs, again in made)


@pytest.mark.full
@pytest.mark.parametrize("way", [FAST, STAGES], ids=["group", "stages"])
@pytest.mark.parametrize("case", ["mimo", "eagle3"])
def test_forwards_of_a_head_are_captured(case, way, tmp_path, monkeypatch) -> None:
    drafting = {"spec_method": "mtp", **EAGER}
    if case == "eagle3":
        save_eagle3(tmp_path)
        drafting |= {"spec_method": "eagle3", "spec_model": str(tmp_path / "head")}
        model = tmp_path / "model"
    else:
        save_predicting(tmp_path, case)
        model = tmp_path
    expected = batch_on_torch(model, threads=1)
    use_threads(monkeypatch)
    with captured_groups(1, 4, max_context=CONTEXT) as made:
        assert batch_on_torch(model, **way, **drafting) == expected
    # Each process of a group has a part of the head; of stages only the last one has it.
    assert len(made) == (4 if way is FAST else 3)
    assert all({size.rows for size in graphs.captured} == {1, 4} for graphs, _ in made)
    replays = {again.replayed for graphs, again in made if graphs.network.drafts}
    assert len(replays) == 1 and min(replays) > MIN_MISSES


@cache
def alone_of(name: str) -> list[RequestOutput]:
    """Outputs of one process, one request at a time."""
    with TemporaryDirectory() as folder:
        model = {**make_model(name, Path(folder)), **TORCH}
        common = {"device": "cpu", "threads": 1, "max_model_len": CONTEXT, "max_num_seqs": 1}
        with LLM(**model, **common) as llm:
            return run(llm, ALONE, possible(params_with_logprobs(), model))


def compare(name: str, column: Column, tmp_path: Path) -> None:
    model = {**make_model(name, tmp_path), **TORCH}
    alone = alone_of(name)
    sampling = params_with_logprobs(column.siblings)
    found = run_column(column, sampling, model)
    for i, (output, right) in enumerate(zip(found, alone, strict=True)):
        for completion in output.outputs if sampling[i].greedy else output.outputs[:1]:
            assert completion.token_ids == right.outputs[0].token_ids, f"prompt {i}"
            assert max(distances(completion.logprobs, right.outputs[0].logprobs)) < 1e-3


def distances(found, right) -> list[float]:
    pairs = zip(found, right, strict=True)
    return [abs(one.logprob - other.logprob) for one, other in pairs if one and other]


HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
# Each a way in which layers differ.
FAMILIES: dict[str, dict[str, object]] = {
    **CALIBRATED,
    "Llama": {**CALIBRATED["Llama"], **HEADS, "intermediate_size": 144},
    "Qwen3": {**HEADS, "head_dim": 16},
    "Qwen3Moe": {**CALIBRATED["Qwen3Moe"], **HEADS, "moe_intermediate_size": 80},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2": {"n_embd": 64},
    "DeepseekV4": {**COMPRESSED, "o_groups": 4},
}


def answers(model: Path, **options: object) -> list[object]:
    common = {"device": "cpu", "max_model_len": 64, "num_blocks": 64, "threads": 3, **TORCH}
    ids = [tokens(24, seed) for seed in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    with LLM(str(model), **{**common, **options}) as llm:
        outputs = llm.generate(ids, params)
    assert {output.outputs[0].error for output in outputs} == {None}
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


WAYS: dict[str, dict[str, object]] = {
    "exact, three": {"tensor_parallel_size": 3, "tensor_parallel_cut": "exact"},
    "fast, two": {"tensor_parallel_size": 2, "tensor_parallel_cut": "fast"},
    "fast, three": {"tensor_parallel_size": 3, "tensor_parallel_cut": "fast"},
}
WHOLE_EXPERTS = {"tensor_parallel_size": 3, "expert_parallel": True}


def check(model: Path, *groups: dict[str, object], fast: float = 1e-4, **options: object) -> None:
    """Compare groups of two or three processes, of which the last are more than there are heads of
    keys, with one process.

    Args:
        fast: the median of what log probabilities of prompts differ by in the fast cut: where
            something is rounded to few bits, a last digit may decide to which number.
    """
    alone = answers(model, **options)
    for group in groups:
        exact = group.get("tensor_parallel_cut") == "exact"
        found = answers(model, **options, **group)
        pairs = [*zip(found, alone, strict=True)]
        apart = sorted(d for one, right in pairs for d in distances(one[2], right[2]))
        if exact:
            assert apart[-1] < 1e-4, group
        assert apart[len(apart) // 2] < fast, group
        if exact or fast <= 1e-4:
            assert [one[0] for one, _ in pairs] == [right[0] for _, right in pairs], group


@pytest.mark.each(1)  # layers differ in how they are divided, groups in what of it they need
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "family",
    [name if name == "Llama" else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES],
)
def test_models_of_each_kind(family, way, tmp_path, monkeypatch) -> None:
    use_threads(monkeypatch)
    save_tiny(tmp_path, family, **FAMILIES[family])
    has_experts = model_files(tmp_path).spec().experts_of_token > 0
    check(tmp_path, WAYS[way], *([WHOLE_EXPERTS] if has_experts else []))


ROUNDED = [name for name in STORED if name.startswith("fp8") or name == "int8"]


@pytest.mark.full
@pytest.mark.parametrize("case", STORED)
def test_quantised_checkpoints(case, tmp_path, monkeypatch) -> None:
    """What is rounded of activations to eight bits, by token, is rounded for each part of the
    inputs in the fast cut."""
    use_threads(monkeypatch)
    save_tiny(tmp_path / "plain", "Qwen2", **SIZES)
    save_quantised(tmp_path / "plain", tmp_path / "model", tmp_path / "twin", STORED[case])
    check(tmp_path / "model", *WAYS.values(), fast=0.3 if case in ROUNDED else 1e-4)


FORMATS = {
    **{name: {"quantization": name} for name in ("int8-weight-only", "int4", "mxfp4")},
    **{f"KV in {name}": {"kv_cache_dtype": name} for name in ("fp8", "int8", "int4")},
}


@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, tmp_path, monkeypatch) -> None:
    use_threads(monkeypatch)
    sizes = {**HEADS, "hidden_size": 128, "intermediate_size": 320}
    save_tiny(tmp_path, "Llama", **sizes)
    check(tmp_path, *WAYS.values(), **FORMATS[name])

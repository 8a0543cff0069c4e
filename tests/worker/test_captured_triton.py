"""Captured decoding steps on Triton's kernels: padded, they say what others say. Under Triton's
interpreter, so few and small."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import small
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.assistants import save_assistant
from helpers.captured import ROOMY, Again
from helpers.drafters import (
    METHOD,
    TREE_METHOD,
    Scripted,
    ScriptedTree,
    install,
    with_probability,
)
from helpers.interpreted_engine import interpret_engines
from helpers.optional_native import needs_native
from helpers.overlapping import steps_in_flight
from helpers.thread_ranks import use_threads

from kvik import LLM, SamplingParams
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.graph_sizes import GraphSize
from kvik.core.plan import GraphCounts
from kvik.launch import resolve_config
from kvik.worker import platforms, warm_up
from kvik.worker.captures import NO_CAPTURE_PEERS, Captured, CapturePeers
from kvik.worker.graphs import Eager, EngineNetwork, Graph, StepOutput
from kvik.worker.group import RankSetup
from kvik.worker.input_batch import StepTensors
from kvik.worker.warm_up import WarmUp

pytestmark = INTERPRETED_ONLY

MODEL = small(architectures=["MistralForCausalLM"], num_hidden_layers=2, sliding_window=6)
STATES = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
PROMPTS = [[5, 17, 40], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12], [1]]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
]


COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
COMMON |= {"load_format": "random", "kernels": "torch"}
ROOM = 6  # drafts of all requests in a step
DECODING = GraphSize(4, 4, 1, 4)


def tokens(model: Path, graphs: int | None = None, **options: Any) -> list[list[int]]:
    """With all that may be captured before the first request, which is so much."""
    limits = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 8, **options}
    with LLM(str(model), **{**COMMON, **limits}) as llm:
        loop = llm._loop
        while loop.idle_step():
            pass
        outputs = llm.generate(PROMPTS, SAMPLING, progress=False)
        assert all(output.outputs[0].error is None for output in outputs)
        told = llm.stats().graphs
        if graphs is None:
            assert told is None
        else:  # a byte for each, and what they write to
            assert told.taken > graphs
            assert told == GraphCounts(graphs, told.taken, ROOMY)
        return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def captured(
    *sizes: GraphSize, by: Sequence[Again] = (), drafting: Sequence[GraphSize] = ()
) -> Iterator[Sequence[Again]]:
    """Let an engine that is made in the context replay steps of some sizes.

    Args:
        by: the capturer of each of its processes; (): of one process, a new one.
        drafting: sizes of steps that draft.

    Yields:
        The capturers.
    """
    by = by or [Again()]
    unused = list(by)

    def platform(
        config: ResolvedConfig, memory: object = None, setup: RankSetup | None = None
    ) -> platforms.Platform:
        choice: dict[str, Any] = {"kernels": "triton", "attention_backend": "triton"}
        choice |= {"graph_sizes": sizes, "graph_memory": ROOMY}
        choice |= {"draft_graph_sizes": tuple(drafting)}
        config = replace(config, runner=replace(config.runner, **choice))
        return platforms.TritonPlatform(config, setup)

    with pytest.MonkeyPatch.context() as patch:
        interpret_engines(patch)
        patch.setattr("kvik.worker.worker.platform", platform)
        patch.setattr("kvik.worker.ranks.platform", platform)
        patch.setattr(platforms, "CudaCapturer", lambda device: unused.pop())
        patch.setattr(warm_up, "forwards", lambda *args, **kwargs: [])  # has tests of its own
        patch.setattr(warm_up, "rules", lambda *args: WarmUp(()))
        yield by
    assert {len(again.captured) for again in by} == {len(sizes) + len(drafting)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_padded_steps_say_the_same(kv, model) -> None:
    expected = tokens(model, attention_backend="reference", kv_cache_dtype=kv)
    with captured(DECODING) as (again,), steps_in_flight(2):
        assert tokens(model, 1, kv_cache_dtype=kv) == expected
    assert again.replayed >= 3


@pytest.mark.full
@needs_native
@pytest.mark.parametrize(  # by day, torch's kernels replay exact cuts
    "way", [pytest.param("exact", marks=pytest.mark.nightly), "fast", "stages"]
)
def test_groups_and_stages_replay_padded_steps(way, model, monkeypatch) -> None:
    expected = tokens(model, attention_backend="reference")
    use_threads(monkeypatch)
    group = {"tensor_parallel_size": 2, "tensor_parallel_cut": way, "threads": 2}
    if way == "stages":
        group = {"pipeline_parallel_size": 2, "threads": 2}
    with captured(DECODING, by=[Again(), Again()]) as by, steps_in_flight(2):
        assert tokens(model, 1, **group) == expected
    assert by[0].replayed == by[1].replayed >= 3


# Tokens of no request are computed from whatever was in memory, and nobody looks at them.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("kind", ["chains", "trees", "chains with states"])
def test_steps_with_drafts_say_the_same(kind, model, monkeypatch) -> None:
    """Some drafts of some requests, so that every step is padded in its own way."""
    tree = kind == "trees"
    changes = STATES if kind == "chains with states" else {"num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(MODEL | changes))
    expected = tokens(model, attention_backend="reference")
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    drafts, method = (ScriptedTree.TREE.drafts, TREE_METHOD) if tree else (3, METHOD)
    if tree:
        install(monkeypatch, lambda parts: ScriptedTree(parts, texts))
    else:
        install(monkeypatch, lambda parts: Scripted(parts, texts, with_probability(0.6)))
    options: dict[str, Any] = {"spec_method": method, "spec_tokens": drafts}
    options |= {"speculative_config": {"adaptive": False}, "max_num_batched_tokens": 4 + 2 * ROOM}
    options |= {"spec_model": str(model)} if tree else {}
    judging = GraphSize(4, 4 + ROOM, 1 + drafts, 4 + ROOM, tree)
    eager: list[bool] = []  # each eager step, and whether it has drafts
    forward = Eager.forward

    def noted(self: Eager, step: StepTensors) -> StepOutput:
        eager.append(len(step.logits_indices) > len(step.layouts[0].num_scheduled))
        return forward(self, step)

    monkeypatch.setattr(Eager, "forward", noted)
    with captured(DECODING, judging) as (again,), steps_in_flight(2):
        assert tokens(model, 2, **options) == expected
    assert again.replayed >= 3
    assert eager and not any(eager)


HEADED = {
    "mtp": small(architectures=["MiMoForCausalLM"], num_hidden_layers=1),
    "eagle3": small(num_hidden_layers=7),
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("method", ["mtp", "eagle3", "assistant"])
def test_steps_of_heads_say_the_same(method, tmp_path) -> None:
    """Of the model's own head, of one on inner layers, and of an assistant."""
    path, head, drafting = tmp_path / "model", tmp_path / "head", {"method": method}
    options: dict[str, Any] = {"load_format": "safetensors" if method == "assistant" else "random"}
    if method == "assistant":
        save_assistant(tmp_path)
    else:
        config = HEADED[method]
        own = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
        for folder, facts in ((path, config), (head, {**config, **own})):
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(facts))
    if method != "mtp":
        drafting["model"] = str(head)
    expected = tokens(path, attention_backend="reference", **options)
    options |= {"speculative_config": {**drafting, "adaptive": False}, "spec_tokens": 2}
    options |= {"max_num_batched_tokens": 4 + 2 * ROOM}
    with captured(DECODING, drafting=[DECODING]) as (again,):
        assert tokens(path, 2, **options) == expected
    assert again.replayed >= (2 if method == "assistant" else 6)


class Called(Again):
    """As a GPU captures: what is replayed holds on to nothing of Python's."""

    def capture(self, call: Callable[[], None], peers: CapturePeers = NO_CAPTURE_PEERS) -> Captured:
        call()
        self.captured.append(lambda: None)
        return Captured(lambda: None, 1, 1)


def test_all_that_an_engine_captures_shares_memory(monkeypatch) -> None:
    """The model, the draft model and heads replay one after another, and no one reads intermediate
    results after a replay."""
    made: list[Again] = []
    monkeypatch.setattr(platforms, "CudaCapturer", lambda device: made.append(Again()) or made[-1])
    config = resolve_config(EngineConfig(device="cpu", max_model_len=32))
    runner = replace(
        config.runner,
        kernels="triton",
        attention_backend="sdpa",
        draft_graph_sizes=(DECODING,),
        graph_memory=5,
    )
    platform = platforms.TritonPlatform(replace(config, runner=runner))
    assert platform.for_drafts() is platform
    monkeypatch.setattr(platform, "joined", object())  # a group, of which one process drafts
    alone = platform.for_drafts()
    assert alone.parts.kv_zeros is platform.parts.kv_zeros
    heads = [each.rows(torch.neg, [torch.zeros(1, 2)]) for each in (platform, alone)]
    assert [graph.idle_step() for graph in heads] == [False, False]
    assert len(made) == 1 and len(made[0].captured) == 2
    assert platform.graph_memory.changes() == GraphCounts(2, 2, 5)


@pytest.mark.full
def test_close_gives_weights_and_cache_back(model, monkeypatch) -> None:
    """Or the next engine of the process would find the memory of its GPU taken."""
    kept: list[weakref.ref[Any]] = []
    graph, emptied = platforms.TritonPlatform.graph, platforms.torch.cuda.empty_cache

    def watch(
        self: platforms.TritonPlatform, network: EngineNetwork, *sizes: Any, **how: Any
    ) -> Any:
        made: tuple[Graph, Any] = graph(self, network, *sizes, **how)
        weights = network.model.layers[0].mlp.down.matrix.data.values
        kept.extend(map(weakref.ref, (network.kv.layers[0].k, weights, *made)))
        return made

    alive: list[list[bool]] = []
    monkeypatch.setattr(platforms.TritonPlatform, "graph", watch)
    monkeypatch.setattr(
        platforms.torch.cuda,
        "empty_cache",
        lambda: alive.append([ref() is not None for ref in kept]) or emptied(),
    )
    limits = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    with captured(DECODING, by=[Called()]), LLM(str(model), **COMMON, **limits) as llm:
        while llm._loop.idle_step():
            pass
        assert all(ref() is not None for ref in kept)
    assert alive[0] == alive[1] == [] and alive[-1] == [False] * 4

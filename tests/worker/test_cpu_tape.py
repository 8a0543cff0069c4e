"""A replayed forward equals the eager one to the bit, in every kind of step and in an engine."""

from __future__ import annotations

import json
import logging
import random
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.configs import small
from helpers.optional_native import NATIVE
from helpers.tiny_families import ALL
from helpers.tiny_models import GEMMA3N, IN_BLOCKS, INDEXED, LONGCAT, MINIMAX, ZAMBA2, tiny_config
from torch import Tensor

from kvik import LLM, SamplingParams
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.speculative import ResolvedSpeculation
from kvik.core.plan import NewRequest, SchedulerOutput
from kvik.launch import resolve_config
from kvik.models import registry
from kvik.models.decoder import Decoder
from kvik.nn.builder import Builder
from kvik.nn.kv_formats import allocate_kv, allocate_states
from kvik.nn.loader import load_model
from kvik.nn.parameters import Parameters
from kvik.worker.draft_tree import DraftTree
from kvik.worker.graphs import Eager, EngineNetwork
from kvik.worker.input_batch import build_input_batch
from kvik.worker.platforms import NativePlatform
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import FixedInputs, FreshInputs, StepSizes
from kvik.worker.worker import Worker

if not NATIVE:
    pytest.skip("kvik was installed without native kernels", allow_module_level=True)

SEQS, TOKENS, LENGTH = 6, 48, 64
TREE = DraftTree((-1, 0, 0, 1, 2, 2), (0, 0, 1, 0, 0, 1))
WINDOWS = "Exaone4"  # in some of its layers
MODELS = (
    *("Llama", "Qwen2", "Phi3", "Glm4", "Falcon-two-norms", WINDOWS, "Cohere2", "Ministral3"),
    *("Gemma2", "Gemma4-token-inputs", "Gemma4-key-is-value", "Gemma4-experts", "Glm4Moe"),
    *("Llama4", "DeepseekV2", "Granite", "GPTNeoX", "Nemotron", "Lfm2", "Qwen3_5", "GPT2"),
    *("GraniteMoeHybrid", "NemotronH-experts", "FalconH1-norm", "Apertus", "Gemma3n", "HYV4"),
    *("LongcatFlash", "MiniMax", "MiniMaxM3VL", "Zamba2"),
)
OTHERS = {
    "Gemma3n": GEMMA3N,
    "HYV4": {**INDEXED, "hc_mult": 3},
    "LongcatFlash": LONGCAT,
    "MiniMax": MINIMAX,
    "MiniMaxM3VL": IN_BLOCKS,
    "Zamba2": {**ZAMBA2, "hidden_size": 64, "use_shared_attention_adapter": True},
}
FORMATS = [
    ("float32", "none"),
    ("bfloat16", "none"),
    ("float32", "int8"),
    ("bfloat16", "int8"),
    ("bfloat16", "int8-weight-only"),
    ("bfloat16", "int4"),
    ("bfloat16", "mxfp4"),
    ("bfloat16", "fp8"),
]
# Tokens of each slot, and the slots that are sampled.
STEPS: list[tuple[dict[int, int], set[int]]] = [
    ({0: 48}, {0}),  # one prefill, the largest step
    ({1: 20, 2: 7, 3: 1}, {1, 3}),
    ({1: 1, 0: 1, 3: 1}, {0, 1, 3}),  # decodes
    ({3: 1}, {3}),
    ({2: 9}, set()),  # no slot is sampled
    ({0: 1, 4: 40, 2: 7}, {0}),  # a chunk after a prefix with a decode
    ({5: 12, 0: 8, 1: 4, 2: 8, 3: 8, 4: 8}, {0, 1, 2, 3, 4, 5}),  # the most requests and tokens
    ({0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, {0, 1, 2, 3, 4, 5}),
    ({5: 1}, set()),
]


def save(folder: Path, model: str) -> str:
    """Save the configuration of a family."""
    options = {**ALL, **OTHERS}[model]
    tiny_config(model.partition("-")[0], **options).save_pretrained(folder)
    return str(folder)


class Twins:
    """One network on a tape and eagerly, each with its own cache."""

    def __init__(self, config: ResolvedConfig) -> None:
        native = NativePlatform(config)
        parts, cache, scheduler = native.parts, config.cache, config.scheduler
        parameters = Parameters(
            parts.ops,
            dtype=parts.dtype,
            device=parts.device,
            checkpoint=None,
            quantization=config.runner.quantization,
        )
        length = scheduler.max_model_len
        builder = Builder(parameters, parts.backend, cache.groups, max_model_len=length)
        with torch.inference_mode():
            model, _ = load_model(config.model, builder, seed=1)
            self.taped, self.eager = (
                EngineNetwork(
                    model,
                    parts.ops,
                    parts.backend,
                    cache.groups,
                    allocate_kv(
                        cache.groups,
                        cache.pool_size,
                        cache.block_size,
                        parts.dtype,
                        parts.device,
                        parts.kv_zeros,
                    ),
                    allocate_states(config.model.states, config.state_rows, parts.device),
                )
                for _ in range(2)
            )
            self.graph, self.inputs = native.graph(self.taped, StepSizes.of_engine(config))
        assert isinstance(self.inputs, FixedInputs)
        self.table = RequestTable(
            scheduler.max_num_seqs,
            scheduler.max_model_len,
            len(cache.groups),
            cache.block_size,
            states=bool(config.model.states),
        )
        self._fill(cache.num_blocks, config.model.vocab_size)

    def _fill(self, num_blocks: int, vocab: int) -> None:
        """Fill every slot with a request of the greatest length, of which nothing is computed."""
        self.table.draft_tree = TREE
        rng = random.Random(0)
        free = rng.sample(range(1, num_blocks + 1), num_blocks)
        slots, length = self.table.token_ids.shape
        blocks = -(-length // self.table.block_size)
        for slot in range(slots):
            ids = [[free.pop() for _ in range(blocks)] for _ in self.taped.groups]
            tokens = [rng.randrange(vocab) for _ in range(length)]
            new = NewRequest(slot, tokens, length, 0, ids, SamplingParams(), frozenset(), 0)
            self.table.add(new)

    def step(
        self, scheduled: dict[int, int], sampling: set[int], drafts: dict[int, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a step both ways, compare, and return its hidden states and logits.

        Args:
            drafts: by slot, how many of its last tokens are the first nodes of TREE after its root.
        """
        slots = list(scheduled)
        lengths = list(scheduled.values())
        counts = [(drafts or {}).get(slot, 0) for slot in slots]
        plan = SchedulerOutput(0, slots, lengths, counts, [s in sampling for s in slots])
        with torch.inference_mode():
            batch = build_input_batch(plan, self.table, self.inputs)
            found = self.graph.run(batch)
            fresh = build_input_batch(plan, self.table, FreshInputs(torch.device("cpu")))
            expected = Eager(self.eager).run(fresh)
        assert expected.hidden.shape[0] == sum(lengths)
        assert expected.logits.shape[0] == len(sampling) + sum(counts)
        assert torch.equal(found.hidden, expected.hidden)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.top, expected.top)
        assert torch.equal(found.top_ids, expected.logits.argmax(-1))
        assert expected.hidden.isfinite().all() and expected.logits.isfinite().all()
        for mine, other in zip(self.taped.kv.layers, self.eager.kv.layers, strict=True):
            assert torch.equal(mine.k, other.k) and torch.equal(mine.v, other.v)
        assert torch.equal(self.taped.states.pool, self.eager.states.pool)
        self.table.num_computed[slots] += lengths
        return expected.hidden, expected.logits


def resolved(folder: str, **options: object) -> ResolvedConfig:
    common = {"model": folder, "load_format": "random", "device": "cpu", "num_blocks": 200}
    sizes = {"max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS, "max_model_len": LENGTH}
    return resolve_config(EngineConfig(**{**common, **sizes, "threads": 1, **options}))


@pytest.mark.each(3)  # a model has its own operations, a format its own products
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_step(model: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    twins = Twins(resolved(save(tmp_path, model), dtype=dtype, quantization=quantization))
    last = torch.empty(0)
    for scheduled, sampling in STEPS:
        hidden, _ = twins.step(scheduled, sampling)
        assert not torch.equal(hidden[-1:], last)  # each step differs
        last = hidden[-1:].clone()


@pytest.mark.parametrize("threads", [1, 2])
def test_random_steps(threads: int, tmp_path: Path) -> None:
    rng = random.Random(threads)
    twins = Twins(resolved(save(tmp_path, WINDOWS), dtype="bfloat16", threads=threads))
    while (left := LENGTH - twins.table.num_computed).any():
        able = [slot for slot in range(SEQS) if left[slot]]
        room, scheduled = TOKENS, {}
        for slot in rng.sample(able, rng.randint(1, len(able))):
            most = min(room, int(left[slot]))
            if most:
                scheduled[slot] = rng.choice([1, rng.randint(1, most)])
                room -= scheduled[slot]
        twins.step(scheduled, {slot for slot in scheduled if rng.random() < 0.5})


@pytest.mark.parametrize(("seqs", "budget"), [(1, 1), (1, 2), (2, 2), (2, 3), (3, 4), (4, 4)])
def test_small_steps_with_ambiguous_sizes(seqs: int, budget: int, tmp_path: Path) -> None:
    sizes = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "max_model_len": 17}
    twins = Twins(resolved(save(tmp_path, "Llama"), dtype="float32", block_size=16, **sizes))
    everyone = set(range(seqs))
    twins.step({0: budget}, {0})
    twins.step({0: budget}, set())
    for _ in range(3):
        twins.step(dict.fromkeys(range(seqs), 1), everyone)
        twins.step({seqs - 1: 1}, {seqs - 1})


@pytest.mark.parametrize("model", ["Llama", WINDOWS])
def test_trees_do_not_affect_later_steps(model: str, tmp_path: Path) -> None:
    config = resolved(save(tmp_path, model), dtype="bfloat16")
    speculation = ResolvedSpeculation("medusa", num_draft_tokens=TREE.drafts, max_draft_rows=16)
    twins = Twins(replace(config, speculation=speculation))
    twins.step({0: 20, 1: 9, 2: 5}, {0, 1, 2})
    everyone = {0, 1, 2}
    twins.step({0: 6, 1: 1, 2: 4}, everyone, {0: 5, 2: 3})
    twins.step({0: 6, 1: 7, 2: 1}, everyone, {0: 5})  # a chunk in place of a tree
    twins.step({0: 6, 1: 6, 2: 6}, everyone)  # only chunks
    with_tree, _ = twins.step({3: 6}, {3}, {3: 5})
    twins.table.num_computed[3] = 0
    plain, _ = twins.step({3: 6}, {3})
    assert torch.equal(with_tree[:2], plain[:2]) and not torch.equal(with_tree[2:], plain[2:])


def test_a_larger_step_than_the_tape_was_made_for_is_refused(tmp_path: Path) -> None:
    twins = Twins(resolved(save(tmp_path, "Llama"), dtype="float32"))
    with pytest.raises(ValueError, match="broadcast"):
        twins.step({0: TOKENS, 1: 1}, set())


# -- in an engine ----------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = [[5, 6, 7], [11] * 30, list(range(9, 60))]


@pytest.fixture
def llama(tmp_path: Path) -> dict[str, object]:
    """Return options of an engine with random weights."""
    common = {"load_format": "random", "device": "cpu", "threads": 1, "num_blocks": 39}
    return {"model": save(tmp_path, "Llama"), "dtype": "float32", **common}


class Doubling(Decoder):
    """It multiplies by a torch operation of its own."""

    def leave(self, x: Tensor) -> Tensor:
        return super().leave(x) * 2.0


def test_a_model_that_computes_with_torch_runs_eagerly(
    llama: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(**llama) as llm:
        plain = llm.score(PROMPTS)
    assert not caplog.records
    doubling = replace(registry.ARCHITECTURES["LlamaForCausalLM"], make=Doubling)
    monkeypatch.setitem(registry.ARCHITECTURES, "LlamaForCausalLM", doubling)
    with caplog.at_level(logging.WARNING), LLM(**llama) as llm:
        assert llm.resolved.runner.attention_backend == "cpu"
        found, scores = llm.generate(PROMPTS, GREEDY), llm.score(PROMPTS)
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "every step runs in Python, which is slower"
    ]
    assert "aten.mul" in caplog.text
    with LLM(**llama, kernels="torch") as llm:
        expected, right = llm.generate(PROMPTS, GREEDY), llm.score(PROMPTS)
    for a, b in zip(found, expected, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
    assert logprobs_of(scores) == pytest.approx(logprobs_of(right), abs=1e-4)
    assert logprobs_of(scores) != pytest.approx(logprobs_of(plain), abs=1e-1)


def logprobs_of(outputs: list) -> list[float]:
    """Return those of every prompt token but the first."""
    return [entry.logprob for output in outputs for entry in output.prompt_logprobs[1:]]


@pytest.mark.parametrize("budget", [1024, 7])
def test_prompt_logprobs_from_replayed_hidden_states(llama: dict[str, object], budget: int) -> None:
    params = GREEDY.with_changes(prompt_logprobs=3)
    with LLM(**llama, kernels="torch") as llm:
        expected = llm.generate(PROMPTS, params)
    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": 3}
    with LLM(**llama, kernels="native", **sizes) as llm:
        found = llm.generate(PROMPTS, params)
        (alone,) = llm.generate([PROMPTS[2]], params)
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-4)
    for a, b in zip(found, expected, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
    assert alone.prompt_logprobs == found[2].prompt_logprobs
    assert alone.outputs[0].logprobs == found[2].outputs[0].logprobs


def test_two_engines_do_not_disturb_each_other(llama: dict[str, object]) -> None:
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "threads": 2}
    configs = [{**llama, "seed": 1}, {**llama, **sizes, "seed": 2, "quantization": "int8"}]
    expected = []
    for config in configs:
        with LLM(**config) as llm:
            expected.append(llm.generate(PROMPTS[2:], GREEDY)[0].outputs[0])
    assert expected[0].token_ids != expected[1].token_ids
    with LLM(**configs[0]) as first, LLM(**configs[1]) as second:
        streams = [llm.stream(PROMPTS[2], GREEDY) for llm in (first, second)]
        for _ in range(GREEDY.max_tokens + 1):
            for stream in streams:
                next(stream, None)
        for stream, right in zip(streams, expected, strict=True):
            assert stream.output.outputs[0].token_ids == right.token_ids
            assert stream.output.outputs[0].logprobs == right.logprobs


def test_close_frees_weights_cache_and_tape(
    llama: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By reference counts, without the garbage collector."""
    kept: list[weakref.ref] = []
    graph = NativePlatform.graph

    def watch(self, network, sizes):
        tape, inputs = graph(self, network, sizes)
        weights = network.model.layers[0].mlp.down.matrix.data.weight
        for thing in (
            network.kv.layers[0].k,
            weights,
            tape,
            tape.output.hidden,
            inputs,
            self.native,
        ):
            kept.append(weakref.ref(thing))
        return tape, inputs

    monkeypatch.setattr(NativePlatform, "graph", watch)
    with LLM(**llama) as llm:
        llm.generate(PROMPTS, GREEDY)
        assert len(kept) == 6 and all(ref() is not None for ref in kept)
    assert [ref() for ref in kept] == [None] * 6


STATUS = Path("/proc/self/status")


def resident() -> int:
    """Return the memory of this process in MiB, without files."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) // 1024


@pytest.mark.full
@pytest.mark.skipif(not STATUS.exists(), reason="reads Linux' own files")
def test_closed_engines_leave_no_memory_behind(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(small(**shape, vocab_size=4000)))
    config = resolved(str(tmp_path), dtype="float32")
    weights = config.memory.weights >> 20
    assert weights > 60
    held = []
    for _ in range(4):
        Worker(config).stop()
        held.append(resident())
    assert held[-1] - held[0] < weights / 2

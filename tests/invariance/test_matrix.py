"""Greedy and seeded tokens are the same whatever the engine does to produce them (fp32).

One plain run is the reference: one request at a time, plain-torch reference attention, no prefix
cache, no chunking. Each column of the matrix turns features on; every later feature adds a column.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvik import LLM, SamplingParams

NUM_TOKENS = 20
CONTEXT = 160


@dataclass(frozen=True)
class Column:
    """Attributes:
    config: engine options.
    rounds: how often the whole batch is run; the last round counts (prefix hits).
    order: "given", "reversed" or "shuffled" arrival.
    alone: one request at a time.
    siblings: n > 1; every sibling of a greedy request must agree.
    must: what the run must have shown, so that no column passes without its feature.
    """

    name: str
    config: dict[str, object] = field(default_factory=dict)
    rounds: int = 1
    order: str = "given"
    alone: bool = False
    siblings: int = 1
    must: str = ""


SQUEEZED = {"num_blocks": 14, "block_size": 16}  # blocks of each KV group
COLUMNS = [
    Column("batch"),
    Column("reference attention", {"attention_backend": "reference"}),
    Column("one at a time, sdpa", alone=True),
    Column("chunks of 5", {"max_num_batched_tokens": 5, "max_num_seqs": 5}),
    Column("chunks of 16", {"max_num_batched_tokens": 16, "max_num_seqs": 8}),
    Column("chunks of 33", {"max_num_batched_tokens": 33}),
    Column("prefix hits", rounds=2, must="hits"),
    Column("prefix hits, chunks", {"max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("no prefix cache", {"enable_prefix_caching": False}, rounds=2),
    Column("preemption", SQUEEZED, must="preemptions"),
    Column(
        "preemption without cache", {**SQUEEZED, "enable_prefix_caching": False}, must="preemptions"
    ),
    Column("preemption, chunks", {**SQUEEZED, "max_num_batched_tokens": 16}, must="preemptions"),
    Column("two at a time", {"max_num_seqs": 2}),
    Column("blocks of 1", {"block_size": 1}, rounds=2, must="hits"),
    Column("blocks of 8", {"block_size": 8}, rounds=2, must="hits"),
    Column("blocks of 64", {"block_size": 64}, rounds=2),
    Column("reversed arrival", order="reversed"),
    Column("shuffled arrival", {"max_num_seqs": 3}, order="shuffled"),
    Column("siblings", siblings=3),
    Column("siblings, preemption", {**SQUEEZED, "num_blocks": 16}, siblings=2, must="preemptions"),
    Column("priority", {"policy": "priority"}),
    Column("shortest-prefill-first", {"policy": "shortest-prefill-first", "max_num_seqs": 2}),
    Column("longest-prefix-match", {"policy": "longest-prefix-match", "max_num_seqs": 2}, rounds=2),
    Column("static", {"policy": "static", "batch_size": 3}),
    Column("dynamic", {"policy": "dynamic", "batch_size": 3, "max_wait": 0.01}),
]

BUNDLED = ""
WINDOWED = {  # two full layers, two that see 24 keys: two KV groups
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 2,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module", params=["bundled", "windowed"])
def model(request, tmp_path_factory) -> dict[str, object]:
    if request.param == "bundled":
        return {"model": BUNDLED}
    folder: Path = tmp_path_factory.mktemp("windowed")
    (folder / "config.json").write_text(json.dumps(WINDOWED))
    return {"model": str(folder), "load_format": "random", "seed": 3}


def prompts(vocab: int) -> list[list[int]]:
    """Short and long, some with a common start, one of a single token."""
    rng = random.Random(0)
    shared = [rng.randrange(5, vocab) for _ in range(40)]
    fresh = [[rng.randrange(5, vocab) for _ in range(n)] for n in (1, 7, 31, 32, 33, 90)]
    return [*fresh, [*shared, 11], [*shared, 12, 13], shared[:32]]


def params(siblings: int = 1) -> list[SamplingParams]:
    """Greedy for most, seeded sampling with everything on for the rest."""
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "n": siblings}
    greedy = SamplingParams(temperature=0.0, **common)
    seeded = SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        seed=1234,
        **common,
    )
    return [greedy, greedy, greedy, greedy, greedy, greedy, seeded, greedy, seeded]


def run(llm: LLM, column: Column) -> list[list[list[int]]]:
    """Token ids by prompt and sibling."""
    jobs = list(zip(prompts(llm.resolved.model.vocab_size), params(column.siblings), strict=True))
    order = list(range(len(jobs)))
    if column.order == "reversed":
        order.reverse()
    elif column.order == "shuffled":
        random.Random(1).shuffle(order)
    batches = [[i] for i in order] if column.alone else [order]
    found: dict[int, list[list[int]]] = {}
    for _ in range(column.rounds):
        for batch in batches:
            outputs = llm.generate([jobs[i][0] for i in batch], [jobs[i][1] for i in batch])
            for i, output in zip(batch, outputs, strict=True):
                assert all(c.error is None for c in output.completions)
                found[i] = [c.token_ids for c in output.completions]
    return [found[i] for i in range(len(jobs))]


@pytest.fixture(scope="module")
def expected(model) -> Iterator[list[list[int]]]:
    with LLM(
        **model,
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=CONTEXT,
        attention_backend="reference",
        enable_prefix_caching=False,
        max_num_seqs=1,
    ) as llm:
        yield [siblings[0] for siblings in run(llm, Column("reference", alone=True))]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_tokens_do_not_depend_on_how_they_are_made(model, expected, column):
    config = {"max_model_len": CONTEXT, "max_num_seqs": 16, **column.config}
    if "num_blocks" in config and model["model"] != BUNDLED:
        config["num_blocks"] *= 2
    with LLM(**model, dtype="float32", device="cpu", threads=1, **config) as llm:
        found = run(llm, column)
        stats = llm.stats()
    for i, sampling in enumerate(params()):
        assert found[i][0] == expected[i], f"prompt {i}"
        if sampling.greedy:
            assert all(tokens == expected[i] for tokens in found[i]), f"siblings of prompt {i}"
        else:
            assert len(set(map(tuple, found[i]))) == column.siblings, "siblings drew the same"
    if column.must == "hits":
        assert stats.prefix_hits > 0
    if column.must == "preemptions":
        assert stats.preemptions > 0
    assert stats.kv_usage == 0

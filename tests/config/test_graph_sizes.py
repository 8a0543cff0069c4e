"""The planned graph sizes on a GPU, and the memory reserved for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.configs import PUBLIC
from helpers.planned import decision, planned

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.draft_heads import MEDUSA, HeadsSpec
from kvik.config.graph_sizes import POOL_BYTES, decoding_sizes, graph_bytes, num_decoding_sizes
from kvik.config.hardware import Gpu, Hardware
from kvik.config.resolve import resolve
from kvik.config.speculative import NO_SOURCE, DraftSource
from kvik.errors import CapacityError
from kvik.models.model_spec import ModelSpec

GIB = 1 << 30
CARD = Gpu(0, "H100", 80 * GIB, 78 * GIB, (9, 0))
GPU = Hardware("PC", 8, 16 * GIB, "RAM available", frozenset(), gpus=(CARD,), triton=True)
SPEC = ModelSpec.from_config(PUBLIC["llama-3.2-1b"])


def plan(**options: Any) -> ResolvedConfig:
    return planned(SPEC, GPU, **options)


@pytest.mark.parametrize("max_num_seqs", [3, 64])
def test_captured_steps_are_planned(max_num_seqs: int) -> None:
    spec, sizes = SPEC, {"max_num_seqs": max_num_seqs, "max_model_len": 4096}
    resolved = plan(**sizes)
    captured = resolved.runner.graph_sizes
    assert captured == decoding_sizes(max_num_seqs)
    value, reason = decision(resolved, "cuda_graphs")
    assert value == f"{len(captured)} sizes up to {max_num_seqs} requests" and "planned" in reason
    without = plan(kernels="torch", **sizes)
    assert without.runner.graph_sizes == ()
    assert "cuda_graphs" not in [d.name for d in without.decisions]
    # Torch's attention plans a step on the host, so that nothing is captured or reserved.
    on_the_host = plan(attention_backend="sdpa", **sizes)
    assert on_the_host.runner.kernels == "triton" and on_the_host.runner.graph_sizes == ()
    assert on_the_host.memory.overhead == without.memory.overhead
    assert "cuda_graphs" not in [d.name for d in on_the_host.decisions]
    more = resolved.memory.overhead - without.memory.overhead
    assert more == resolved.runner.graph_memory
    logits = max_num_seqs * spec.vocab_size * 4
    assert more >= 2 * logits + len(captured) * graph_bytes(16) + POOL_BYTES
    assert more < 3 * logits + len(captured) * graph_bytes(16) + POOL_BYTES + (65 << 20)


def test_groups_capture_the_same_steps() -> None:
    """Each process has a GPU, for which the plan is made."""
    cards = replace(GPU, gpus=(CARD, replace(CARD, index=1)), native=True)
    one, two = (planned(SPEC, cards, max_num_seqs=16, tensor_parallel_size=n) for n in (1, 2))
    assert two.runner.graph_sizes == one.runner.graph_sizes == decoding_sizes(16)
    assert two.runner.graph_memory == one.runner.graph_memory


@pytest.mark.parametrize(
    ("asked", "decided"),
    [(0, ("none", "as asked")), (3 * GIB, ("requests", "3.0 GiB were asked for"))],
)
def test_graph_memory_is_planned_as_requested(asked: int, decided: tuple[str, str]) -> None:
    sizes = {"max_num_seqs": 64, "max_model_len": 4096}
    resolved = plan(graph_memory=asked, **sizes)
    assert resolved.runner.graph_memory == asked
    assert bool(resolved.runner.graph_sizes) == bool(asked)
    without = plan(kernels="torch", graph_memory=asked, **sizes)
    assert resolved.memory.overhead - without.memory.overhead == asked
    assert all(a in b for a, b in zip(decided, decision(resolved, "cuda_graphs"), strict=True))
    assert "cuda_graphs" not in [d.name for d in without.decisions]


@pytest.mark.parametrize(
    ("free", "options", "advice"),
    [
        (78 * GIB, {"graph_memory": 70 * GIB}, "; a smaller graph_memory would fit"),
        (
            78 * GIB,
            {"graph_memory": 70 * GIB, "kv_cache_memory": GIB},
            "; a smaller graph_memory would fit",
        ),
        (
            78 * GIB,
            {"graph_memory": 71 * GIB, "kv_cache_memory": 70 * GIB},
            "a smaller graph_memory and a smaller KV cache would fit",
        ),
        (78 * GIB, {"kv_cache_memory": 70 * GIB}, "a smaller KV cache would fit"),
        (42 * GIB // 10, {"graph_memory": GIB}, "; a smaller graph_memory would fit"),
        (4 * GIB, {}, "max_num_batched_tokens=64 would fit"),
        (4 * GIB, {"graph_memory": 0}, "max_num_batched_tokens=64 would fit"),
    ],
)
def test_graphs_that_do_not_fit_are_named(free: int, options: dict[str, Any], advice: str) -> None:
    small = replace(GPU, gpus=(replace(CARD, free_memory=free),))
    config = EngineConfig(**({"max_num_seqs": 64, "max_model_len": 4096} | options))
    with pytest.raises(CapacityError) as error:
        resolve(config, SPEC, small, "")
    message = str(error.value)
    assert message.endswith(advice)
    assert ("for CUDA graphs" in message) == bool(config.graph_memory)


def test_an_engine_without_memory_for_graphs_starts_without_them() -> None:
    def on(free: int) -> ResolvedConfig:
        small = replace(GPU, gpus=(replace(CARD, free_memory=free),))
        return planned(SPEC, small, max_num_seqs=64, max_model_len=4096)

    crowded = on(42 * GIB // 10)
    assert crowded.runner.graph_sizes == () and crowded.runner.graph_memory == 0
    value, reason = decision(crowded, "cuda_graphs")
    assert value == "none" and "no request would fit" in reason
    assert crowded.memory.total <= crowded.memory.limit
    roomy = on(5 * GIB)
    assert roomy.runner.graph_sizes and roomy.runner.graph_memory


def test_heads_are_captured_where_the_model_is_not() -> None:
    """Torch's attention plans a step on the host; heads do not attend."""
    spec = SPEC
    heads = HeadsSpec(MEDUSA, spec.hidden_size, spec.vocab_size, depth=4)
    config = EngineConfig(
        spec_method="medusa", spec_model="heads", attention_backend="sdpa", max_num_seqs=64
    )
    resolved = resolve(config, spec, GPU, "", DraftSource("heads", heads=heads))
    assert resolved.runner.graph_sizes == () and resolved.runner.draft_graph_sizes
    value, reason = decision(resolved, "cuda_graphs")
    assert value == f"{len(resolved.runner.draft_graph_sizes)} of the heads"
    assert reason.startswith("drafts are made by replaying them") and "planned" in reason


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_captured_steps_with_drafts_are_planned(method: str) -> None:
    spec, sizes = SPEC, {"max_num_seqs": 64, "max_model_len": 4096}
    source = DraftSource("draft", spec=SPEC) if method == "draft_model" else NO_SOURCE
    config = EngineConfig(spec_method=method, spec_tokens=5, **sizes)
    if source.spec is not None:
        config = replace(config, spec_model="draft")
    resolved = resolve(config, spec, GPU, "", source)
    assert resolved.memory.total <= resolved.memory.limit
    speculation, captured = resolved.speculation, resolved.runner.graph_sizes
    step = (64, 64 + speculation.max_draft_rows, 6, 64 + speculation.max_draft_rows)
    for size in captured:  # none is larger than the largest step
        assert (size.rows, size.tokens, size.longest, size.samples) <= step
        assert size.tokens <= step[1] and size.longest <= step[2] and not size.tree
    # For any numbers of drafts, some size is at most four times as large.
    for rows in (1, 3, 20, 64):
        for tokens in range(rows + 1, rows + min(rows * 5, speculation.max_draft_rows) + 1):
            fits = [s.tokens for s in captured if s.serves(rows, tokens, 6, tokens, tree=False)]
            assert fits and min(fits) <= 4 * tokens
    drafting = resolved.runner.draft_graph_sizes
    assert {size.longest for size in drafting} == ({1, 2} if source.spec else set())
    value, reason = decision(resolved, "cuda_graphs")
    assert "verifying" in reason and ("of the draft model" in value) == bool(drafting)
    without = resolve(replace(config, kernels="torch"), spec, GPU, "", source)
    more = resolved.memory.overhead - without.memory.overhead
    logits = step[1] * spec.vocab_size * 4
    assert more >= 2 * logits + (len(captured) + len(drafting)) * graph_bytes(16)


@pytest.mark.parametrize("most", [*range(1, 34), 64, 65, 1000])
def test_decoding_sizes_are_counted_and_the_last_is_the_largest(most: int) -> None:
    sizes = decoding_sizes(most)
    assert num_decoding_sizes(most) == len(sizes) == len(set(sizes))
    assert [size.rows for size in sizes] == sorted(size.rows for size in sizes)
    assert sizes[-1].rows == most
    assert all(size.tokens == size.samples == size.rows for size in sizes)

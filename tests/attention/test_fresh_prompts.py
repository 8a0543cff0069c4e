"""Fresh prompts computed by torch's kernels, and the rest of a step by Triton's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

import torch
from helpers.attention_backends import OPTIONS, make_backend, one_sequence
from helpers.optional_triton import INTERPRETED_ONLY

from kvik.attention.base import Attend, AttentionBackend, AttentionSpec, LayerKV
from kvik.attention.fresh_prompts import FreshPrompts
from kvik.attention.layout import StepLayout
from kvik.attention.triton import TritonAttention
from kvik.kernels.triton.ops import triton_ops

pytestmark = INTERPRETED_ONLY


@pytest.fixture
def backend() -> AttentionBackend:
    """Return the backend that stores the cached keys before a step."""
    return make_backend("reference")


class Noted(FreshPrompts):
    """Records the lengths of the prompts that it computes."""

    def __init__(self, least: int, padded: int) -> None:
        super().__init__(least, padded)
        self.taken: list[int] = []

    def attend(self, q, k, v, prompt, scale):
        self.taken.append(prompt.end - prompt.start)
        return super().attend(q, k, v, prompt, scale)


def mixed(least: int = 9) -> tuple[TritonAttention, Noted]:
    prompts = Noted(least, 8)
    return TritonAttention(triton_ops(torch.device("cpu")), prompts), prompts


STEPS = {
    "alone": ([(0, 16)], [16]),
    "lengthened": ([(0, 13)], [13]),
    "first": ([(0, 13), (5, 1), (20, 1)], [13]),
    "last": ([(5, 1), (20, 1), (0, 9)], [9]),
    "between and twice": ([(5, 1), (0, 11), (20, 1), (3, 12), (0, 12), (0, 3), (7, 1)], [11, 12]),
    "side by side": ([(0, 10), (0, 24), (4, 1)], [10, 24]),
    "none long enough": ([(0, 8), (30, 1)], []),
    "chunks behind a prefix": ([(4, 20), (0, 9)], [9]),
}


@pytest.mark.full
@pytest.mark.parametrize(("sequences", "taken"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("dim", [16, 12])
def test_matches_the_definition(make_step, sequences, taken, dim):
    attention, prompts = mixed()
    step = make_step(sequences, dim=dim)
    step.check(step.run(attention))
    assert prompts.taken == taken


def test_triton_computes_prompts_longer_than_the_window(make_step):
    attention, prompts = mixed()
    step = make_step([(0, 12), (3, 1), (0, 17), (0, 18)])
    step.check(step.run(attention, 17), 17)
    assert prompts.taken == [12, 17]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_triton_computes_layers_that_torch_does_not_support(make_step, options):
    """In the plan for the other layers."""
    attention, prompts = mixed()
    step = make_step([(0, 11), (3, 1)])
    special = replace(step, spec=AttentionSpec(0.3, **options))
    attend = special.attend(attention)
    plain = replace(attend, spec=step.spec, kv=LayerKV(step.kv.k.clone(), step.kv.v.clone()))
    step.check(attention.run(plain))
    special.check(attention.run(attend))
    assert prompts.taken == [11]


def test_triton_computes_heads_too_wide_for_torch(make_step):
    attention, prompts = mixed()
    for dim, taken in ((256, [11]), (264, [])):
        prompts.taken.clear()
        step = make_step([(0, 11), (3, 1)], dim=dim)
        step.check(step.run(attention), atol=2e-5)
        assert prompts.taken == taken


def test_trees_are_not_fresh_prompts(make_step):
    attention, prompts = mixed(least=2)
    step = make_step([(0, 3), (0, 2)])
    words = (0b1, 0b11, 0b101, 0, 0)
    step.layout = replace(step.layout, tree=torch.tensor(words), tree_words=words)
    step.check(step.run(attention))
    assert prompts.taken == [2]


@pytest.mark.full
def test_keys_are_rotated_and_stored_as_usual(make_step):
    """Torch's kernels read the cached keys, so that later steps see the same ones."""
    step = make_step([(0, 11), (6, 1)])
    rotation = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    kept = []
    results = []
    for attention in (mixed()[0], TritonAttention(triton_ops(torch.device("cpu")))):
        kv = replace(step.kv, k=step.kv.k.clone(), v=step.kv.v.clone())
        q, k, v = step.q.clone(), step.k.clone(), step.v.clone()
        metadata = attention.plan(step.layout, None)
        results.append(attention.run(Attend(q, k, v, kv, metadata, step.spec, rotation)))
        kept.append((kv.k.view(torch.int32), kv.v.view(torch.int32)))
    assert all(torch.equal(mine, other) for mine, other in zip(*kept, strict=True))
    torch.testing.assert_close(*results, rtol=1e-4, atol=2e-6)


def test_tokens_without_a_slot_cause_no_fault(make_step):
    """Warm-ups run such steps."""
    step = make_step([(0, 13)])
    step.layout = replace(step.layout, slot_mapping=torch.full((13,), -1))
    attention, prompts = mixed()
    before = step.kv.k.view(torch.int32).clone()
    step.run(attention)
    assert prompts.taken == [13] and torch.equal(step.kv.k.view(torch.int32), before)


def test_prompts_of_any_length_have_few_shapes():
    prompts, shapes = FreshPrompts(2048), set()
    for length in (2048, 2049, 3000, 3072, 5121, 8191, 8192):
        prompt = prompts.take(fresh(length), None)[0]
        shapes.add(len(prompt.keys))
        assert (prompt.tokens is None) == (length % 1024 == 0)
    assert shapes == {2048, 3072, 6144, 8192}
    assert not prompts.take(fresh(2047), None)


def fresh(length: int) -> StepLayout:
    """Return a step of one prompt."""
    blocks = -(-length // 16)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    return one_sequence(table, torch.arange(length), length)

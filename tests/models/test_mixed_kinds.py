"""Models with any mixture of layers: windows, caches, shared keys and states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.configs import small
from helpers.optional_native import needs_native
from helpers.paged_model import PagedModel
from helpers.tiers import examples
from helpers.tiny_models import tokens
from helpers.windows import chunks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvik.attention.base import AttentionBackend
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.models.model_spec import ModelSpec
from kvik.spec.experts import ExpertsSpec, Router
from kvik.spec.kv import StateSpec, block_bytes, group_layers
from kvik.spec.layers import LayerSpec
from kvik.spec.rope import RopeSpec
from kvik.spec.visible_keys import Window

HIDDEN, BLOCK = 32, 16
SEEN = st.sampled_from([None, None, Window(5), Window(40), chunks(7)])
ROPES = st.sampled_from([None, RopeSpec(), RopeSpec(theta=300.0)])
EXPERTS = ExpertsSpec(Router(4, 2, scaled=True), 16)


def base(architecture: str, **changes: Any) -> ModelSpec:
    config = small(architectures=[architecture], hidden_size=HIDDEN, head_dim=16, **changes)
    return ModelSpec.from_config({**config, "hidden_act": None, "max_position_embeddings": 128})


@st.composite
def attending(draw: st.DrawFn) -> ModelSpec:
    """Draw layers with heads of any size, some of which read the keys of others."""
    layers: list[LayerSpec] = []
    for _ in range(draw(st.integers(1, 5))):
        layer = LayerSpec(
            draw(SEEN),
            draw(ROPES),
            experts=draw(st.sampled_from([None, EXPERTS])),
            head_dim=draw(st.sampled_from([None, 32, 48])),
            kv_heads=draw(st.sampled_from([None, 1, 4])),
            value_is_key=draw(st.booleans()),
            inner=draw(st.sampled_from([None, 80])),
            token_input=16,
        )
        owners = [i for i, other in enumerate(layers) if other.kv_from is None]
        if owners and draw(st.booleans()):
            owner = draw(st.sampled_from(owners))
            other = layers[owner]
            layer = replace(
                layer,
                window=other.window,
                head_dim=other.head_dim,
                kv_heads=other.kv_heads,
                kv_from=owner,
            )
        layers.append(layer)
    return replace(base("Gemma4ForCausalLM"), layers=tuple(layers))


@st.composite
def with_states(draw: st.DrawFn) -> ModelSpec:
    """Draw layers that attend and layers with a state, in any order."""
    layers = [LayerSpec(draw(SEEN), draw(ROPES))]
    for _ in range(draw(st.integers(1, 4))):
        keeps = LayerSpec(state=StateSpec(HIDDEN, draw(st.integers(2, 4))))
        layers.append(draw(st.sampled_from([keeps, LayerSpec(draw(SEEN), draw(ROPES))])))
    order = draw(st.permutations(layers))
    return replace(base("Lfm2ForCausalLM", layer_types=["full_attention"] * 4), layers=tuple(order))


def native() -> tuple[Ops, AttentionBackend]:
    from kvik.attention.cpu import CpuAttention
    from kvik.kernels.cpu.native import Native
    from kvik.kernels.cpu.ops import native_ops

    kernels = Native(threads=1)
    ops = native_ops(kernels)
    return ops, CpuAttention(kernels, ops)


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=needs_native)])
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spec=st.one_of(attending(), with_states()), chunk=st.integers(1, 20))
def test_logits_do_not_depend_on_chunks_or_the_batch(
    kernels: str, spec: ModelSpec, chunk: int
) -> None:
    options: dict[str, Any] = {}
    if kernels == "native":
        options["ops"], options["backend"] = native()
    model = PagedModel(None, spec=spec, block_size=BLOCK, num_blocks=256, **options)
    ids = tokens(50, vocab=spec.vocab_size)
    whole = model.logits(ids)
    torch.testing.assert_close(model.logits(ids, chunk, 1), whole, atol=1e-4, rtol=0)
    # Two sequences in each step, one of them token by token with a longer chunk of the other.
    found = [model.step({2: ids[:40], 3: ids[:1]})[2]]
    found += [model.step({2: ids[i : i + 1], 3: ids[i - 39 : i - 38]})[2] for i in range(40, 50)]
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-4, rtol=0)
    if kernels == "native":
        plain = PagedModel(None, spec=spec, block_size=BLOCK, num_blocks=256, ops=REFERENCE)
        torch.testing.assert_close(whole, plain.logits(ids), atol=1e-3, rtol=0)


@settings(max_examples=examples(300), deadline=None)
@given(st.one_of(attending(), with_states()))
def test_every_layer_with_a_cache_has_its_bytes_in_one_group(spec: ModelSpec) -> None:
    model_specs = spec.kv_specs(2)
    groups = group_layers(model_specs)
    grouped = [layer for group in groups for layer in group.layers]
    assert sorted(grouped) == [i for i, kv in enumerate(model_specs) if kv is not None]
    assert sum(group.bytes_per_token for group in groups) == spec.kv_bytes_per_token(2)
    alike = [{replace(spec, readers=1) for spec in group.specs} for group in groups]
    assert all(len(specs) == 1 for specs in alike)
    largest = max(group.bytes_per_token for group in groups)
    assert block_bytes(groups, BLOCK) >= BLOCK * largest

"""Every backend compared with the definition of attention, including known pitfalls."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers.attention_backends import KV_FORMATS, NAMES, OPTIONS, STEPS, one_sequence
from helpers.tiers import examples
from helpers.windows import as_window, chunks, seen, sinks

from kvik.attention.base import Attend, AttentionSpec, BackendCaps, LayerKV
from kvik.config.compute import LANES
from kvik.errors import ConfigError


def with_backends(*sizes: int) -> list:
    """Return each backend with the block sizes or head sizes that it supports."""
    return [
        pytest.param(name, size, id=f"{name}-{size}")
        for name in NAMES
        for size in sizes
        if name != "cpu" or size % LANES == 0
    ]


def with_dtypes(*dtypes: torch.dtype) -> list:
    """Return each backend with the dtypes that it supports."""
    return [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in NAMES
        for dtype in dtypes
        if name != "cpu" or dtype != torch.float16
    ]


@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 60, *map(chunks, (1, 12, 16, 40))])
@pytest.mark.parametrize(
    ("backend", "block_size"), with_backends(1, 8, 16, 48, 64), indirect=["backend"]
)
@pytest.mark.parametrize("name", STEPS)
def test_matches_the_definition(backend, make_step, name, block_size, window):
    step = make_step(STEPS[name], block_size)
    step.check(step.run(backend, window), window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (6, 2), (5, 1)])
def test_query_heads_of_a_group_share_their_kv_head(backend, make_step, heads, kv_heads):
    step = make_step(STEPS["mixed"], 16, heads, kv_heads)
    step.check(step.run(backend))


@pytest.mark.parametrize(
    ("backend", "dim"), with_backends(1, 5, 16, 48, 64, 128, 256), indirect=["backend"]
)
def test_head_dims(backend, make_step, dim):
    step = make_step(STEPS["mixed"], dim=dim)
    step.check(step.run(backend), atol=5e-6)


@pytest.mark.parametrize("kv_dtype", KV_FORMATS.values(), ids=KV_FORMATS)
@pytest.mark.parametrize("name", ["decode batch", "chunk behind a prefix", "mixed"])
def test_values_narrower_than_keys(backend, make_step, name, kv_dtype):
    """Results are those of values that end in zeros."""
    step = make_step(STEPS[name], dim=48, kv_dtype=kv_dtype)
    narrow = step.narrowed(32).run(backend)
    assert narrow.shape[2] == 32
    if kv_dtype == torch.float32:
        step.narrowed(32).check(narrow)
    padded = replace(step, v=torch.nn.functional.pad(step.v[..., :32], (0, 16)))
    assert torch.equal(narrow, padded.run(backend)[..., :32])


@pytest.mark.parametrize("window", [None, 17, sinks(4, 17)], ids=str)
@pytest.mark.parametrize("name", ["decode batch", "chunk behind a prefix", "mixed"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_capped_scores_and_sinks(backend, make_step, options, name, window):
    step = replace(make_step(STEPS[name]), spec=AttentionSpec(0.3, **options))
    step = step.with_rotation(window)
    step.check(step.run(backend, window), window)


def test_options_that_a_backend_lacks_are_refused():
    caps = BackendCaps("plain", frozenset({"cpu"}), frozenset({torch.float32}), frozenset())
    caps.check(AttentionSpec(1.0))
    with pytest.raises(ConfigError, match="attention_backend: 'plain' has no sinks and no softcap"):
        caps.check(AttentionSpec(1.0, softcap=3.0, sinks=torch.zeros(2)))


@pytest.mark.parametrize(
    ("backend", "dtype"), with_dtypes(torch.bfloat16, torch.float16), indirect=["backend"]
)
@pytest.mark.parametrize("window", [None, 20])
def test_half_precision_is_off_by_rounding_alone(backend, make_step, dtype, window):
    step = make_step(STEPS["mixed"], dtype=dtype)
    found = step.run(backend, window)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), step.expected(window), rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize(
    "window",
    [
        *(None, 1, 2, 7, 16, 24, 100, *map(chunks, (1, 7, 16, 100))),
        *(sinks(2, 5), sinks(4, 16), sinks(40, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("cached", "new"), [(29, 1), (0, 30), (18, 12)])
def test_only_visible_keys_count(backend, make_step, cached, new, window):
    """With equal scores and one-hot values, a query's output shows which keys it saw."""
    context = cached + new
    one_hot = torch.eye(context, 32)[:, None]
    step = make_step([(cached, new)], 16, heads=1, kv_heads=1, dim=32, value=one_hot)
    step.q.zero_()
    step = step.with_rotation(window)
    for row, position in zip(step.run(backend, window)[:, 0], range(cached, context), strict=True):
        found = row.nonzero()[:, 0].tolist()
        assert found == seen(position, window)
        assert row[found].tolist() == pytest.approx([1 / len(found)] * len(found))


@pytest.mark.parametrize(
    ("window", "kept"), [(5, 0), (chunks(14), 0), (chunks(16), 0), (sinks(17, 5), 2)], ids=str
)
def test_garbage_outside_the_window_is_never_read(backend, make_step, window, kept):
    """Blocks outside the window may belong to other requests by now, or be block 0."""
    step = make_step([(116, 1), (100, 12)]).with_rotation(window)
    clean = step.run(backend, window)
    table = step.layout.block_table.clone()
    table[0, kept:7] = 0  # positions up to 111; the window begins at 112
    table[1, kept:6] = 0  # up to 95; the first query's window begins at 96
    dirty = replace(step, layout=replace(step.layout, block_table=table))
    assert torch.equal(dirty.run(backend, window), clean)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_unwritten_slots_are_never_used(backend, make_step, garbage):
    step = make_step(STEPS["mixed"])
    clean = step.run(backend)
    kv = LayerKV(*(t.where(t.isfinite(), garbage) for t in (step.kv.k, step.kv.v)))
    assert torch.equal(replace(step, kv=kv).run(backend), clean)


def test_padding_of_the_block_table_is_never_used(backend, make_step):
    step = make_step(STEPS["mixed"])
    clean = step.run(backend)
    for entry in range(len(step.kv.k)):
        table = step.layout.block_table.clone()
        for row, context in zip(table, step.layout.contexts, strict=True):
            row[-(-context // 16) :] = entry
        padded = replace(step, layout=replace(step.layout, block_table=table))
        assert torch.equal(padded.run(backend), clean)


def test_only_keys_and_values_of_the_step_are_written(backend, make_step):
    step = make_step(STEPS["mixed"])
    kv = step.copied_kv()
    backend.run(Attend(step.q, step.k, step.v, kv, backend.plan(step.layout, None), step.spec))
    slots = step.layout.slot_mapping
    for found, before, new in ((kv.k, step.kv.k, step.k), (kv.v, step.kv.v, step.v)):
        for block in range(len(found)):
            written = new[slots // step.layout.block_size == block]
            assert torch.equal(numbers(found[block]), numbers(before[block], written))
        if backend.caps.name != "cpu":  # it has its own order of elements in a block
            assert torch.equal(found.flatten(0, 1)[slots], new)


def numbers(*tensors: torch.Tensor) -> torch.Tensor:
    """Return all elements except NaN, sorted."""
    every = torch.cat([tensor.flatten() for tensor in tensors])
    return every[~every.isnan()].sort().values


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("window", [None, 9, chunks(11), sinks(3, 20), sinks(18, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_equal_one_prefill(backend, make_step, dtype, window, kv_format):
    """To the bit. "reference" and "sdpa" sum in another order."""
    total, kv_dtype = 70, KV_FORMATS[kv_format]
    whole = make_step([(0, total)], dtype=dtype, kv_dtype=kv_dtype, dim=32).with_rotation(window)
    expected, rotation = whole.run(backend, window), whole.sink_rotation
    bound = 2e-6 if dtype == torch.float32 else 4e-2
    for chunk in (1, 7, 13, 16, 33):
        kv = whole.copied_kv()
        for start in range(0, total, chunk):
            end = min(start + chunk, total)
            part = slice(start, end)
            layout = one_sequence(whole.layout.block_table, whole.layout.slot_mapping[part], end)
            rows = whole.q[part].clone(), whole.k[part].clone(), whole.v[part]
            plan = backend.plan(layout, as_window(window))
            turned = None if rotation is None else rotation[part].contiguous()
            found = backend.run(Attend(*rows, kv, plan, whole.spec, sink_rotation=turned))
            atol = 0 if backend.caps.name == "cpu" else bound
            torch.testing.assert_close(found, expected[part], rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_format", "window"),
    [
        *((None, window) for window in (None, 33, chunks(40), sinks(4, 33), sinks(33, 600))),
        *((kv_format, None) for kv_format in KV_FORMATS),
    ],
    ids=str,
)
def test_results_do_not_depend_on_the_batch(backend, make_step, dtype, kv_format, window):
    """To the bit, although longer sequences in a batch pad a decoding row further."""
    dtypes = {"dtype": dtype, "kv_dtype": KV_FORMATS.get(kv_format)}
    companions = [(0, 1), (900, 1), (14, 1), (0, 25), (300, 1), (40, 7), (77, 1)]
    for cached, new in [(0, 1), (6, 1), (37, 1), (150, 1), (511, 1), (20, 13), (0, 16)]:
        alone = make_step([(cached, new)], **dtypes).run(backend, window)
        crowd = make_step([*companions, (cached, new)], **dtypes)
        assert torch.equal(crowd.run(backend, window)[-new:], alone)


@pytest.mark.parametrize("window", [None, 20, chunks(20)])
def test_block_size_does_not_matter(backend, make_step, window):
    sizes = (16, 48, 64) if backend.caps.name == "cpu" else (1, 8, 16, 64)
    first, *others = (
        make_step(STEPS["mixed"], block_size).run(backend, window) for block_size in sizes
    )
    assert all(torch.equal(first, other) for other in others)


def test_one_plan_serves_layers_of_any_content(backend, make_step):
    """Layers share a plan, which must not depend on the first layer."""
    step = make_step(STEPS["mixed"])
    metadata = backend.plan(step.layout, None)
    for seed in (1, 2):
        layer = make_step(STEPS["mixed"], seed=seed)
        layer = replace(layer, layout=step.layout, kv=_moved(layer, step))
        kv = layer.copied_kv()
        layer.check(backend.run(Attend(layer.q, layer.k, layer.v, kv, metadata, step.spec)))


def _moved(step, target):
    """Return the cache of `step` in the blocks of `target`."""
    moved = step.copied_kv()
    for i, context in enumerate(step.layout.contexts):
        blocks = -(-context // step.layout.block_size)
        source = step.layout.block_table[i, :blocks].long()
        to = target.layout.block_table[i, :blocks].long()
        moved.k[to], moved.v[to] = step.kv.k[source], step.kv.v[source]
    return moved


def test_random_steps(backend, make_step):
    rng = random.Random(0)
    for seed in range(examples(60)):
        sequences = [
            (rng.choice([0, rng.randint(0, 90)]), rng.choice([1, 1, rng.randint(2, 40)]))
            for _ in range(rng.randint(1, 6))
        ]
        window = rng.choice([None, rng.randint(1, 50)])
        sizes = [16, 32, 64] if backend.caps.name == "cpu" else [1, 8, 16, 64]
        step = make_step(sequences, rng.choice(sizes), seed=seed)
        step.check(step.run(backend, window), window)

"""Every backend on trees of drafts, and moves of accepted paths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.attention_backends import KV_FORMATS as FORMATS
from helpers.attention_backends import NAMES, OPTIONS, PARENTS, one_sequence, tree_words
from helpers.windows import as_window, chunks, sinks

from kvik.attention.base import Attend, AttentionSpec

formats = pytest.mark.parametrize("format", FORMATS)
windows = pytest.mark.parametrize(
    "window",
    [
        *(None, 1, 3, 20, chunks(3), chunks(64)),
        *(sinks(1, 3), sinks(4, 20), sinks(64, 4), sinks(9, 400)),
    ],
    ids=str,
)

TREE = tree_words(PARENTS)


def paths() -> list[list[int]]:
    return [[j for j in range(len(TREE)) if word >> j & 1] for word in TREE]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@windows
@pytest.mark.parametrize("cached", [0, 2, 5, 60, 300])
@pytest.mark.parametrize("options", [{}, OPTIONS["alibi"]], ids=["plain", "alibi"])
def test_a_node_sees_its_path(backend, make_step, cached, window, options):
    """In a batch with plain sequences, which are not affected."""
    plain = [(12, 1), (30, 20)]
    step = make_step([plain[0], (cached, len(TREE)), plain[1]])
    step = replace(
        step.with_trees((), TREE, ()).with_rotation(window), spec=AttentionSpec(0.3, **options)
    )
    step.check(step.run(backend, window), window)


def test_several_trees_of_different_sizes(backend, make_step):
    sequences = [(40, 1), (7, 12), (33, 5), (90, 3)]
    step = make_step(sequences).with_trees((1,), TREE, TREE[:5], (1, 3, 5))
    step.check(step.run(backend))


def decode_of(make_step, step, path, cached, dtype, kv_dtype, backend):
    """Decode a path's last node after the others, one by one."""
    alone = make_step([(cached, len(TREE))], dtype=dtype, kv_dtype=kv_dtype, dim=32)
    kv, found = alone.kv, None
    for depth, node in enumerate(path):
        end = cached + depth + 1
        slots = alone.layout.slot_mapping[depth : depth + 1]
        layout = one_sequence(alone.layout.block_table, slots, end)
        q, k, v = (x[node : node + 1] for x in (alone.q, alone.k, alone.v))
        found = backend.run(Attend(q, k, v, kv, backend.plan(layout, as_window(step)), alone.spec))
    return found, alone


# "reference" multiplies several queries in another order.
@formats
@pytest.mark.parametrize("window", [None, 3, chunks(5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [name for name in NAMES if name != "reference"], indirect=True)
def test_a_node_has_the_bits_of_a_decode_at_its_place(backend, make_step, format, dtype, window):
    kv_dtype, cached = FORMATS[format], 59
    step = make_step([(cached, len(TREE))], dtype=dtype, kv_dtype=kv_dtype, dim=32)
    found = step.with_trees(TREE).run(backend, window)
    for node, path in enumerate(paths()):
        decoded, _ = decode_of(make_step, window, path, cached, dtype, kv_dtype, backend)
        assert torch.equal(bits(found[node]), bits(decoded[0]))


@formats
def test_a_moved_path_equals_the_cache_of_single_decodes(backend, make_step, format):
    """To the bit, in the places that later tokens see."""
    kv_dtype, cached = FORMATS[format], 59
    path = paths()[10]
    step = make_step([(cached, len(TREE))], kv_dtype=kv_dtype, dim=32)
    step = step.with_trees(TREE)
    plan = backend.plan(step.layout, None)
    backend.run(Attend(step.q, step.k, step.v, step.kv, plan, step.spec))
    slots = step.layout.slot_mapping
    backend.move(step.kv, slots[path], slots[: len(path)])
    _, alone = decode_of(make_step, None, path, cached, torch.float32, kv_dtype, backend)

    # A decode after the path, on either cache.
    end = cached + len(path) + 1
    layout = one_sequence(step.layout.block_table, slots[len(path) : len(path) + 1], end)
    results = [
        backend.run(Attend(x.q[-1:], x.k[-1:], x.v[-1:], x.kv, backend.plan(layout, None), x.spec))
        for x in (step, alone)
    ]
    assert torch.equal(bits(results[0]), bits(results[1]))


def test_a_move_changes_no_other_place(backend, make_step):
    step = make_step([(20, 12), (7, 1)])
    backend.run(step.attend(backend))
    kv = step.copied_kv()
    slots = step.layout.slot_mapping
    backend.move(kv, slots[[3, 7]], slots[[1, 2]])
    changed = (kv.k.view(torch.int32) != step.kv.k.view(torch.int32)).sum()
    assert changed == 2 * step.k.shape[1] * step.k.shape[2]
    backend.move(kv, slots[:0], slots[:0])


@formats
def test_a_move_within_a_block_whose_places_overlap(backend, make_step, format):
    """Each source was a target before, or is one afterwards, also across blocks."""
    kv_dtype = FORMATS[format]
    step = make_step([(0, 40)], kv_dtype=kv_dtype, dim=32)
    backend.run(step.attend(backend))
    slots = step.layout.slot_mapping
    source, target = list(range(5, 40, 2)), list(range(3, 21))
    backend.move(step.kv, slots[source], slots[target])
    other = make_step([(0, 40)], kv_dtype=kv_dtype, dim=32)
    kept = list(range(40))
    for place, token in zip(target, source, strict=True):
        kept[place] = token
    k, v = (x[kept] for x in (other.k, other.v))
    backend.run(Attend(other.q, k, v, other.kv, backend.plan(other.layout, None), other.spec))
    end = one_sequence(step.layout.block_table, slots[-1:], 40)
    results = [
        backend.run(
            Attend(step.q[:1], step.k[:1], step.v[:1], kv, backend.plan(end, None), step.spec)
        )
        for kv in (step.kv, other.kv)
    ]
    assert torch.equal(bits(results[0]), bits(results[1]))

"""The Triton kernels: on a GPU if there is one, else in Triton's interpreter with few, small cases.

Steps are those of the other backends' tests. The reference stores the cached keys, since both have
torch's order inside a block.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

import torch
from helpers.attention_backends import OPTIONS, PARENTS, make_backend, tree_words
from helpers.optional_triton import device
from helpers.windows import Seen, as_window, chunks, sinks
from torch import Tensor

from kvik.attention.base import Attend, AttentionBackend, AttentionSpec, LayerKV, store
from kvik.attention.triton import TritonAttention
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.triton import attention_paged
from kvik.kernels.triton.attention_paged import PagedCache, Scoring, paged_attention

FORMATS = {
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
formats = pytest.mark.parametrize("format", FORMATS)
TREE = tree_words(PARENTS[:8])


@pytest.fixture
def backend() -> AttentionBackend:
    """Return the backend that stores the cached keys before a step."""
    return make_backend("reference")


@pytest.fixture(params=["split", "prefill"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose the kernel for sequences of several queries, for any size."""
    if request.param == "prefill":
        monkeypatch.setattr(attention_paged, "query_classes", lambda group, kv_heads: (1,))
    return request.param


def there(value):
    """Move a tensor, or a dataclass of tensors, to the device of the kernels."""
    if value is None or isinstance(value, Tensor):
        return value if value is None else value.to(device())
    moved = {n: getattr(value, n) for n in value.__dataclass_fields__}
    return type(value)(
        **{n: x.to(device()) if isinstance(x, Tensor) else x for n, x in moved.items()}
    )


def attend(step, window: Seen = None) -> Tensor:
    """Run only attention; tests/kernels/triton/test_rotate_and_store.py tests the store."""
    kv = LayerKV(*(t if t is None else t.clone() for t in _tensors(step.kv)))
    store(TORCH, step.k, step.v, kv, step.layout.slot_mapping)
    # On a CPU, the strided view itself.
    q = step.q if device().type == "cpu" else step.q.to(device())
    plan = TritonAttention(TORCH).plan(there(step.layout), as_window(window))
    cache = PagedCache(*_tensors(there(kv)))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scoring = there(Scoring(step.spec.scale, step.spec.softcap, step.spec.sinks, step.spec.slopes))
    sink_q = None if step.sink_rotation is None else step.sink_q.to(q)
    paged_attention(q, cache, plan.steps[0], scoring, out, sink_q)
    return out.cpu()


def _tensors(kv: LayerKV) -> tuple[Tensor | None, ...]:
    return kv.k, kv.v, kv.k_scales, kv.v_scales


# Sequences of (cached, new) tokens; heads, KV heads and head_dim; the error; and windows.
CASES = [
    ([(12, 1), (0, 9), (33, 1), (0, 1), (50, 18)], (4, 2, 16), 2e-6, [None, 17, chunks(13)]),
    ([(70, 20), (130, 1)], (1, 1, 16), 2e-6, [1, 64, *map(chunks, (1, 64, 75))]),  # across tiles
    (
        [(12, 1), (0, 9), (93, 1), (0, 1), (50, 18), (0, 80)],
        *((2, 1, 16), 2e-6, [sinks(*n) for n in ((1, 1), (4, 20), (17, 40), (70, 9), (3, 600))]),
    ),
    ([(700, 1), (300, 40)], (2, 1, 16), 2e-6, [sinks(4, 252), sinks(300, 30)]),  # several splits
    ([(300, 1), (20, 3)], (4, 1, 16), 2e-6, [None, 150]),  # three splits, and one
    # Groups of any size use a tile.
    *(([(12, 1), (33, 9)], (*heads, 16), 2e-6, [None]) for heads in ((6, 3), (18, 1))),
    *(([(12, 1), (33, 9)], (2, 1, dim), 5e-6, [None]) for dim in (5, 80)),
    # As in Gemma 4, with their own tiles: several of these, and several splits.
    ([(140, 1), (3, 20)], (2, 1, 512), 2e-5, [None, 17, sinks(4, 20)]),
]


@pytest.mark.parametrize(
    ("sequences", "heads", "atol", "window"),
    [(*case, window) for *case, windows in CASES for window in windows],
    ids=str,
)
def test_matches_the_definition(kernel, make_step, sequences, heads, atol, window):
    """Also for queries that are rotated separately for sinks."""
    step = make_step(sequences, 16, *heads)
    step.check(attend(step, window), window, atol)
    if (rotated := step.with_rotation(window)) is not step:
        rotated.check(attend(rotated, window), window, atol)


@pytest.mark.parametrize("firsts", [(3, 0, 260, 85), (30, 0, 0, 17)], ids=str)
def test_keys_before_the_first_one_are_ignored(kernel, make_step, firsts):
    """Keys that layers dropped: neither seen nor read."""
    step = make_step([(50, 1), (0, 9), (300, 1), (90, 20)], 16, 2, 1)
    layout = replace(step.layout, first_keys=torch.tensor(firsts, dtype=torch.int32), firsts=firsts)
    expected = replace(step, layout=layout).run(make_backend("reference"))
    table = step.layout.block_table.clone()
    for row, first in zip(table, firsts, strict=True):
        row[: first // 16] = 0
    found = attend(replace(step, layout=replace(layout, block_table=table)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=4e-6)
    assert not torch.allclose(found, attend(step), rtol=1e-2, atol=1e-2)


def test_values_narrower_than_keys(make_step):
    step = make_step([(12, 1), (0, 9)], 16, 2, 1, 32).narrowed(16)
    step.kv = there(step.kv)
    backend = TritonAttention(TORCH)
    q, k, v, layout = (there(x) for x in (step.q, step.k, step.v, step.layout))
    found = backend.run(Attend(q, k, v, step.kv, backend.plan(layout, None), step.spec))
    step.check(found.cpu())


@pytest.mark.parametrize("window", [None, sinks(4, 20)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_capped_scores_and_sinks(kernel, make_step, options, window):
    """In one split and in several, and in tiles that every row sees."""
    spec = AttentionSpec(0.3, **options)
    step = replace(make_step([(12, 1), (70, 9), (0, 3), (300, 1)]), spec=spec)
    step = step.with_rotation(window)
    step.check(attend(step, window), window)


def test_a_tree_of_heads_of_512(make_step):
    step = make_step([(12, 1), (33, len(TREE))], 16, 4, 1, 512).with_trees((), TREE)
    step.check(attend(step), atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_off_by_rounding_alone(kernel, make_step, dtype):
    step = make_step([(12, 1), (33, 9)], dtype=dtype)
    found, eps = attend(step, 20), torch.finfo(dtype).eps
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), step.expected(20), rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize(
    ("heads", "atol", "window"),
    [
        ((3, 3, 32), 4e-6, None),  # an odd number of KV heads, with two scales per word
        ((3, 3, 32), 4e-6, sinks(5, 20)),
        ((2, 1, 512), 2e-5, None),
    ],
    ids=str,
)
@formats
def test_attends_over_rounded_keys_and_values(kernel, make_step, format, heads, atol, window):
    step = make_step([(60, 1), (30, 7)], 16, *heads, kv_dtype=FORMATS[format])
    step = step.with_rotation(window)
    expected = step.run(make_backend("reference"), window)
    torch.testing.assert_close(attend(step, window), expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_small_values_in_fp16(make_step, format):
    """A weight times a scale of 2e-6 would keep five bits in fp16."""
    value = 1e-4 * torch.randn(21, 2, 32, generator=torch.Generator().manual_seed(0))
    dtypes = {"dtype": torch.float16, "kv_dtype": FORMATS[format]}
    step = make_step([(20, 1)], dim=32, value=value.half(), **dtypes)
    expected = step.run(make_backend("reference"))
    torch.testing.assert_close(attend(step), expected, rtol=0, atol=2e-7)


@pytest.mark.full
@pytest.mark.parametrize("window", [None, sinks(9, 200)], ids=str)
def test_results_do_not_depend_on_the_batch(make_step, monkeypatch, window):
    """To the bit, for any number of programs per split, with and without merging, and for any
    number of launches."""
    shape = {"heads": 2, "kv_heads": 1, "dtype": torch.bfloat16}
    for sequence in [(37, 1), (270, 1)]:
        alone = attend(make_step([sequence], **shape), window)
        crowd = make_step([(290, 1), (0, 9), sequence], **shape)
        assert torch.equal(attend(crowd, window)[-1:], alone)
    for name in ("LAUNCHED", "ENOUGH", "WORKSPACE"):
        monkeypatch.setattr(attention_paged, name, 1)
        assert torch.equal(attend(crowd, window)[-1:], alone)
        monkeypatch.undo()


def test_block_size_does_not_matter(kernel, make_step):
    sequences = [(50, 1), (100, 7)]  # one has several tiles that every row sees
    first, *others = (attend(make_step(sequences, size, 2, 1)) for size in (16, 1, 48))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("window", "kept"), [(5, 0), (sinks(6, 5), 2)], ids=str)
def test_garbage_outside_the_window_is_never_read(kernel, make_step, window, kept):
    """Blocks outside the window may belong to other requests by now, or be block 0."""
    step = make_step([(116, 1), (106, 12)], 4).with_rotation(window)
    table = step.layout.block_table.clone()
    table[0, kept:28] = 0  # positions up to 111; the window begins at 112
    table[1, kept:25] = 0  # up to 99; the first query's window begins at 102, within a tile
    dirty = replace(step, layout=replace(step.layout, block_table=table))
    assert torch.equal(attend(dirty, window), attend(step, window))


@pytest.mark.parametrize(
    ("cached", "window"),
    [
        *product([33], [None, 3]),
        # Nodes may be sinks.
        *product([0, 2, 33], [sinks(1, 3), sinks(4, 2), sinks(9, 40)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, OPTIONS["alibi"]], ids=["plain", "alibi"])
def test_a_node_sees_its_path(make_step, cached, window, options):
    """In a batch with plain sequences, which are not affected."""
    step = make_step([(12, 1), (cached, len(TREE)), (30, 3), (0, 4)])
    step = step.with_trees((), TREE, (), TREE[:4]).with_rotation(window)
    step = replace(step, spec=AttentionSpec(0.3, **options))
    step.check(attend(step, window), window)


@pytest.mark.full
def test_the_largest_tree_across_splits(make_step):
    nodes = [1]
    for parent in range(62):
        nodes.append(nodes[parent // 2] | 1 << (parent + 1))
    step = make_step([(100, 63)], 16, 1, 1).with_trees(tuple(nodes))
    step.check(attend(step))


def test_a_captured_step_serves_any_lengths(make_step):
    """The plan only has maxima. Padding rows have no keys and store nothing; a row may have fewer
    queries than were captured."""
    step = make_step([(40, 3), (150, 1), (0, 1)], 16, 2, 1)
    expected = attend(step)
    slots = step.layout.slot_mapping.clone()
    lens = step.layout.seq_lens.clone()
    slots[-1], lens[-1] = -1, 0
    captured = replace(
        step.layout,
        seq_lens=lens,
        slot_mapping=slots,
        num_scheduled=(3, 3, 3),
        contexts=(500, 500, 500),
    )
    backend = TritonAttention(TORCH)
    q, k, v, kv = (there(x) for x in (step.q, step.k, step.v, step.kv))
    found = backend.run(Attend(q, k, v, kv, backend.plan(there(captured), None), step.spec)).cpu()
    assert torch.equal(found[:4], expected[:4])
    assert not found[4].any()

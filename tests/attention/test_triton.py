"""The Triton kernels: on a GPU if there is one, else in Triton's interpreter with few, small cases.

Steps are those of the other backends' tests. The reference stores the cached keys, since both have
torch's order inside a block.
"""

from __future__ import annotations

from dataclasses import replace

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
windows = pytest.mark.parametrize("window", [None, 17, chunks(13)])
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
    scoring = Scoring(step.spec.scale, step.spec.softcap, there(step.spec.sinks))
    sink_q = None if step.sink_rotation is None else step.sink_q.to(q)
    paged_attention(q, cache, plan.steps[0], scoring, out, sink_q)
    return out.cpu()


def _tensors(kv: LayerKV) -> tuple[Tensor | None, ...]:
    return kv.k, kv.v, kv.k_scales, kv.v_scales


@windows
def test_matches_the_definition(kernel, make_step, window):
    step = make_step([(12, 1), (0, 9), (33, 1), (0, 1), (50, 18)])
    step.check(attend(step, window), window)


@pytest.mark.parametrize("window", [1, 64, chunks(1), chunks(64), chunks(75)])
def test_windows_across_tiles(kernel, make_step, window):
    step = make_step([(70, 20), (130, 1)], 16, 1, 1)
    step.check(attend(step, window), window)


@pytest.mark.parametrize(
    "window", [sinks(1, 1), sinks(4, 20), sinks(17, 40), sinks(70, 9), sinks(3, 600)], ids=str
)
def test_sinks_of_a_window_have_their_own_queries(kernel, make_step, window):
    """Also for queries that are rotated for them as for all keys."""
    sequences = [(12, 1), (0, 9), (93, 1), (0, 1), (50, 18), (0, 80)]
    step = make_step(sequences, 16, 2, 1).with_rotation()
    for each in (step, replace(step, sink_rotation=None)):
        each.check(attend(each, window), window)


@pytest.mark.parametrize("window", [sinks(4, 252), sinks(300, 30)], ids=str)
def test_sinks_with_several_splits(kernel, make_step, window):
    step = make_step([(700, 1), (300, 40)], 16, 2, 1).with_rotation()
    step.check(attend(step, window), window)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sinks_of_a_window_with_other_options(kernel, make_step, options):
    spec = AttentionSpec(0.3, **options)
    step = replace(make_step([(70, 9), (300, 1)]), spec=spec).with_rotation()
    step.check(attend(step, sinks(4, 20)), sinks(4, 20))


@formats
def test_sinks_in_few_bits(kernel, make_step, format):
    step = make_step([(60, 1), (30, 7)], 16, 3, 3, 32, kv_dtype=FORMATS[format]).with_rotation()
    window = sinks(5, 20)
    expected = step.run(make_backend("reference"), window)
    torch.testing.assert_close(attend(step, window), expected, rtol=1e-4, atol=4e-6)


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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_capped_scores_and_sinks(kernel, make_step, options):
    """In one split and in several, and in tiles that every row sees."""
    spec = AttentionSpec(0.3, **options)
    step = replace(make_step([(12, 1), (70, 9), (0, 3), (300, 1)]), spec=spec)
    step.check(attend(step))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (18, 1)])
def test_groups_of_any_size_use_a_tile(kernel, make_step, heads, kv_heads):
    step = make_step([(12, 1), (33, 9)], 16, heads, kv_heads)
    step.check(attend(step))


@pytest.mark.parametrize("dim", [5, 80])
def test_head_dims(kernel, make_step, dim):
    step = make_step([(12, 1), (33, 9)], 16, 2, 1, dim)
    step.check(attend(step), atol=5e-6)


@pytest.mark.parametrize("window", [None, 17, sinks(4, 20)], ids=str)
def test_heads_of_512(kernel, make_step, window):
    """As in Gemma 4, with their own tiles: several of these, and several splits."""
    step = make_step([(140, 1), (3, 20)], 16, 2, 1, 512)
    step = step.with_rotation() if isinstance(window, tuple) else step
    step.check(attend(step, window), window, atol=2e-5)


@formats
def test_heads_of_512_in_few_bits(kernel, make_step, format):
    step = make_step([(20, 1), (30, 7)], 16, 2, 1, 512, kv_dtype=FORMATS[format])
    expected = step.run(make_backend("reference"))
    torch.testing.assert_close(attend(step), expected, rtol=1e-4, atol=2e-5)


def test_a_tree_of_heads_of_512(make_step):
    step = make_step([(12, 1), (33, len(TREE))], 16, 4, 1, 512).with_trees((), TREE)
    step.check(attend(step), atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_off_by_rounding_alone(kernel, make_step, dtype):
    step = make_step([(12, 1), (33, 9)], dtype=dtype)
    found, eps = attend(step, 20), torch.finfo(dtype).eps
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), step.expected(20), rtol=2 * eps, atol=2 * eps)


@formats
def test_attends_over_rounded_keys_and_values(kernel, make_step, format):
    """Also of an odd number of KV heads, with two scales per word."""
    step = make_step([(20, 1), (30, 7)], 16, 3, 3, 32, kv_dtype=FORMATS[format])
    expected = step.run(make_backend("reference"))
    torch.testing.assert_close(attend(step), expected, rtol=1e-4, atol=4e-6)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_small_values_in_fp16(make_step, format):
    """A weight times a scale of 2e-6 would keep five bits in fp16."""
    value = 1e-4 * torch.randn(21, 2, 32, generator=torch.Generator().manual_seed(0))
    dtypes = {"dtype": torch.float16, "kv_dtype": FORMATS[format]}
    step = make_step([(20, 1)], dim=32, value=value.half(), **dtypes)
    expected = step.run(make_backend("reference"))
    torch.testing.assert_close(attend(step), expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("window", [None, 150])
def test_long_contexts_are_split_and_merged(make_step, window):
    """In three splits, in a step whose other sequence has one."""
    step = make_step([(300, 1), (20, 3)], 16, 4, 1)
    step.check(attend(step, window), window)


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


def test_garbage_outside_the_window_is_never_read(kernel, make_step):
    """Blocks outside the window may belong to other requests by now, or be block 0."""
    step = make_step([(116, 1), (106, 12)], 4)
    table = step.layout.block_table.clone()
    table[0, :28] = 0  # positions 0..111; the window begins at 112
    table[1, :25] = 0  # positions 0..99; the first query's window begins at 102, within a tile
    dirty = replace(step, layout=replace(step.layout, block_table=table))
    assert torch.equal(attend(dirty, 5), attend(step, 5))


def test_garbage_between_sinks_and_window_is_never_read(kernel, make_step):
    step, window = make_step([(116, 1), (106, 12)], 4).with_rotation(), sinks(6, 5)
    table = step.layout.block_table.clone()
    table[0, 2:28] = 0  # positions 8..111; the window begins at 112
    table[1, 2:25] = 0  # positions 8..99; the first query's window begins at 102
    dirty = replace(step, layout=replace(step.layout, block_table=table))
    assert torch.equal(attend(dirty, window), attend(step, window))


@pytest.mark.parametrize("cached", [0, 2, 33])
@pytest.mark.parametrize("window", [sinks(1, 3), sinks(4, 2), sinks(9, 40)], ids=str)
def test_a_node_sees_sinks_even_if_nodes_are_sinks(make_step, cached, window):
    step = make_step([(12, 1), (cached, len(TREE)), (30, 3)])
    step = step.with_trees((), TREE, ()).with_rotation()
    step.check(attend(step, window), window)


@pytest.mark.parametrize("window", [None, 3])
def test_a_node_sees_its_path(make_step, window):
    """In a batch with plain sequences, which are not affected."""
    step = make_step([(12, 1), (33, len(TREE)), (30, 3), (0, 4)])
    step = step.with_trees((), TREE, (), TREE[:4])
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

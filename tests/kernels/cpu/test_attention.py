"""Native attention: its results, and that no bit depends on how steps are divided."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers.attention_backends import OPTIONS
from helpers.native import call, normal, runtimes
from helpers.native_cache import NativeCache, Part, attend
from helpers.windows import Seen, chunks, seen, sinks
from torch import Tensor

F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8
FP8, I4 = torch.float8_e4m3fn, torch.uint8
ALL_DTYPES = [(dtype, kv_dtype) for kv_dtype in (F32, BF16, I8, FP8, I4) for dtype in (BF16, F32)]
DTYPES = [(F32, F32), (BF16, BF16), (BF16, I8), (F32, FP8), (BF16, I4)]
# Errors relative to the largest value: fp32 sums; bf16 weights and results.
BOUNDS = {F32: 2e-6, BF16: 8e-3}
OF_SCORES = ("softcap", "sinks", "slopes")  # options that the definition has
name = "{0}".format
dtypes = pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES, ids=name)


@dataclass
class Sequences:
    """Random sequences with their K and V, all positions' queries, and places in a cache."""

    contexts: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = F32
    kv_dtype: torch.dtype = F32
    block_size: int = 16
    seed: int = 0
    blocks: list[Tensor] = field(init=False)  # per sequence, int32

    def __post_init__(self) -> None:
        counts = [-(-context // self.block_size) for context in self.contexts]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(self.seed))
        self.blocks = list(order[: sum(counts)].int().split(counts))
        self.num_blocks = len(order)
        # Contents only depend on the sequence's number and the position.
        self.q = self._draw(0, self.heads)
        self.k, self.v = self._draw(1, self.kv_heads), self._draw(2, self.kv_heads)

    def _draw(self, what: int, heads: int) -> list[Tensor]:
        return [
            normal(context, heads, self.head_dim, seed=100 * i + what, dtype=self.dtype)
            for i, context in enumerate(self.contexts)
        ]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def cache(self) -> NativeCache:
        return NativeCache(
            self.num_blocks, self.kv_heads, self.block_size, self.head_dim, self.kv_dtype
        )

    def slots(self, i: int, begin: int, end: int) -> Tensor:
        at = torch.arange(begin, end)
        return self.blocks[i][at // self.block_size].long() * self.block_size + at % self.block_size

    def store(self, runtime, cache: NativeCache, i: int, begin: int, end: int) -> None:
        k, v = self.k[i][begin:end], self.v[i][begin:end]
        cache.store(runtime, k, v, self.slots(i, begin, end))

    def filled(self, runtime) -> NativeCache:
        cache = self.cache()
        for i, context in enumerate(self.contexts):
            self.store(runtime, cache, i, 0, context)
        return cache

    def part(self, i: int, begin: int, end: int, tree: Tensor | None = None) -> Part:
        """Return a part with queries [begin, end) of sequence i."""
        return Part(self.q[i][begin:end], end, self.blocks[i][: -(-end // self.block_size)], tree)

    def run(self, runtime, spans: list[tuple[int, int, int]], window: Seen = None) -> list[Tensor]:
        """Run a step of spans (sequence, begin, end) over a cache with all positions."""
        parts = [self.part(*span) for span in spans]
        return attend(runtime, self.filled(runtime), parts, self.scale, window)

    def expected(
        self,
        runtime,
        cache: NativeCache,
        i: int,
        begin: int,
        end: int,
        visible: Tensor,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        negated: int = 0,
        added: Tensor | None = None,
    ) -> Tensor:
        """Return [queries, heads, head_dim] in float64; visible: [queries, end]; negated: scores of
        the first keys are multiplied by -1; added: to scores, [heads, queries, end]."""
        k, v = cache.load(runtime, self.slots(i, 0, end), F32)
        k, v = (x.double().repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", self.q[i][begin:end].double(), k) * self.scale
        scores[..., :negated] *= -1
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        if slopes is not None:
            distance = torch.arange(end) - torch.arange(begin, end)[:, None]
            scores = scores + slopes.double()[:, None, None] * distance
        if added is not None:
            scores = scores + added.double()
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat((scores, column), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :end], v)


def of_each_kind(runtimes: list) -> list:
    """Return one instruction set per vector width; others of that width run the same code."""
    kinds = ("portable", "avx2", "avx512_bf16", "amx", "amx_emulated", "neon", "neon_i8mm")
    return [p for p in runtimes if p.values[0].isa in kinds]


def causal(begin: int, end: int, window: Seen = None) -> Tensor:
    """Return [end - begin, end] bool."""
    visible = torch.zeros(end - begin, end, dtype=torch.bool)
    for position in range(begin, end):
        visible[position - begin, seen(position, window)] = True
    return visible


def random_tree(size: int, seed: int) -> Tensor:
    """Return [size, size] bool of a random tree: each token sees itself and its ancestors."""
    generator = torch.Generator().manual_seed(seed)
    tree = torch.eye(size, dtype=torch.bool)
    for i in range(1, size):
        parent = int(torch.randint(-1, i, (), generator=generator))
        if parent >= 0:
            tree[i] |= tree[parent]
    return tree


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=BOUNDS[found.dtype] * 4)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and not bool(expected.isnan().any())
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


# heads, kv_heads, head_dim, block_size; spans: context and queries of each sequence; window
CASES = {
    "one key": (4, 2, 32, 16, [(1, 1)], None),
    "decodes": (4, 2, 32, 16, [(n, 1) for n in (2, 15, 16, 17, 63, 64, 65, 130)], None),
    "several splits": (4, 2, 16, 64, [(511, 1), (512, 1), (513, 1), (1100, 1)], None),
    "every head of its own": (3, 3, 48, 16, [(70, 1), (5, 5), (66, 9)], None),
    "seven heads a group": (14, 2, 64, 32, [(100, 1), (33, 33)], None),
    "one kv head": (70, 1, 16, 16, [(80, 1), (20, 3)], None),
    "odd head_dim": (2, 1, 112, 16, [(40, 1), (40, 40)], None),
    "largest head_dim": (2, 1, 256, 16, [(70, 1), (18, 18)], None),
    "prefill": (4, 2, 32, 16, [(130, 130)], None),
    "behind a prefix": (4, 2, 32, 48, [(200, 77), (600, 70)], None),
    "mixed": (4, 2, 32, 16, [(90, 1), (90, 90), (5, 0), (30, 1), (80, 16), (0, 0)], None),
    "window": (4, 2, 32, 16, [(n, 1) for n in (1, 20, 21, 64, 65, 84, 85)] + [(150, 150)], 20),
    "window of one": (4, 2, 32, 16, [(70, 70), (70, 1)], 1),
    "window over splits": (2, 1, 16, 16, [(1300, 1), (1100, 40)], 600),
    "window wider than all": (4, 2, 32, 16, [(70, 70), (70, 1)], 1000),
    "chunk": (
        4,
        2,
        32,
        16,
        [(n, 1) for n in (1, 20, 21, 64, 65, 84, 85)] + [(150, 150)],
        chunks(20),
    ),
    "chunk of one": (4, 2, 32, 16, [(70, 70), (70, 1)], chunks(1)),
    "chunk of tiles": (4, 2, 32, 16, [(130, 130), (190, 70), (129, 1)], chunks(64)),
    "sinks": (
        *(4, 2, 32, 16),
        [(n, 1) for n in (1, 4, 5, 24, 25, 64, 65, 85)] + [(150, 150), (90, 20)],
        sinks(4, 20),
    ),
    "sinks over splits": (
        2,
        1,
        16,
        16,
        [(1300, 1), (1300, 40), (700, 700), (3, 1)],
        sinks(520, 90),
    ),
    "chunk over splits": (2, 1, 16, 16, [(1300, 1), (1240, 40), (1200, 1)], chunks(600)),
}


@pytest.mark.parametrize(("dtype", "kv_dtype"), ALL_DTYPES, ids=name)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("runtime", runtimes((1,)))
def test_against_float64(runtime, case: str, dtype, kv_dtype) -> None:
    heads, kv_heads, head_dim, block_size, spans, window = CASES[case]
    contexts = [context for context, _ in spans]
    s = Sequences(contexts, heads, kv_heads, head_dim, dtype, kv_dtype, block_size)
    cache = s.filled(runtime)
    parts = [s.part(i, context - n, context) for i, (context, n) in enumerate(spans)]
    found = attend(runtime, cache, parts, s.scale, window)
    for i, (context, n) in enumerate(spans):
        visible = causal(context - n, context, window)
        assert_near(found[i], s.expected(runtime, cache, i, context - n, context, visible))


@dtypes
@pytest.mark.parametrize("reach", [1, 40, 1000])
@pytest.mark.parametrize("runtime", of_each_kind(runtimes((1, 5))))
def test_queries_see_keys_on_both_sides(runtime, reach: int, dtype, kv_dtype) -> None:
    contexts = [1, 37, 150, 600]
    s = Sequences(contexts, dtype=dtype, kv_dtype=kv_dtype)
    cache = s.filled(runtime)
    parts = [s.part(i, 0, context) for i, context in enumerate(contexts)]
    found = attend(runtime, cache, parts, s.scale, reach=reach)
    for i, context in enumerate(contexts):
        at = torch.arange(context)
        visible = (at[:, None] - at).abs() <= reach
        assert_near(found[i], s.expected(runtime, cache, i, 0, context, visible))
        (alone,) = attend(runtime, cache, parts[i : i + 1], s.scale, reach=reach)
        assert_same_bits(alone, found[i])


@dtypes
@pytest.mark.parametrize("size", [3, 70])
@pytest.mark.parametrize("runtime", of_each_kind(runtimes((1, 5))))
def test_scores_depend_on_distances(runtime, size: int, dtype, kv_dtype) -> None:
    contexts = [1, 37, 150, 600]
    s = Sequences(contexts, dtype=dtype, kv_dtype=kv_dtype)
    cache = s.filled(runtime)
    parts = [s.part(i, 0, context) for i, context in enumerate(contexts)]
    table = torch.randn(s.heads, 1 + 2 * size, generator=torch.Generator().manual_seed(size))
    found = attend(runtime, cache, parts, s.scale, distances=table, reach=1000)
    for i, context in enumerate(contexts):
        at = torch.arange(context)
        far = (at - at[:, None]).clamp(-size, size) + size
        visible = torch.ones(context, context, dtype=torch.bool)
        expected = s.expected(runtime, cache, i, 0, context, visible, added=table[:, far])
        assert_near(found[i], expected)


@dtypes
@pytest.mark.parametrize("window", [None, 30, chunks(40), sinks(17, 30)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (7, 1)])
@pytest.mark.parametrize("runtime", of_each_kind(runtimes((1, 5))))
def test_no_bit_depends_on_chunks(runtime, heads, kv_heads, window, dtype, kv_dtype) -> None:
    context = 150
    s = Sequences([context], heads, kv_heads, 16, dtype, kv_dtype)
    (whole,) = s.run(runtime, [(0, 0, context)], window)
    # Chunks and decodes over a cache without later positions.
    cache = s.cache()
    for begin, end in [(0, 1), (1, 30), (30, 33), (33, 97), (97, 98), (98, 149), (149, 150)]:
        s.store(runtime, cache, 0, begin, end)
        (found,) = attend(runtime, cache, [s.part(0, begin, end)], s.scale, window)
        assert_same_bits(found, whole[begin:end])


@dtypes
@pytest.mark.parametrize("isa", of_each_kind(runtimes((1,))))
def test_results_do_not_depend_on_other_sequences_or_threads(isa, dtype, kv_dtype) -> None:
    s = Sequences([70, 1, 600, 90], dtype=dtype, kv_dtype=kv_dtype)
    spans = [(0, 69, 70), (1, 0, 1), (2, 599, 600), (3, 20, 90)]
    alone = [s.run(isa, [span])[0] for span in spans]
    teams = [p.values[0] for p in runtimes((2, 5)) if p.values[0].isa == isa.isa]
    for team in (isa, *teams):
        for order in ([0, 1, 2, 3], [3, 1, 0], [2, 2, 0, 2, 1]):
            for found, i in zip(s.run(team, [spans[i] for i in order]), order, strict=True):
                assert_same_bits(found, alone[i])


@dtypes
@pytest.mark.parametrize("window", [None, 40, sinks(20, 33)])
@pytest.mark.parametrize("runtime", of_each_kind(runtimes((1,))))
def test_no_bit_depends_on_the_block_size(runtime, window, dtype, kv_dtype) -> None:
    spans = [(0, 99, 100), (1, 0, 70), (2, 520, 530)]
    results = []
    for block_size in (16, 32, 48, 64, 256):
        s = Sequences([100, 70, 530], dtype=dtype, kv_dtype=kv_dtype, block_size=block_size)
        results.append(torch.cat(s.run(runtime, spans, window)))
    for other in results[1:]:
        assert_same_bits(other, results[0])


@dtypes
@pytest.mark.parametrize(
    ("window", "options"),
    [(window, options) for window in (None, 90) for options in ({}, *OPTIONS.values())]
    + [(window, {"negated": True}) for window in (sinks(4, 90), sinks(70, 500))],
    ids=str,
)
@pytest.mark.parametrize("runtime", of_each_kind(runtimes((1, 5))))
def test_capped_scores_and_sinks(runtime, window, options, dtype, kv_dtype) -> None:
    """As defined, and with the same bits for a chunk, its decodes and a tree over splits. Sinks of
    a window may have their own queries."""
    s = Sequences([1100, 80], dtype=dtype, kv_dtype=kv_dtype, head_dim=16)
    cache, options = s.filled(runtime), {"window": window, **options}
    chunk, fresh = attend(
        runtime, cache, [s.part(0, 1030, 1100), s.part(1, 0, 80)], s.scale, **options
    )
    meant = {name: value for name, value in options.items() if name in OF_SCORES}
    if "negated" in options:
        meant["negated"] = window.sinks
    for found, i, begin, end in ((chunk, 0, 1030, 1100), (fresh, 1, 0, 80)):
        visible = causal(begin, end, window)
        assert_near(found, s.expected(runtime, cache, i, begin, end, visible, **meant))
    for at in (1030, 1099):
        (found,) = attend(runtime, cache, [s.part(0, at, at + 1)], s.scale, **options)
        assert_same_bits(found[0], chunk[at - 1030])
    tree = torch.ones(20, 20, dtype=torch.bool).tril()
    for i, begin, end, rows in ((0, 1080, 1100, chunk[50:]), (1, 0, 20, fresh[:20])):
        (found,) = attend(runtime, cache, [s.part(i, begin, end, tree)], s.scale, **options)
        assert_same_bits(found, rows)


@dtypes
@pytest.mark.parametrize(
    ("heads", "kv_heads", "cached", "window"),
    [
        (4, 2, 0, None),
        (3, 1, 9, 3),
        (2, 2, 60, 30),
        (4, 2, 60, None),
        (4, 2, 60, chunks(61)),
        (2, 2, 500, 3),
        (3, 1, 500, None),
    ],
)
@pytest.mark.parametrize("runtime", of_each_kind(runtimes((1, 5))))
def test_a_node_has_the_bits_of_a_decode(
    runtime, heads, kv_heads, cached, window, dtype, kv_dtype
) -> None:
    """At the end of a sequence where only its path follows the cached keys."""
    size = 63  # the most
    s = Sequences([cached + size, 70], heads, kv_heads, 16, dtype, kv_dtype)
    tree = random_tree(size, seed=cached)
    parts = [s.part(0, cached, cached + size, tree), s.part(1, 10, 70)]
    found, plain = attend(runtime, s.filled(runtime), parts, s.scale, window)
    assert_same_bits(plain, s.run(runtime, [(1, 10, 70)], window)[0])
    for node in range(size):
        path = cached + tree[node].nonzero()[:, 0]
        end = cached + len(path)
        cache = s.cache()
        s.store(runtime, cache, 0, 0, cached)
        cache.store(runtime, s.k[0][path], s.v[0][path], s.slots(0, cached, end))
        decode = replace(s.part(0, end - 1, end), q=s.q[0][cached + node : cached + node + 1])
        assert_same_bits(found[node], attend(runtime, cache, [decode], s.scale, window)[0][0])


@dtypes
@pytest.mark.parametrize("runtime", runtimes((1, 5)))
def test_moved_keys_and_values_equal_stored_ones(runtime, dtype, kv_dtype) -> None:
    """Move a path's nodes to the first places, some of which are also sources."""
    s = Sequences([60, 30], kv_heads=3, heads=3, dtype=dtype, kv_dtype=kv_dtype)
    path = torch.tensor([21, 22, 25, 31, 33, 50])
    expected, moved = s.filled(runtime), s.filled(runtime)
    expected.store(runtime, s.k[0][path], s.v[0][path], s.slots(0, 20, 26))
    moved.move(runtime, s.slots(0, 0, 60)[path], s.slots(0, 20, 26))
    for found, wanted in zip(moved.tensors, expected.tensors, strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("runtime", of_each_kind(runtimes((1,))))
def test_masked_keys_do_not_affect_a_query(runtime, bad, dtype, kv_dtype) -> None:
    """Later positions and masked tokens of a tree are NaN, infinity or large numbers."""
    s = Sequences([100], heads=3, kv_heads=3, dtype=dtype, kv_dtype=kv_dtype)
    clean = s.run(runtime, [(0, 0, 100)])[0]
    tree = random_tree(12, seed=3)
    tree[:, 5], tree[5, 5] = False, True
    clean_tree = attend(runtime, s.filled(runtime), [s.part(0, 88, 100, tree)], s.scale)[0]
    s.k[0][93], s.v[0][93] = bad, bad
    found = s.run(runtime, [(0, 0, 100)])[0]
    assert_same_bits(found[:93], clean[:93])
    found = attend(runtime, s.filled(runtime), [s.part(0, 88, 100, tree)], s.scale)[0]
    for row in set(range(12)) - {5}:
        assert_same_bits(found[row], clean_tree[row])
    if math.isnan(bad):
        assert bool(found[5].isnan().all())


@pytest.mark.parametrize("runtime", runtimes((2,)))
def test_nan_stays_in_its_row(runtime) -> None:
    s = Sequences([70], dtype=F32)
    clean = s.run(runtime, [(0, 0, 70)])[0]
    s.q[0][40, 1, 3] = float("nan")
    found = s.run(runtime, [(0, 0, 70)])[0]
    assert bool(found[40, 1].isnan().all())
    found[40, 1] = clean[40, 1]
    assert_same_bits(found, clean)


@dtypes
@pytest.mark.parametrize("runtime", of_each_kind(runtimes((1,))))
def test_scores_far_apart(runtime, dtype, kv_dtype) -> None:
    """Weights that underflow, and scores outside the range of e^x."""
    s = Sequences([200], dtype=dtype, kv_dtype=kv_dtype)
    s.q[0] *= 100
    cache = s.filled(runtime)
    (found,) = attend(runtime, cache, [s.part(0, 0, 200)], s.scale)
    expected = s.expected(runtime, cache, 0, 0, 200, causal(0, 200))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=BOUNDS[dtype] * 100)


@pytest.mark.parametrize("runtime", runtimes((1, 2)))
def test_released_blocks_before_the_window_are_not_looked_up(runtime) -> None:
    s = Sequences([100])
    cache = s.filled(runtime)
    part = s.part(0, 99, 100)
    before = [attend(runtime, cache, [part], s.scale, window)[0] for window in (20, chunks(40))]
    part.blocks[:5] = -(2**20)  # positions below 80
    for window, expected in zip((20, chunks(40)), before, strict=True):
        assert_same_bits(attend(runtime, cache, [part], s.scale, window)[0], expected)


@dtypes
@pytest.mark.parametrize("runtime", of_each_kind(runtimes((1, 5))))
def test_sequences_may_begin_after_dropped_keys(runtime, dtype, kv_dtype) -> None:
    """Each from its own first key; blocks before it are not looked up."""
    spans = [(0, 69, 70, 33), (1, 0, 1, 0), (2, 1099, 1100, 530), (3, 20, 90, 20), (4, 90, 97, 64)]
    s = Sequences([70, 1, 1100, 90, 97], dtype=dtype, kv_dtype=kv_dtype)
    cache = s.filled(runtime)
    parts = [replace(s.part(i, begin, end), first_key=first) for i, begin, end, first in spans]
    right = []
    for i, begin, end, first in spans:
        visible = causal(begin, end)
        visible[:, :first] = False
        right.append(s.expected(runtime, cache, i, begin, end, visible))
        s.blocks[i][: first // 16] = -(2**20)
    found = attend(runtime, cache, parts, s.scale)
    for i, expected in enumerate(right):
        assert_near(found[i], expected)
        (alone,) = attend(runtime, cache, parts[i : i + 1], s.scale)
        assert_same_bits(alone, found[i])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("runtime", runtimes((1, 5)))
def test_the_last_queries_are_kept(runtime, dtype) -> None:
    """Of each sequence in its row, at the position modulo their number."""
    last, dim, lengths = 4, 48, [(1, 1), (1, 9), (3, 7), (11, 11), (0, 5), (4, 4)]
    q = normal(sum(count for count, _ in lengths), dim, dtype=dtype)
    rows = torch.tensor([5, 0, 3, 6, 1, 2], dtype=torch.int32)
    ring = torch.full((7, last, dim), 7.0)
    right, start = ring.clone(), 0
    for row, (count, context) in zip(rows.tolist(), lengths, strict=True):
        for i in range(count):
            right[row, (context - count + i) % last] = q[start + i].float() * 0.5
        start += count
    call(
        runtime,
        "keep_queries",
        q=q,
        q_stride=q.stride(0),
        starts=torch.tensor([0, *(count for count, _ in lengths)]).cumsum(0).int(),
        lengths=torch.tensor([context for _, context in lengths]).int(),
        state_rows=rows,
        num_seqs=len(rows),
        dim=dim,
        last=last,
        scale=0.5,
        ring=ring,
        dtype=dtype,
    )
    assert torch.equal(ring, right)


@pytest.mark.parametrize("runtime", runtimes((1, 2)))
def test_steps_without_work(runtime) -> None:
    s = Sequences([16])
    cache = s.filled(runtime)
    assert attend(runtime, cache, [s.part(0, 16, 16)], s.scale)[0].shape[0] == 0
    empty = Sequences([0, 0])
    parts = [empty.part(0, 0, 0), empty.part(1, 0, 0)]
    assert [len(x) for x in attend(runtime, cache, parts, s.scale)] == [0, 0]


# Latent vectors: heads, width of a key, columns of a value; spans as above, without windows.
LATENT_CASES = {
    "decodes": (20, 80, 64, [(n, 1) for n in (1, 17, 64, 130, 1100)]),
    "chunks": (5, 48, 32, [(40, 40), (200, 7), (600, 70), (5, 0)]),
    "DeepSeek": (16, 576, 512, [(600, 2), (70, 1)]),
}


@pytest.mark.parametrize(("dtype", "kv_dtype"), ALL_DTYPES[:-2], ids=name)
@pytest.mark.parametrize("case", LATENT_CASES)
@pytest.mark.parametrize("runtime", runtimes((1, 5)))
def test_a_latent_is_key_and_value(runtime, case: str, dtype, kv_dtype) -> None:
    """To the bit the result of attention with values that are its keys, including trees, so that
    the tests above also apply here."""
    heads, width, value_dim, spans = LATENT_CASES[case]
    s = Sequences([context for context, _ in spans], heads, 1, width, dtype, kv_dtype)
    s.v = s.k
    parts = [s.part(i, context - n, context) for i, (context, n) in enumerate(spans)]
    if case == "chunks":
        parts[1] = replace(parts[1], tree=random_tree(7, 0))
    expected = attend(runtime, s.filled(runtime), parts, s.scale)
    cache = NativeCache(s.num_blocks, 1, s.block_size, width, kv_dtype, latent=value_dim)
    for i, context in enumerate(s.contexts):
        s.store(runtime, cache, i, 0, context)
    for found, whole in zip(attend(runtime, cache, parts, s.scale), expected, strict=True):
        assert_same_bits(found.contiguous(), whole[..., :value_dim].contiguous())
    # Moved vectors are found in their new places.
    last = s.slots(1, 4, 5)
    k = cache.load(runtime, last, F32)[0]
    cache.move(runtime, last, s.slots(1, 0, 1))
    assert_same_bits(cache.load(runtime, s.slots(1, 0, 1), F32)[0], k)

"""Launches of the Triton kernels for the shapes that matter, and the resources that they may take.

`resources` returns one entry per kernel and shape. Its arguments are recorded from the launchers,
which are called with tensors that have no memory; `triton_resources` compiles them and checks the
limits. These are for sm_90, on which the kernels were measured. On other GPUs kernels may spill,
but must fit the shared memory.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import kvik.kernels.triton
from kvik.kernels.ops import (
    Draws,
    Masks,
    Penalties,
    Sequences,
    StateHeads,
    Truncation,
)
from kvik.kernels.triton import activation, attention_paged, draw, norm, rotary, rows, states
from kvik.kernels.triton.adapters import with_low_rank
from kvik.kernels.triton.attention_chosen import (
    LastKeys,
    ListedRows,
    attend_rows,
    attention_chosen_kernel,
)
from kvik.kernels.triton.attention_decode import attention_decode_kernel
from kvik.kernels.triton.attention_mla import latent_attention
from kvik.kernels.triton.attention_paged import PagedCache, PagedStep, Scoring, runs_of
from kvik.kernels.triton.attention_prefill import attention_prefill_kernel
from kvik.kernels.triton.entries import make_entries, turn_last
from kvik.kernels.triton.experts import (
    TritonExperts,
    byte_experts_kernel,
    float_experts_kernel,
    word_experts_kernel,
)
from kvik.kernels.triton.indexer import Places, choose
from kvik.kernels.triton.kv_load import KINDS, kind_on
from kvik.kernels.triton.launch import MAX_SHARED, shared_by
from kvik.kernels.triton.linear_end import finish
from kvik.kernels.triton.matrix import TritonMatrices, word_rows
from kvik.kernels.triton.route import route
from kvik.kernels.triton.scaled_mm import Library, library_on
from kvik.kernels.weights import ACTIVATIONS, Matrix, MatrixSpec
from kvik.spec.experts import Router
from kvik.spec.visible_keys import Window
from kvik.spec.weight_kind import WeightKind

MAX_REGISTERS = 255  # per thread on every NVIDIA GPU; the rest is spilled to memory
META = torch.device("meta")
MEASURED = (9, 0)  # compute capability of the GPU for which the limits are


@dataclass(frozen=True, slots=True)
class Loop:
    """Counts of a warp's instructions in the loop with the most tensor core products: limits in an
    entry, else the counts of compiled code.

    Attributes:
        copies: asynchronous copies of 16 bytes per thread from memory to shared memory; at least.
        products: warp group products, which read shared memory; at least.
        waits: for such products; at most. More waits than matrix products mean that the compiler
            waits for each instruction, as it does with too few registers.
        loads: from memory into registers, used in the same iteration; at most.
        barriers: at most.
        instructions: of the whole loop; at most.
    """

    copies: int = 0
    products: int = 0
    waits: int = 1 << 20
    loads: int = 0
    barriers: int = 1 << 20
    instructions: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Resources:
    """One launch of a kernel and its limits, checked without a GPU.

    A kernel spills no register unless `max_spills` says so.

    Attributes:
        what: the shape in words, such as "hidden 4096, bf16".
        arguments, options: of the kernel; see `launch`.
        max_registers: per thread.
        max_spills: bytes per thread.
        max_shared: bytes per program.
        loop: limits of the main loop if a speed target depends on it; None: not checked.
    """

    kernel: Any
    what: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    max_registers: int = MAX_REGISTERS
    max_spills: int = 0
    max_shared: int = MAX_SHARED
    loop: Loop | None = None

    @property
    def name(self) -> str:
        return f"{self.kernel.__name__} ({self.what})"


# Registers per thread of kernels that need few, so that many threads fit on a multiprocessor.
FEW_REGISTERS = {
    f"{name}_kernel": most
    for most, names in (
        (40, "activate xielu scaled softcap rotations keep_queries mask"),
        (48, "gated weighted_sums"),
        (64, "pair_inputs combine sort finish word_rows byte_rows gather"),
        (80, "penalize"),
        (96, "largest_of_chunks rotary causal_conv"),
        (128, "rms_norm layer_norm rescaled activate_top stream_weights"),
        (128, "store blocks coarse bounds settle sums pick shares"),
        (136, "list"),
        (168, "recurrence"),
    )
    for name in names.split()
}


# Kernels that launchers combine with others.
MAIN = (
    attention_chosen_kernel,
    attention_decode_kernel,
    attention_prefill_kernel,
    byte_experts_kernel,
    float_experts_kernel,
    word_experts_kernel,
)


# Makes the entries of a call of a launcher, for a compute capability.
Entries = Callable[[tuple[int, int]], tuple[Resources, ...]]


def _launched(
    capability: tuple[int, int], launcher: Callable[..., object], *arguments: Any
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the kernel, the arguments and the options of each launch of a call on a GPU."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel, grid, tensors, numbers, constants, **options):
        launches.append((kernel, (*tensors, *numbers, *constants), options))

    calls: dict[str, Callable[..., object]] = {
        "launch": record,
        "kind_of": lambda cache: kind_on(capability, cache.dtype),
        "shared_memory": lambda device: shared_by(capability),
    }
    package = kvik.kernels.triton
    with ExitStack() as patched:
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = import_module(info.name)
            for name in calls.keys() & vars(module).keys():
                patched.enter_context(mock.patch.object(module, name, calls[name]))
        library = replace(library_on(capability), rows=False, blocks=False)
        patched.enter_context(mock.patch.object(USUAL, "library", library))
        launcher(*arguments)
    return launches


def _entries(what: str, launcher: Callable[..., object], *arguments: Any, **limits: Any) -> Entries:
    """Return what makes an entry for each launch of a call.

    Args:
        limits: on sm_90, of the kernels in `MAIN`, if one of them is launched, else of the last
            one.
    """

    def make(capability: tuple[int, int]) -> tuple[Resources, ...]:
        launches = _launched(capability, launcher, *arguments)
        limited = [kernel for kernel, *_ in launches if kernel in MAIN] or [launches[-1][0]]
        entries = []
        for kernel, *launch in launches:
            entry = Resources(kernel, what, *launch, max_shared=shared_by(capability))
            if capability != MEASURED:
                entry = replace(entry, max_spills=1 << 20)
            else:
                most = FEW_REGISTERS.get(kernel.__name__, MAX_REGISTERS)
                entry = replace(entry, max_registers=most)
                entry = replace(entry, **limits) if kernel in limited else entry
            entries.append(entry)
        return tuple(entries)

    return make


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def _fp32(*shape: int) -> Tensor:
    return torch.empty(shape, device=META)


def _i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def _i64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)


# Attention.

KV_HEADS, GROUP = 8, 4  # of Llama 3
HEADS = KV_HEADS * GROUP
BLOCK_SIZE = 16


def _caches(dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return both caches, and the scales of each if it is rounded."""
    stored = head_dim // 2 if dtype == torch.uint8 else head_dim
    cache = torch.empty(9, BLOCK_SIZE, KV_HEADS, stored, dtype=dtype, device=META)
    if KINDS[dtype] == "float":
        return cache, cache, None
    kind = torch.int16 if dtype == torch.uint8 else torch.bfloat16
    return cache, cache, torch.empty(9, BLOCK_SIZE, KV_HEADS, dtype=kind, device=META)


def _attention(
    head_dim: int,
    cache: torch.dtype,
    *,
    queries: int = 1,
    sequences: int = 1,
    tree: bool = False,
    capped: bool = False,
    window: bool = False,
    sunk: bool = False,
    cut: bool = False,
    alibi: bool = False,
    **limits: Any,
) -> Entries:
    """Return the entries of sequences of 32k keys. Queries are bf16, or fp32 like the cache.

    Args:
        capped: scores are capped, and heads have sinks. sunk: the window has sinks.
        cut: sequences have a first key. alibi: heads have slopes.
    """
    q = (_fp32 if cache == torch.float32 else _bf16)(queries * sequences, HEADS, head_dim)
    k, v, scales = _caches(cache, head_dim)
    context = 1 << 15
    step = PagedStep(
        _i32(sequences + 1),
        _i32(sequences),
        _i32(sequences, context // BLOCK_SIZE + 1),
        _i32(sequences) if cut else None,
        _i64(queries * sequences) if tree else None,
        BLOCK_SIZE,
        Window(4096, False, 4 if sunk else 0) if window or sunk else None,
        runs_of((queries,) * sequences, (context,) * sequences),
    )
    of_heads = _fp32(HEADS)
    scoring = Scoring(0.1, 50.0, of_heads) if capped else Scoring(0.1)
    scoring = replace(scoring, slopes=of_heads if alibi else None)
    flags = {
        "tree": tree,
        "capped, sinks": capped,
        "window": window,
        "sinks of a window": sunk,
        "cut": cut,
        "alibi": alibi,
    }
    words = [f"{sequences} x {queries} queries of {head_dim}, KV {str(cache)[6:]}"]
    words += [word for word, flag in flags.items() if flag]
    arguments = q, PagedCache(k, v, scales, scales), step, scoring, q
    return _entries(", ".join(words), attention_paged.paged_attention, *arguments, **limits)


# K and V of 64 keys of 128 are 16 copies per thread of 128 threads, 32 KiB, for which a
# multiprocessor of an H200 has about 1700 cycles at 4.3 TB/s; a scheduler issues a warp's share in
# a quarter of that.
# The limits include the end of a split, about 220 instructions and 4 barriers every second tile.
_KEYS = Loop(copies=16, barriers=10, instructions=770)
_BF16, _E4M3, _INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
_FP32, _INT4 = torch.float32, torch.uint8
_M32, _M64 = 32 // GROUP, 64 // GROUP  # queries of tiles of 32 and 64 rows
_MANY = 1024  # sequences: programs merge all splits of theirs

DECODE = (
    *(_attention(head_dim, _BF16, loop=_KEYS) for head_dim in (64, 128, 256)),
    *(_attention(d, _E4M3, loop=Loop(copies=8)) for d in (64, 128)),
    *(_attention(d, _INT8, loop=Loop(copies=8)) for d in (128, 256)),
    _attention(128, _BF16, sequences=_MANY, loop=_KEYS),
    _attention(128, _E4M3, sequences=_MANY, loop=Loop(copies=8, instructions=870)),
    _attention(128, _INT4, loop=Loop(copies=4, instructions=1200)),
    _attention(256, _BF16, capped=True),
    _attention(64, _BF16, sunk=True, loop=_KEYS),
    _attention(128, _BF16, sunk=True, loop=_KEYS),
    _attention(128, _BF16, cut=True, loop=_KEYS),
    _attention(128, _BF16, alibi=True),
    _attention(128, _INT8, alibi=True, sunk=True),
    _attention(128, _BF16, queries=_M32, tree=True, alibi=True),
    _attention(128, _BF16, queries=_M64, alibi=True),
    # Spills are between the loops over sinks and over the window, not inside them.
    _attention(128, _INT8, sunk=True, loop=Loop(copies=4), max_spills=64),
    _attention(128, _BF16, queries=_M32, tree=True, sunk=True, max_spills=160),
    _attention(128, _BF16, queries=_M32, tree=True),
    _attention(128, _BF16, queries=_M64, loop=Loop(copies=16, products=12, waits=1)),
    _attention(128, _BF16, queries=_M64, tree=True),
    _attention(128, _FP32, queries=_M64),
    _attention(256, _FP32, queries=_M64),
    # Heads of 512 (Gemma 4): a tile of 16 keys has as many bytes as 64 keys of 128.
    _attention(512, _BF16, loop=Loop(copies=8, barriers=10, instructions=700)),
    *(_attention(512, cache, loop=Loop(copies=2)) for cache in (_INT8, _INT4, _E4M3)),
    _attention(512, _BF16, capped=True),
    _attention(512, _BF16, sunk=True),
    _attention(512, _BF16, queries=_M32, tree=True),
    _attention(512, _INT8, queries=_M32),
    _attention(512, _FP32),
)


# Attention over chosen keys (DeepSeek V3.2), and over a window and entries (V4).

_PLACES = Places(_i32(5), _i32(4), _i32(4, 2048), None, None, BLOCK_SIZE)
_OF_FOUR, _OF_MANY = (replace(_PLACES, every=every, entry_tokens=4) for every in (4, 128))
_CHOSEN = ListedRows(_bf16(4096, 576), _PLACES, _i32(4, 2048), _i32(4))
_FEW = ListedRows(_bf16(4096, 512), _OF_FOUR, _i32(4, 512), _i32(4))
_LAST = LastKeys(_bf16(4096, 2560), _PLACES, 128)


def _chosen(
    rows: ListedRows | None, heads: int, queries: int, last: LastKeys | None = None, tokens: int = 4
) -> Entries:
    rest = _bf16(tokens, heads, 64) if last is None else None
    of = _bf16(tokens, heads, 512), rest, rows, last, 0.1, _fp32(heads)
    what = f"{heads} heads, {'all' if rows is None else rows.most} rows, {queries} queries"
    return _entries(what, attend_rows, *of, [queries])


_POOLS = replace(_PLACES, every=16)
_MADE_POOLS = _bf16(64, 256), _i32(4, 9), _bf16(64, 256)[:, :128], _POOLS, 9, _fp32(16, 128)
_OF_POOLS = _bf16(4, 32, 128), _bf16(4, 32), _bf16(4096, 256), _POOLS, 128, 4
_MADE = _bf16(64, 2048), _i32(4, 9), _bf16(64, 512), _OF_FOUR, 9, _fp32(4, 1024)
CHOSEN = (
    *(_chosen(_CHOSEN, 128, queries) for queries in (1, 2048)),
    _chosen(_CHOSEN, 128, 1, tokens=_MANY),
    *(_chosen(_FEW, 64, queries, _LAST) for queries in (1, 2048)),
    _chosen(ListedRows(_bf16(4096, 512), _OF_MANY), 64, 1, _LAST),
    _chosen(None, 64, 1, _LAST),
    *(
        _entries(what, choose, _bf16(4, 64, 128), _bf16(4, 64), _bf16(4096, 128), at, top, 4)
        for what, at, top in (("keys", _PLACES, 2048), ("entries", _OF_FOUR, 512))
    ),
    _entries("pools", partial(choose, pools=True), *_OF_POOLS),
    _entries(
        "of 512", make_entries, *_MADE, (_bf16(512), 1e-6), (_fp32(64, 64), _fp32(64, 64), 4095)
    ),
    _entries("pools", make_entries, *_MADE_POOLS),
    _entries("heads of 512", turn_last, _bf16(9, 64, 512), _fp32(9, 64)),
)

_prefill = partial(_attention, queries=2048)
# 128 keys of 128: 8 products with K and 8 with V, each 64 cycles for two warp groups, and one wait
# for both.
_TILE = Loop(copies=16, products=16, waits=1, barriers=2, instructions=532)
_ROUNDED = Loop(copies=4, products=6, waits=2)

PREFILL = (
    _prefill(64, _BF16, loop=Loop(copies=8, products=12, waits=1, barriers=2)),
    _prefill(128, _BF16, loop=_TILE),
    _prefill(128, _BF16, window=True, loop=_TILE),
    _prefill(128, _BF16, cut=True, loop=_TILE),
    _prefill(64, _BF16, sunk=True),
    _prefill(128, _BF16, sunk=True, loop=_TILE),
    _prefill(128, _INT8, sunk=True),
    _prefill(64, _BF16, capped=True),
    _prefill(64, _BF16, alibi=True),
    _prefill(128, _BF16, alibi=True),
    _prefill(128, _INT8, alibi=True, sunk=True),
    _prefill(256, _BF16, capped=True),
    _prefill(256, _BF16, loop=Loop(copies=8, products=18, waits=1, barriers=2)),
    *(
        _prefill(head_dim, cache, loop=_ROUNDED)
        for head_dim, cache in ((64, _INT8), (128, _E4M3), (128, _INT8), (256, _E4M3))
    ),
    _prefill(128, _INT4, loop=Loop(copies=4, products=12, waits=2, instructions=1020)),
    _prefill(128, _FP32),
    _prefill(256, _FP32),
    # What takes most shared memory on other GPUs: two sets of queries.
    *(_prefill(d, cache, sunk=True, max_spills=64) for d in (256, 512) for cache in (_BF16, _FP32)),
    # 64 products of 16 keys with K, and two of 256 columns of V; spills are outside loops.
    _prefill(512, _BF16, loop=Loop(copies=16, products=66, waits=1), max_spills=24),
    _prefill(512, _BF16, capped=True, max_spills=32),
    _prefill(512, _BF16, window=True),
    _prefill(512, _BF16, cut=True),
    *(_prefill(512, cache) for cache in (_INT8, _E4M3, _INT4, _FP32)),
)


def _latent(heads: int) -> Entries:
    q, rope, cache = _bf16(1, heads, 512), _bf16(1, heads, 64), _bf16(9, BLOCK_SIZE, 576)
    runs = runs_of((1,), (1 << 15,))
    step = PagedStep(_i32(2), _i32(1), _i32(1, 2049), None, None, BLOCK_SIZE, None, runs)
    what = f"{heads} heads of 512 + 64, bf16"
    return _entries(what, latent_attention, q, rope, cache, step, 0.1, None, torch.empty_like(q))


# Products.

USUAL = TritonMatrices(META)  # with the tensor cores of the GPU for which entries are made
OLDER = TritonMatrices(META, Library(tensor_cores=False, rows=False, blocks=False))


def _matrix(kind: str, rows: int = 4096, activation: Any = None, *, inputs: int = 4096) -> Matrix:
    weight = WeightKind.named(kind)
    assert weight is not None, kind
    return USUAL.matrix(MatrixSpec(weight, rows, inputs, False, activation, _BF16, META))


def _linear(
    kind: str,
    tokens: int,
    activation: Any = None,
    matrices: TritonMatrices = USUAL,
    logits: bool = False,
    **limits: Any,
) -> Entries:
    """Return the entries of a product of 4096 inputs; `logits`: its results are fp32."""
    matrix = _matrix(kind, 28672 if activation else 4096, activation)
    if logits:
        matrix = replace(matrix, spec=replace(matrix.spec, out_dtype=torch.float32))
    residual = None if activation else _bf16(tokens, 4096)
    what = f"{kind}, {tokens} tokens{f', {activation}' if activation else ''}{', logits' * logits}"
    return _entries(what, matrices.linear, _bf16(tokens, 4096), matrix, residual, **limits)


# With few tokens, five or six programs must fit on a multiprocessor to keep memory busy.
_SIXTH = {"max_registers": 80, "max_shared": MAX_SHARED // 6}
_FIFTH = {"max_registers": 96, "max_shared": MAX_SHARED // 5}
# 128 outputs and inputs: per thread, 4 copies of 16 bytes are words, and one is of x. At 4.3 TB/s
# each of the four schedulers of a multiprocessor has about 450 cycles for them.
_INT4_STEP = Loop(copies=5, instructions=310)
_ONE_WAIT = Loop(products=8, waits=1)  # for all products of a step

WORDS = (
    _linear("int4 group 128 zeros", 8, **_FIFTH, loop=_INT4_STEP),
    *(_linear("int4 group 128 zeros", n, loop=Loop(copies=4)) for n in (16, 32, 64, 256)),
    _linear("int4 group 128 zeros", 8, "silu_and_mul", **_FIFTH, loop=_INT4_STEP),
    _linear("int4min group 32", 8, **_SIXTH),
    _linear("int4min group 32", 256),
    _linear("int8 group 0", 8, **_SIXTH),
    *(_linear("int8 group 0", n, loop=_ONE_WAIT) for n in (64, 256)),
    _linear("int8 group 0", 1024, logits=True, loop=_ONE_WAIT),
    _linear("int4 group 128 zeros", 1024, logits=True),
    _linear("int8 group 32", 1024, logits=True, max_spills=72),
    _linear("fp8 group 0", 8, **_SIXTH),
    _linear("fp8 group 128", 256),
    _linear("mxfp4 group 32", 8, **_SIXTH),
    _linear("mxfp4 group 32", 256),
    _linear("nvfp4 group 16", 8, **_SIXTH),
    _linear("nvfp4 group 16", 256),
    _linear("nvfp4 group 16", 1024, logits=True),
)

BYTES = (
    *(_linear("w8a8 group 0", n) for n in (8, 1024)),
    _linear("w8a8 group 128", 1024),
    _linear("fp8 group 0 token", 8),
    *(_linear("fp8 group 128 groups", n) for n in (16, 1024)),
    _linear("fp8 group 128 groups", 1024, matrices=OLDER),
    _linear("fp8 group 0 static", 8),
    _linear("fp8 group 0 token", 1024, "silu_and_mul"),
)


def _experts(
    kind: str, tokens: int, loop: Loop | None = None, *, count: int = 64, weigh_inputs: bool = False
) -> Entries:
    """Return the entries of a choice of eight of `count` experts, with `tokens` tokens for each."""
    matrices = TritonExperts(USUAL)
    up, down = _matrix(kind, 28672, "silu_and_mul"), _matrix(kind)
    experts = replace(matrices.expert_set([up] * count, [down] * count), weigh_inputs=weigh_inputs)
    x, ids, weights = (
        new(tokens * count // 8, n) for new, n in ((_bf16, 4096), (_i64, 8), (_fp32, 8))
    )
    what = f"{kind}, {count} experts of {tokens} tokens{', weighed' * weigh_inputs}"
    return _entries(what, matrices.experts, x, ids, weights, experts, x, loop=loop)


def _adapted(rank: int, inputs: int, outputs: int) -> Entries:
    """Return the entries of eight tokens with adapters."""
    matrices = TritonExperts(USUAL)
    up, down = (
        _matrix("bfloat16", rows, inputs=columns)
        for rows, columns in ((rank, inputs), (outputs, rank))
    )
    pairs = matrices.expert_set([up] * 8, [down] * 8)
    what = f"adapters of rank {rank}, {inputs} to {outputs}"
    tensors = _bf16(8, inputs), _i64(8, 1), None, pairs, _bf16(8, outputs)
    return _entries(what, with_low_rank(matrices), *tensors)


def _routed(experts: int, groups: int = 1) -> Entries:
    scores = "sigmoid" if groups > 1 else "softmax"
    by = "best two" if groups > 1 else "best"
    router = Router(experts, 8, scores, groups=groups, kept_groups=max(1, groups // 2), group_by=by)
    vectors = (_fp32(experts), None) if groups > 1 else (None, _fp32(experts))
    what = f"8 of {experts} experts, {groups} groups"
    return _entries(what, route, _fp32(9, experts), router, *vectors)


BY_LOGITS = Router(384, 6, "logit", corrected=True)
EXPERTS = (
    _experts("bfloat16", 8, Loop(copies=9)),
    _experts("bfloat16", 128, Loop(copies=8, products=4, waits=1)),
    _experts("int4 group 128 zeros", 8, Loop(copies=5, instructions=315)),
    _experts("int4 group 128 zeros", 128, Loop(copies=8, products=8, waits=1)),
    _experts("fp8 group 128 groups", 8, Loop(copies=4)),
    _experts("fp8 group 128 groups", 128, Loop(copies=8, products=4, waits=1)),
    _experts("int4 group 128 zeros ordered", 8, count=8),
    _experts("fp8 group 0 static", 8, count=1024),
    _experts("bfloat16", 8, weigh_inputs=True),
    *(_routed(*shape) for shape in ((128,), (256, 8), (1024,))),
    _entries("6 of 384 experts by logits", route, _fp32(9, 384), BY_LOGITS, _fp32(384), None),
    *(_adapted(*shape) for shape in ((48, 4096, 6144), (16, 14336, 4096), (128, 4096, 28672))),
)


def _rows(kind: str) -> Entries:
    return _entries(f"{kind}, rows of ids", USUAL.rows, _matrix(kind), _i64(9), _BF16)


def _widened(kind: str, activation: Any = None) -> Entries:
    matrix = _matrix(kind, 4096, activation)
    out = _bf16(4096, 4096)
    return _entries(f"{kind}, widened", word_rows, matrix.data, matrix.spec, None, 0, out)


MATRIX_ROWS = (
    *(_rows(kind) for kind in ("int4 group 128 zeros", "fp8 group 0 token")),
    _widened("int4 group 128 zeros", "silu_and_mul"),
    *(
        _widened(kind)
        for kind in (
            "int4min group 32",
            "int8 group 0",
            "fp8 group 0",
            "mxfp4 group 32",
            "nvfp4 group 16",
        )
    ),
)

# Norms, rotations and the store.


def _norms(rows: int, dim: int) -> tuple[Entries, ...]:
    """Return the entries of rows of heads, or of hidden states (`rows` is 1)."""
    x = _bf16(9, rows, dim) if rows > 1 else _bf16(9, dim)
    weight = _bf16(rows, dim) if rows > 1 else _bf16(dim)
    what = f"rows of {dim}, bf16"
    rms = _entries(what, norm.rms_norm, x, _bf16(dim), 1e-5)
    return rms, _entries(what, norm.layer_norm, x, weight, weight, 1e-5)


NORM = (
    *(*_norms(1, 4096), *_norms(1, 16384), *_norms(8, 128)),
    _entries("hidden 2048, bf16", norm.rescaled, _bf16(9, 3, 2048), _bf16(9, 2048), 1e-5),
    _entries("16384, bf16", norm.activate_top, _bf16(9, 32768), "gelu_tanh_and_mul", 1.6),
    _entries(
        "4 x 7168, bf16", norm.stream_weights, _bf16(9, 28672), _fp32(9, 8), _fp32(4, 8), 1e-5, 0, 0
    ),
)


def _heads() -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of one product."""
    q, k, v = _bf16(9, HEADS + 2 * KV_HEADS, 128).split((HEADS, KV_HEADS, KV_HEADS), 1)
    return q, k, v


def _store(cache: torch.dtype, *, normed: bool = False) -> Entries:
    k, v, scales = _caches(cache, 128)
    rounded = None if scales is None else (scales, scales)
    norms = (_bf16(128), _bf16(128), 1e-5) if normed else None
    arguments = (*_heads(), _fp32(9, 128), (k, v), rounded, _i64(9), norms)
    what = f"bf16 to {str(cache)[6:]}{', normed' * normed}"
    return _entries(what, rotary.rotate_and_store, *arguments)


_ANGLES, _RING = _fp32(64, 128), _fp32(4, 32, HEADS, 128)
_QUERIES = _heads()[0]

ROTARY = (
    _entries("128 channels", rotary.rotations, _ANGLES, _ANGLES, _i64(9), 4095),
    _entries("of bf16", rotary.keep_queries, _QUERIES, _RING, _i32(3), _i32(2), _i32(2), 0.1, 32),
    _entries("heads of 128, bf16", rotary.rotary, *_heads()[:2], _fp32(9, 128)),
    _store(_BF16),
    _store(_BF16, normed=True),
    *(_store(cache) for cache in (_E4M3, _INT8, _INT4)),
)

# Draws, and small kernels.

VOCABULARY = 128256  # of Llama 3


def _truncation(**rules: torch.dtype) -> Truncation:
    return Truncation(**{name: torch.empty(2, dtype=of, device=META) for name, of in rules.items()})


RULES = {"top_k": torch.int64, "top_p": torch.float64}
EVERY_RULE = {**RULES, "min_p": torch.float32, "typical_p": torch.float64}
LOGITS = _fp32(2, VOCABULARY)


def _drawn(what: str, rules: Mapping[str, torch.dtype]) -> tuple[Entries, ...]:
    """Return the entries of draws of a token, and of the probabilities of all."""
    truncation = _truncation(**rules)
    draws = Draws(_fp32(2), torch.empty(2, dtype=torch.float64, device=META), truncation)
    drawn = _entries(what, draw.draw, LOGITS, draws)
    return drawn, _entries(what, draw.probabilities, LOGITS, draws.temperature, truncation)


_FEW_ROWS, _TABLES = (_i64(2), _i64(2)), (_fp32(2), _fp32(2), _fp32(2))
_IN_PROMPT = torch.empty(2, VOCABULARY, dtype=torch.bool, device=META)
_PENALTIES = Penalties(*_FEW_ROWS, *_TABLES, _IN_PROMPT, _i32(2, VOCABULARY))

DRAW = (
    *_drawn("no rule", {}),
    *_drawn("top_p after top_k", RULES),
    *_drawn("every rule", EVERY_RULE),
    _entries("fp32", draw.penalize, LOGITS, _PENALTIES),
    _entries("fp32", draw.mask, LOGITS, Masks(_i64(2), _i32(2, VOCABULARY // 32))),
    _entries("fp32", rows.largest, LOGITS),
)

_X, _WIDE = _bf16(9, 4096), _bf16(9, 8192)
_K, _V = _caches(_BF16, 128)[:2]

SMALL = (
    *(
        _entries(f"{name}, bf16", activation.activate, _WIDE, name)
        for name in ACTIVATIONS
        if name is not None
    ),
    _entries("bf16", activation.xielu, _X, 0.7, 1.4),
    _entries("bf16", activation.scaled, _X, 2.0),
    _entries("fp32", activation.softcap, _fp32(9, 4096), 30.0),
    _entries("silu_and_mul, bf16", finish, _WIDE, None, "silu_and_mul", _X, _BF16),
    _entries("4 x 4, bf16", rows.weighted_sums, _bf16(9, 8192), _fp32(9, 4, 4), _bf16(9, 8192)),
    _entries("rows of 4096 bf16", rows.gather_rows, _bf16(64, 4096), _i64(9)),
    _entries("pages of bf16", rows.copy_blocks, _K, _i64(2), _i64(2)),
    _entries("heads of bf16", rows.store_kv, *_heads()[1:], _K, _V, _i64(9)),
)

_SEQUENCES = Sequences(_i32(3), _i32(2), _i32(2), states.LONG)
_DELTA = StateHeads(_fp32(32), _fp32(32), 16)
_DRAFTED = replace(_SEQUENCES, pending=_i32(2), drafts=_i32(2))
_TAPS, _CHANNELS, _STATE = _bf16(4, 4096), _fp32(3, 7, 4096), _fp32(3, 32, 128, 128)
_LOG = _fp32(3, 4, 8192 + 64)
_SPACE = replace(_DELTA, skip=_fp32(32))
_BY_ROW = replace(_DELTA, bias=_fp32(32 * 128))

_LINEAR = states.recurrence, _WIDE, _bf16(9, 64), _DELTA, _STATE, _LOG
_ROWS = states.recurrence, _WIDE, _bf16(9, 32 * 129), _BY_ROW, _STATE, _fp32(3, 4, 8192 + 32 * 129)
_SPACES = states.recurrence, _WIDE, _bf16(9, 32), _SPACE, _STATE, _LOG
_BY_CHANNEL = StateHeads(_fp32(1, 16, 4096), _fp32(4096), 1, _fp32(4096))
_CHANNELS_OF = (  # of a Mamba layer
    *(states.recurrence, _bf16(9, 4096 + 2 * 16), _bf16(9, 4096), _BY_CHANNEL),
    *(_fp32(3, 1, 16, 4096), _fp32(3, 4, 2 * 4096 + 2 * 16)),
)
_MOST_KEYS = (  # of a head of a state space, for which there are no chunks
    *(states.recurrence, _bf16(9, 2 * 512 + 32 * 64), _bf16(9, 32)),
    *(replace(_SPACE, key_heads=1), _fp32(3, 32, 512, 64), _LOG),
)

STATES = (
    _entries("SiLU, bf16", states.gated, _X, _X, "silu"),
    _entries("softplus, bf16", states.gated, _X, _X, "softplus"),
    *(
        _entries(what, states.causal_conv, _X, _TAPS, None, _CHANNELS, of, True)
        for what, of in (("bf16", _SEQUENCES), ("bf16, drafts", _DRAFTED))
    ),
    # Chunks of 16 tokens, each after the other.
    _entries(
        "bf16",
        *_LINEAR,
        _SEQUENCES,
        loop=Loop(copies=4, products=6, loads=7, barriers=40, instructions=2300),
    ),
    _entries(
        "space, bf16",
        *_SPACES,
        _SEQUENCES,
        loop=Loop(copies=4, products=6, loads=5, barriers=17, instructions=1020),
    ),
    _entries("512 keys, bf16", *_MOST_KEYS, _SEQUENCES, max_registers=MAX_REGISTERS),
    _entries("bf16, drafts", *_LINEAR, _DRAFTED),
    _entries("space, bf16, drafts", *_SPACES, _DRAFTED),
    _entries("by row, bf16, drafts", *_ROWS, _DRAFTED),
    _entries("by channel, bf16, drafts", *_CHANNELS_OF, _DRAFTED),
)


def _distinct(groups: Iterable[tuple[Resources, ...]]) -> tuple[Resources, ...]:
    """Return all entries but those of the same kernel and arguments as an earlier one."""
    entries: dict[tuple[object, ...], Resources] = {}
    for entry in chain.from_iterable(groups):
        arguments = (a.dtype if isinstance(a, Tensor) else a for a in entry.arguments)
        key = (entry.kernel, *((type(a), a) for a in arguments), *entry.options.items())
        entries.setdefault(key, entry)
    return tuple(entries.values())


ALL = (
    *DECODE,
    *(_latent(heads) for heads in (16, 128)),
    *CHOSEN,
    *PREFILL,
    *WORDS,
    *BYTES,
    *EXPERTS,
    *MATRIX_ROWS,
    *NORM,
    *ROTARY,
    *DRAW,
    *SMALL,
    *STATES,
)


@cache
def resources(capability: tuple[int, int] = MEASURED) -> tuple[Resources, ...]:
    """Return all entries for GPUs of a compute capability."""
    return _distinct(make(capability) for make in ALL)

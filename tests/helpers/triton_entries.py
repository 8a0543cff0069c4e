"""Limits of the Triton kernels: registers, shared memory, and the instructions of their loops.

Each kernel has an entry for the one or two shapes that matter, collected in `RESOURCES`;
`triton_resources` compiles them for sm_90 and checks the limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl

from kvik.kernels.triton import (
    activation,
    attention_decode,
    attention_mla,
    attention_prefill,
    draw,
    expert_rows,
    experts,
    linear_bytes,
    linear_end,
    linear_words,
    matrix,
    norm,
    rotary,
    rounding,
    route,
    rows,
    states,
    words,
)
from kvik.kernels.triton.attention_shapes import STAGES, block_d, prefill_tiles, split_tiles
from kvik.kernels.triton.kv_load import KINDS
from kvik.kernels.triton.launch import MAX_SHARED
from kvik.kernels.triton.matrix_shapes import (
    FEW,
    FEW_INT4,
    MANY,
    MANY_NARROW,
    MORE,
    Tile,
)
from kvik.kernels.weights import ACTIVATIONS
from kvik.spec.experts import SCORES

MAX_REGISTERS = 255  # per thread on every NVIDIA GPU; the rest is spilled to memory


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
    """One compilation of a kernel for sm_90, and its limits, checked without a GPU.

    A kernel spills no register unless `max_spills` says so.

    Attributes:
        kernel: the `@triton.jit` function.
        what: the shape in words, such as "hidden 4096, bf16".
        types: of its arguments without constants, by name: "*bf16", "i32", "fp32", ...
        constants: its `tl.constexpr` arguments by name, including arguments that are None.
        aligned: integer arguments that are multiples of 16, which Triton detects at a launch.
            Pointers always are.
        most_registers: `maxnreg`; None: no limit.
        fused_products: `enable_fp_fusion`, which lets sums of products be rounded once.
        max_registers: per thread.
        max_spills: bytes per thread.
        max_shared: bytes per program.
        loop: limits of the main loop if a speed target depends on it; None: not checked.
    """

    kernel: Any
    what: str
    types: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    aligned: frozenset[str] = field(default=frozenset())
    most_registers: int | None = None
    fused_products: bool = True
    max_registers: int = MAX_REGISTERS
    max_spills: int = 0
    max_shared: int = MAX_SHARED
    loop: Loop | None = None

    @property
    def name(self) -> str:
        return f"{self.kernel.__name__} ({self.what})"


def _types(**arguments: str) -> dict[str, str]:
    """Return the type of each argument.

    Args:
        arguments: names by Triton type, with "p_" for a pointer: p_bf16="x y", i32="rows".
    """
    return {
        name: f"*{type.removeprefix('p_')}" if type.startswith("p_") else type
        for type, names in arguments.items()
        for name in names.split()
    }


def _aligned(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _cache_types(cache: torch.dtype) -> dict[str, str]:
    """Return the types of queries and results, of caches and of scales."""
    stored = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "i8"}.get(cache, "u8")
    scales = {"int8": "*bf16", "fp8": "*bf16", "int4": "*i16"}.get(KINDS[cache], "")
    queries = "*fp32" if cache == torch.float32 else "*bf16"
    return {
        **dict.fromkeys(("q", "sink_q", "out"), queries),
        **dict.fromkeys(("k_cache", "v_cache"), f"*{stored}"),
        **dict.fromkeys(("k_scales", "v_scales"), scales),
    }


LLAMA_HEADS = {"GROUP": 4, "KV_HEADS": 8}  # of Llama 3


def _decode(
    head_dim: int,
    cache: torch.dtype,
    m: int = 16,
    tree: bool = False,
    options: bool = False,
    sunk: bool = False,
    cut: bool = False,
    merge: int = 0,
    loop: Loop | None = None,
    max_spills: int = 0,
) -> Resources:
    """Return an entry for decoding. Queries are bf16, or fp32 like the cache. `options`: scores are
    capped and heads have sinks; `sunk`: the window has sinks; `cut`: sequences have a first key."""
    tiles = split_tiles(m, head_dim, max(2, cache.itemsize), kind=KINDS[cache], tree=tree)
    types = _cache_types(cache)
    absent = [] if tree else ["tree"]
    absent += [] if cut else ["first_keys"]
    absent += [] if sunk else ["sink_q"]
    absent += [] if options else ["softcap", "sinks"]
    absent += [] if types["k_scales"] else ["k_scales", "v_scales"]
    return Resources(
        attention_decode.attention_decode_kernel,
        f"{m} rows of {head_dim}, KV {str(cache).removeprefix('torch.')}{', tree' * tree}"
        f"{', capped, sinks' * options}{', sinks of a window' * sunk}{', cut' * cut}"
        f"{', merges' * (merge == 2)}",
        types
        | _types(
            p_i32="block_table query_start seq_lens first_keys",
            p_i64="tree",
            p_fp32=f"part_out part_weight{' sinks' * options}",
            i32="q_stride sink_q_stride table_stride window sink_keys first_sequence above most "
            "programs least slab",
            fp32=f"scale{' softcap' * options}",
        ),
        {
            **dict.fromkeys(absent),
            **LLAMA_HEADS,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d(head_dim),
            "BLOCK_M": tiles.m,
            "BLOCK_N": tiles.n,
            "BLOCK_SIZE": 16,
            "KIND": KINDS[cache],
            "WINDOW": 3 * sunk,
            "TREE": tree,
            "MERGE": merge,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        aligned=_aligned("q_stride"),
        max_spills=max_spills,
        most_registers=None if merge else tiles.most_registers,
        loop=loop,
    )


def _merge(head_dim: int) -> Resources:
    return Resources(
        attention_decode.attention_merge_kernel,
        f"head_dim {head_dim}, bf16",
        _types(
            p_fp32="part_out part_weight",
            p_i32="query_start seq_lens",
            p_bf16="out",
            i32="window first_sequence above most slab",
        ),
        {
            "first_keys": None,
            "sinks": None,
            **LLAMA_HEADS,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d(head_dim),
            "BLOCK_M": 16,
            "WINDOW": 0,
        },
    )


# K and V of 64 keys of 128 are 16 copies per thread of 128 threads, 32 KiB, for which a
# multiprocessor of an H200 has about 1700 cycles at 4.3 TB/s; a scheduler issues a warp's share in
# a quarter of that.
# The limits include the end of a split, about 220 instructions and 4 barriers every second tile.
_KEYS = Loop(copies=16, barriers=10, instructions=770)

DECODE = (
    *(_decode(head_dim, torch.bfloat16, loop=_KEYS) for head_dim in (64, 128, 256)),
    *(_decode(d, torch.float8_e4m3fn, loop=Loop(copies=8)) for d in (64, 128)),
    *(_decode(d, torch.int8, loop=Loop(copies=8)) for d in (128, 256)),
    # Programs that merge all splits of their sequence.
    _decode(128, torch.bfloat16, merge=2, loop=_KEYS),
    _decode(128, torch.float8_e4m3fn, merge=2, loop=Loop(copies=8, instructions=870)),
    _decode(128, torch.uint8, loop=Loop(copies=4, instructions=1200)),
    _decode(256, torch.bfloat16, options=True),
    _decode(64, torch.bfloat16, sunk=True, loop=_KEYS),
    _decode(128, torch.bfloat16, sunk=True, loop=_KEYS),
    _decode(128, torch.bfloat16, cut=True, loop=_KEYS),
    # Spills are between the loops over sinks and over the window, not inside them.
    _decode(128, torch.int8, sunk=True, loop=Loop(copies=4), max_spills=64),
    _decode(128, torch.bfloat16, m=32, tree=True, sunk=True, max_spills=160),
    _decode(128, torch.bfloat16, m=32, tree=True),
    _decode(128, torch.bfloat16, m=64, loop=Loop(copies=16, products=12, waits=1)),
    _decode(128, torch.bfloat16, m=64, tree=True),
    _decode(128, torch.float32, m=64),
    _decode(256, torch.float32, m=64),
    # Heads of 512 (Gemma 4): a tile of 16 keys has as many bytes as 64 keys of 128.
    _decode(512, torch.bfloat16, loop=Loop(copies=8, barriers=10, instructions=700)),
    *(_decode(512, cache, loop=Loop(copies=2)) for cache in (torch.int8, torch.uint8)),
    _decode(512, torch.float8_e4m3fn, loop=Loop(copies=2)),
    _decode(512, torch.bfloat16, options=True),
    _decode(512, torch.bfloat16, sunk=True),
    _decode(512, torch.bfloat16, m=32, tree=True),
    _decode(512, torch.int8, m=32),
    _decode(512, torch.float32),
    _merge(128),
    _merge(512),
)


def _mla(heads: int) -> Resources:
    m = attention_mla.tile_rows(heads)
    strides = "latent_stride latent_head_stride rope_stride rope_head_stride"
    return Resources(
        attention_mla.mla_decode_kernel,
        f"{heads} heads of 512 + 64, bf16",
        _types(
            p_bf16="q_latent q_rope cache out",
            p_i32="block_table query_start seq_lens",
            p_i64="tree",
            p_fp32="part_out part_weight",
            i32=f"{strides} table_stride first_sequence above most programs slab",
            fp32="scale",
        ),
        {
            "tree": None,
            "HEADS": heads,
            "LATENT": 512,
            "ROPE": 64,
            "BLOCK_LATENT": 512,
            "BLOCK_ROPE": 64,
            "BLOCK_M": m,
            "BLOCK_N": attention_mla.KEYS,
            "BLOCK_SIZE": 16,
            "TREE": False,
            "DIRECT": False,
        },
        num_warps=attention_mla.tile_warps(m),
        num_stages=STAGES,
        aligned=_aligned(strides),
    )


def _prefill(
    head_dim: int,
    cache: torch.dtype,
    window: bool = False,
    options: bool = False,
    sunk: bool = False,
    cut: bool = False,
    loop: Loop | None = None,
    max_spills: int = 0,
) -> Resources:
    """Return an entry for prefill. See `_decode`."""
    types = _cache_types(cache)
    scaled = bool(types["k_scales"])
    edges = window or sunk or cut
    tiles = prefill_tiles(head_dim, max(2, cache.itemsize), kind=KINDS[cache], edges=edges)
    return Resources(
        attention_prefill.attention_prefill_kernel,
        f"head_dim {head_dim}, KV {str(cache).removeprefix('torch.')}{', window' * window}"
        f"{', capped, sinks' * options}{', sinks of a window' * sunk}{', cut' * cut}",
        types
        | _types(
            p_i32="block_table query_start seq_lens first_keys",
            p_fp32="sinks" * options,
            i32="q_stride sink_q_stride table_stride window sink_keys first_sequence sequences "
            "above",
            fp32=f"scale{' softcap' * options}",
        ),
        {
            **({} if scaled else {"k_scales": None, "v_scales": None}),
            **({} if options else {"softcap": None, "sinks": None}),
            **({} if sunk else {"sink_q": None}),
            **({} if cut else {"first_keys": None}),
            **LLAMA_HEADS,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d(head_dim),
            "BLOCK_M": tiles.m,
            "BLOCK_N": tiles.n,
            "BLOCK_NEAR": tiles.near,
            "BLOCK_SIZE": 16,
            "KIND": KINDS[cache],
            "WINDOW": 3 if sunk else int(window),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        aligned=_aligned("q_stride"),
        max_spills=max_spills,
        loop=loop,
    )


# 128 keys of 128: 8 products with K and 8 with V, each 64 cycles for two warp groups, and one wait
# for both.
_TILE = Loop(copies=16, products=16, waits=1, barriers=2, instructions=530)

PREFILL = (
    _prefill(64, torch.bfloat16, loop=Loop(copies=8, products=12, waits=1, barriers=2)),
    _prefill(128, torch.bfloat16, loop=_TILE),
    _prefill(128, torch.bfloat16, window=True, loop=_TILE),
    _prefill(128, torch.bfloat16, cut=True, loop=_TILE),
    _prefill(64, torch.bfloat16, sunk=True),
    _prefill(128, torch.bfloat16, sunk=True, loop=_TILE),
    _prefill(128, torch.int8, sunk=True),
    _prefill(64, torch.bfloat16, options=True),
    _prefill(256, torch.bfloat16, options=True),
    _prefill(256, torch.bfloat16, loop=Loop(copies=8, products=18, waits=1, barriers=2)),
    *(
        _prefill(head_dim, cache, loop=Loop(copies=4, products=6, waits=2))
        for head_dim, cache in (
            (64, torch.int8),
            (128, torch.float8_e4m3fn),
            (128, torch.int8),
            (256, torch.float8_e4m3fn),
        )
    ),
    _prefill(128, torch.uint8, loop=Loop(copies=4, products=12, waits=2, instructions=1020)),
    _prefill(128, torch.float32),
    _prefill(256, torch.float32),
    # 64 products of 16 keys with K, and two of 256 columns of V; spills are outside loops.
    _prefill(512, torch.bfloat16, loop=Loop(copies=16, products=66, waits=1), max_spills=16),
    _prefill(512, torch.bfloat16, options=True, max_spills=24),
    _prefill(512, torch.bfloat16, window=True),
    _prefill(512, torch.bfloat16, cut=True),
    *(_prefill(512, cache) for cache in (torch.int8, torch.float8_e4m3fn, torch.uint8)),
    _prefill(512, torch.float32),
)


def _bytes(what: str, tile: Tile, splits: int, how: tl.constexpr, group: int = 0) -> Resources:
    """Return an entry with a residual and without a bias, x in the groups of the weight."""
    codes = "*fp8e4nv" if how == linear_bytes.E4M3 else "*i8"
    sums = "*i32" if how == linear_bytes.INT8 and not group else "*fp32"
    return Resources(
        linear_bytes.bytes_kernel,
        f"{what}, {tile.tokens} tokens",
        {"x": codes, "values": codes, "partials": sums}
        | _types(
            p_fp32="x_scales scales",
            p_bf16="residual y",
            p_i32="arrivals",
            i32="tokens rows steps split_steps residual_stride scale_stride",
        ),
        {
            "bias": None,
            **({"partials": None} if splits == 1 else {}),
            "HOW": how.value,
            "GROUP": group,
            "X_GROUP": group,
            "SPAN": 128,
            "ACTIVATION": 0,
            "SPLITS": splits,
            "BO": tile.outputs,
            "BT": tile.tokens,
            "STAGES": tile.stages,
        },
        num_warps=tile.num_warps,
        aligned=_aligned("rows residual_stride scale_stride"),
    )


BYTES = (
    _bytes("int8", FEW[0], 4, linear_bytes.INT8),
    _bytes("int8", MANY, 1, linear_bytes.INT8),
    _bytes("int8 in groups of 128", MANY, 1, linear_bytes.INT8, 128),
    _bytes("E4M3", FEW[0], 4, linear_bytes.E4M3),
    _bytes("E4M3 in groups of 128", FEW[1], 4, linear_bytes.E4M3, 128),
    _bytes("E4M3 in groups of 128", MANY, 1, linear_bytes.E4M3, 128),
    _bytes("E4M3 as fp16 in groups of 128", MANY_NARROW, 1, linear_bytes.E4M3_IN_FP16, 128),
)


def _scales_of(code: tl.constexpr, offset: tl.constexpr) -> str:
    if offset == words.NO_OFFSET:
        return "*u8" if code == words.E2M1 else "*fp32"
    return "*i32"


def _words(
    what: str,
    tile: Tile,
    splits: int,
    *,
    code: tl.constexpr = words.INT4,
    offset: tl.constexpr = words.ZERO,
    group: int = 128,
    span: int = 128,
    activation: int = 0,
    loop: Loop | None = None,
) -> Resources:
    """Return an entry of whole steps, with a residual and without a bias."""
    # With few tokens, five or six programs must fit on a multiprocessor to keep memory busy.
    registers, shared = {
        FEW[0]: (80, MAX_SHARED // 6),
        FEW_INT4: (96, MAX_SHARED // 5),
    }.get(tile, (MAX_REGISTERS, MAX_SHARED))
    absent = ["bias"]
    absent += ["partials"] if splits == 1 else []
    absent += ["factors"] if offset != words.MINIMUM else []
    strides = "x_stride residual_stride scale_stride"
    return Resources(
        linear_words.words_kernel,
        f"{what}, bf16, tile of {tile.tokens} tokens",
        {"scales": _scales_of(code, offset)}
        | _types(
            p_bf16="x residual y",
            p_i32="words arrivals",
            p_fp32="factors partials",
            i32=f"tokens rows inputs steps split_steps {strides}",
        ),
        {
            **dict.fromkeys(absent),
            "FORMAT": code.value,
            "OFFSET": offset.value,
            "GROUP": group,
            "SPAN": span,
            "WHOLE": True,
            "SUBTRACT": tile != FEW_INT4,
            "ACTIVATION": activation,
            "SPLITS": splits,
            "BO": tile.outputs,
            "BT": tile.tokens,
            "STAGES": tile.stages,
        },
        num_warps=tile.num_warps,
        aligned=_aligned(f"rows inputs {strides}"),
        max_registers=registers,
        max_shared=shared,
        loop=loop,
    )


# 128 outputs and inputs: per thread, 4 copies of 16 bytes are words, and one is of x. At 4.3 TB/s
# each of the four schedulers of a multiprocessor has about 450 cycles for them.
_INT4_STEP = Loop(copies=5, instructions=310)
_SILU = ACTIVATIONS["silu_and_mul"]
_ONE_WAIT = Loop(products=8, waits=1)  # for all products of a step

WORDS = (
    _words("int4 in groups of 128", FEW_INT4, 4, loop=_INT4_STEP),
    *(
        _words("int4 in groups of 128", tile, tile.splits, loop=Loop(copies=4))
        for tile in (*FEW[1:], MORE)
    ),
    _words("int4 with silu_and_mul", FEW_INT4, 1, activation=_SILU, loop=_INT4_STEP),
    _words("int4 with silu_and_mul", MANY, 1, activation=_SILU),
    _words("int4 with minima", FEW[0], 4, offset=words.MINIMUM, group=32, span=32),
    _words("int4 with minima", MANY_NARROW, 1, offset=words.MINIMUM, group=32, span=32),
    _words("int8", FEW[0], 4, code=words.INT8, offset=words.NO_OFFSET, group=0),
    *(
        _words("int8", tile, 1, code=words.INT8, offset=words.NO_OFFSET, group=0, loop=_ONE_WAIT)
        for tile in (FEW[-1], MANY)
    ),
    _words("E4M3", FEW[0], 4, code=words.E4M3, offset=words.NO_OFFSET, group=0),
    _words("E4M3 in groups of 128", MANY, 1, code=words.E4M3, offset=words.NO_OFFSET),
    *(
        _words("E2M1", tile, 1, code=words.E2M1, offset=words.NO_OFFSET, group=32, span=32)
        for tile in (FEW[0], MANY)
    ),
)


def _experts(
    kernel: Any, what: str, tile: Tile, types: Mapping[str, str], loop: Loop, **own: object
) -> Resources:
    """Return an entry of whole steps, without biases, with eight experts per token and bf16
    results."""
    strides = "x_stride scale_stride"
    return Resources(
        kernel,
        f"{what}, {tile.tokens} tokens of an expert",
        {
            **types,
            **_types(
                p_bf16="y",
                p_i64="table",
                p_i32="blocks order",
                i32=f"pairs tokens experts rows inputs steps {strides}",
            ),
        },
        {
            "PER": 8,
            "BIASED": False,
            "ACTIVATION": _SILU,
            "BO": tile.outputs,
            "BT": tile.tokens,
            "STAGES": tile.stages,
            **own,
        },
        num_warps=tile.num_warps,
        aligned=_aligned(f"experts rows inputs {strides}"),
        loop=loop,
    )


def _float_experts(tile: Tile, loop: Loop) -> Resources:
    span = experts.float_span(tile, torch.bfloat16)
    types = {"x": "*bf16"}
    kernel = experts.float_experts_kernel
    return _experts(kernel, "bf16", tile, types, loop, SPAN=span, WHOLE=True)


def _word_experts(tile: Tile, loop: Loop) -> Resources:
    return _experts(
        experts.word_experts_kernel,
        "int4 in groups of 128, bf16",
        tile,
        {"x": "*bf16"},
        loop,
        FORMAT=words.INT4.value,
        OFFSET=words.ZERO.value,
        GROUP=128,
        SPAN=128,
        WHOLE=True,
        SUBTRACT=tile != FEW_INT4,
    )


def _byte_experts(tile: Tile, loop: Loop) -> Resources:
    return _experts(
        experts.byte_experts_kernel,
        "E4M3 in groups of 128",
        tile,
        {"x": "*fp8e4nv", "x_scales": "*fp32"},
        loop,
        TURNS=True,
        HOW=linear_bytes.E4M3.value,
        GROUP=128,
        X_GROUP=128,
        SPAN=128,
    )


EXPERTS = (
    _float_experts(FEW[0], Loop(copies=9)),
    _float_experts(MANY, Loop(copies=8, products=4, waits=1)),
    _word_experts(FEW_INT4, Loop(copies=5, instructions=315)),
    _word_experts(MANY, Loop(copies=8, products=8, waits=1)),
    _byte_experts(FEW[0], Loop(copies=4)),
    _byte_experts(MANY, Loop(copies=8, products=4, waits=1)),
    Resources(
        experts.pair_inputs_kernel,
        "bf16",
        _types(p_bf16="x out", p_i64="table ids", p_fp32="scales", i32="experts inputs x_stride"),
        {"weights": None, "PER": 8, "ORDERED": True, "BLOCK": experts.PIECE},
        aligned=_aligned("experts inputs x_stride"),
        max_registers=64,
    ),
    Resources(
        experts.pair_inputs_kernel,
        "bf16, weighed",
        _types(p_bf16="x out", p_i64="table ids", p_fp32="weights", i32="experts inputs x_stride"),
        {"scales": None, "PER": 1, "ORDERED": False, "BLOCK": experts.PIECE},
        aligned=_aligned("experts inputs x_stride"),
        max_registers=64,
    ),
    Resources(
        experts.combine_kernel,
        "eight experts of a token, bf16",
        _types(p_bf16="made residual y", p_i64="ids", p_fp32="weights", i32="dim residual_stride"),
        {"ACTIVE": 8, "ACTIVE_BLOCK": 8, "BLOCK": experts.PIECE},
        aligned=_aligned("dim residual_stride"),
        max_registers=64,
    ),
    Resources(
        expert_rows.sort_kernel,
        "pairs by expert",
        _types(p_i64="ids", p_i32="order starts", i32="pairs"),
        {"BLOCK": expert_rows.BLOCK},
        max_registers=64,
    ),
    *(
        Resources(
            expert_rows.blocks_kernel,
            f"{number} experts",
            _types(p_i32="starts blocks", i32="pairs count experts"),
            {"BT": 8, "EXPERTS": number, "BLOCK": block},
            aligned=_aligned("experts"),
            max_registers=128,
        )
        for number, block in ((8, expert_rows.LISTED), (128, 32), (1024, 4))
    ),
    *(
        Resources(
            route.route_kernel,
            f"{active} of {number} experts, {groups} groups",
            _types(
                p_fp32="logits weights correction each_scale",
                p_i64="ids",
                i32="stride",
                fp32="scale jitter",
            ),
            {
                "EXPERTS": number,
                "ACTIVE": active,
                "SCORES": SCORES.index("sigmoid" if groups > 1 else "softmax"),
                "GROUPS": groups,
                "KEPT": max(1, groups // 2),
                "TWO": groups > 1,
                "NORMALISED": True,
                "GROUP_BLOCK": groups,
                "SIZE_BLOCK": number // groups,
                "ACTIVE_BLOCK": active,
                **({"each_scale": None} if groups > 1 else {"correction": None}),
            },
            num_warps=1,
            aligned=_aligned("stride"),
        )
        for number, active, groups in ((128, 8, 1), (256, 8, 8), (1024, 8, 1))
    ),
)

FINISH = Resources(
    linear_end.finish_kernel,
    "silu_and_mul, bf16",
    _types(p_bf16="z residual y", i32="rows z_stride residual_stride"),
    {"bias": None, "ACTIVATION": _SILU, "BLOCK": linear_end.BLOCK},
    aligned=_aligned("rows z_stride residual_stride"),
    max_registers=64,
)


def _word_rows(
    what: str,
    code: tl.constexpr,
    offset: tl.constexpr,
    group: int,
    span: int = 128,
    ids: bool = False,
    paired: bool = False,
) -> Resources:
    absent = ["order"]
    absent += [] if ids else ["ids"]
    absent += [] if offset == words.MINIMUM else ["factors"]
    return Resources(
        matrix.word_rows_kernel,
        f"{what}, bf16",
        {"scales": _scales_of(code, offset)}
        | _types(
            p_i32="words",
            p_fp32="factors",
            p_i64="ids",
            p_bf16="out",
            i32="first count rows inputs steps scale_stride",
        ),
        {
            **dict.fromkeys(absent),
            "FORMAT": code.value,
            "OFFSET": offset.value,
            "GROUP": group,
            "SPAN": span,
            "PAIRED": paired,
            "BO": matrix.ROWS_AT_ONCE,
        },
        aligned=_aligned("rows inputs scale_stride"),
        max_registers=64,
    )


MATRIX_ROWS = (
    _word_rows("int4 in groups of 128, of ids", words.INT4, words.ZERO, 128, ids=True),
    _word_rows("int4 in groups of 128, gate and up", words.INT4, words.ZERO, 128, paired=True),
    _word_rows("int4 with minima", words.INT4, words.MINIMUM, 32, 32),
    _word_rows("int8", words.INT8, words.NO_OFFSET, 0),
    _word_rows("E4M3", words.E4M3, words.NO_OFFSET, 0),
    _word_rows("E2M1", words.E2M1, words.NO_OFFSET, 32, 32),
    Resources(
        matrix.byte_rows_kernel,
        "E4M3, bf16",
        _types(
            p_i8="values",
            p_fp32="scales",
            p_i64="ids",
            p_bf16="out",
            i32="inputs filled scale_stride",
        ),
        {"order": None, "FORMAT": words.E4M3.value, "GROUP": 0, "BLOCK": matrix.BYTES_AT_ONCE},
        aligned=_aligned("inputs filled scale_stride"),
        max_registers=64,
    ),
)


def _round(
    kernel: Any, what: str, constants: Mapping[str, object], num_warps: int = 4
) -> Resources:
    return Resources(
        kernel,
        what,
        _types(
            p_bf16="x",
            p_i8="out",
            p_fp32="scales given",
            i32="tokens inputs filled groups x_stride",
        ),
        constants,
        aligned=_aligned("inputs filled groups x_stride"),
        num_warps=num_warps,
    )


_ONE_TOKEN = {"TOKENS": 1, "BLOCK": rounding.MOST_STEPS}

ROUND = (
    _round(
        rounding.round_tokens_kernel,
        "bf16 to E4M3 by a given scale",
        {"E4M3": True, "EACH": False, **_ONE_TOKEN},
        num_warps=8,
    ),
    _round(
        rounding.round_tokens_kernel,
        "bf16 to int8",
        {"given": None, "E4M3": False, "EACH": False, **_ONE_TOKEN},
        num_warps=8,
    ),
    _round(
        rounding.round_groups_kernel,
        "bf16 to E4M3 in groups of 128",
        {"GROUP": 128, "E4M3": True, "GROUPS": rounding.MOST_STEPS // 128, "BLOCK": 128},
    ),
)


def _norms(dim: int, what: str) -> tuple[Resources, Resources]:
    block, at_once, warps = norm.shape_of(dim)
    types = _types(
        p_bf16="x weight bias out", i32="rows inner outer_stride inner_stride dim", fp32="eps"
    )
    constants = {"ROWS": at_once, "DIM": block}
    if at_once == 1:
        constants["inner"] = 1  # of two dimensions, which Triton specialises
    aligned = _aligned("outer_stride inner_stride dim")
    kernels: tuple[tuple[Any, dict[str, int]], ...]
    kernels = ((norm.rms_norm_kernel, {}), (norm.layer_norm_kernel, {"EACH": at_once > 1}))
    rms, layer = (
        Resources(
            k, what, types, constants | own, num_warps=warps, aligned=aligned, max_registers=128
        )
        for k, own in kernels
    )
    return rms, layer


NORM = (
    *_norms(4096, "hidden 4096, bf16"),
    *_norms(16384, "hidden 16384, bf16"),
    *_norms(128, "heads of 128, bf16"),
)


def _rotary(
    kernel: Any, what: str, most: int, types: Mapping[str, str], **own: object
) -> Resources:
    """Return an entry for a tile of 8 heads of 128."""
    sizes = _types(p_fp32="rotation", i32="q_stride k_stride v_stride heads kv_heads")
    return Resources(
        kernel,
        f"8 heads of 128, {what}",
        {**types, **sizes},
        {"DIM": 128, "HALF": 64, "HEADS": 8, **own},
        num_warps=2,
        aligned=_aligned("q_stride k_stride v_stride"),
        fused_products=False,
        max_registers=most,
    )


def _store(kind: rotary.Kind, cache: str, *, normed: bool = False) -> Resources:
    types = _types(p_bf16="q k v q_weight k_weight", p_i64="slots", p_i16="k_scales v_scales")
    types |= {"k_cache": cache, "v_cache": cache, "eps": "fp32"}
    absent = {} if normed else {"q_weight": None, "k_weight": None}
    what = f"{'normed, ' * normed}bf16 to {kind}"
    own = {"KIND": kind, "TURNED": True, "NORMED": normed, **absent}
    return _rotary(rotary.store_kernel, what, 128, types, **own)


ROTARY = (
    Resources(
        rotary.rotations_kernel,
        "128 channels",
        _types(p_fp32="high low out", p_i64="positions", i32="last low_rows"),
        {"DIM": 128, "HALF": 64},
        num_warps=1,
        aligned=_aligned("low_rows"),
        fused_products=False,
        max_registers=40,
    ),
    Resources(
        rotary.keep_queries_kernel,
        "32 heads of 128, bf16",
        _types(
            p_bf16="q",
            p_fp32="ring",
            p_i32="query_start seq_lens state_rows",
            i32="q_stride",
            fp32="scale",
        ),
        {"LAST": 32, "WIDTH": 4096, "BLOCK": 1024},
        aligned=_aligned("q_stride"),
        fused_products=False,
        max_registers=40,
    ),
    _rotary(rotary.rotary_kernel, "bf16", 96, _types(p_bf16="q k")),
    _store("float", "*bf16"),
    _store("float", "*bf16", normed=True),
    _store("fp8", "*u8"),
    _store("int8", "*i8"),
    _store("int4", "*u8"),
)


def _drawn(
    kernel: Any,
    what: str,
    constants: Mapping[str, object],
    own: dict[str, str],
    most: int = MAX_REGISTERS,
    warps: int = draw.WARPS,
) -> Resources:
    """Return an entry for rows of 128k logits.

    Args:
        own: types of the kernel's own arguments.
        most: registers per thread.
    """
    all_constants = {"CHUNK": draw.CHUNK, "CHUNKS": (1 << 17) // draw.CHUNK, **constants}
    return Resources(
        kernel,
        what,
        _types(
            **{
                "p_fp32": "logits highs temperature min_p centre out",
                "p_i64": "cut limit",
                "p_i32": "equals",
                "i32": "vocab stride chunks",
            }
        )
        | own,
        {name: value for name, value in all_constants.items() if name in kernel.arg_names},
        num_warps=warps,
        aligned=_aligned("vocab stride"),
        fused_products=kernel in (draw.coarse_kernel, draw.bounds_kernel),
        max_registers=most,
    )


def _rule(kernel: Any, what: str, *, count: bool = False, near: bool = False) -> Resources:
    return _drawn(
        kernel,
        what,
        {
            "FIRST": not count,
            "COUNT": count,
            "NEAR": near,
            "CUT": not count,
            "MIN_P": near,
            "TILE": draw.TILE,
        },
        _types(
            p_fp64="shares parts targets weights nearer sums",
            p_fp32="bounds listed",
            p_i32="counts",
        ),
        128,
        draw.SETTLE_WARPS if kernel is draw.settle_kernel else draw.WARPS,
    )


_EVERY_RULE = {"CUT": True, "MIN_P": True, "TYPICAL": True}
_DRAWN = "sums moments uniforms"

DRAW = (
    *(
        _rule(kernel, f"{what}, 128k", count=count, near=near)
        for kernel in (draw.coarse_kernel, draw.bounds_kernel, draw.list_kernel, draw.settle_kernel)
        for what, count, near in (
            ("top_k", True, False),
            ("top_p after top_k", False, False),
            ("typical_p after every rule", False, True),
        )
        if not (near and kernel is draw.bounds_kernel)
    ),
    _drawn(
        draw.sums_kernel,
        "every rule, 128k",
        {"MOMENTS": True, **_EVERY_RULE},
        _types(p_fp64=_DRAWN),
        128,
    ),
    _drawn(
        draw.pick_kernel,
        "every rule, 128k",
        {"WHOLE": False, **_EVERY_RULE},
        _types(p_fp64=_DRAWN, p_i64="out"),
        128,
    ),
    _drawn(draw.shares_kernel, "every rule, 128k", _EVERY_RULE, _types(p_fp64=_DRAWN), 128),
)

SMALL = (
    *(
        Resources(
            activation.activate_kernel,
            f"{name}, bf16",
            _types(p_bf16="x out", i32="columns row_stride"),
            {"ACTIVATION": number, "BLOCK": activation.MOST},
            aligned=_aligned("columns row_stride"),
            max_registers=40,
        )
        for name, number in ACTIVATIONS.items()
        if name is not None
    ),
    Resources(
        activation.scaled_kernel,
        "bf16",
        _types(p_bf16="x out", i32="n", fp32="factor"),
        {"BLOCK": activation.MOST},
        aligned=_aligned("n"),
        max_registers=40,
    ),
    Resources(
        activation.softcap_kernel,
        "fp32",
        _types(p_fp32="x", i32="n", fp32="cap"),
        {"BLOCK": activation.MOST},
        aligned=_aligned("n"),
        max_registers=40,
    ),
    Resources(
        draw.penalize_kernel,
        "fp32",
        _types(
            p_fp32="logits repetitions frequencies presences",
            p_i64="rows seen",
            p_u8="in_prompt",
            p_i32="counts",
            i32="vocab stride seen_stride",
        ),
        {"BLOCK": draw.PENALIZED},
        aligned=_aligned("vocab stride seen_stride"),
        fused_products=False,
        max_registers=80,
    ),
    Resources(
        draw.mask_kernel,
        "fp32",
        _types(p_fp32="logits", p_i64="rows", p_i32="words", i32="vocab stride words_stride"),
        {"BLOCK": draw.PENALIZED},
        aligned=_aligned("vocab stride"),
        max_registers=40,
    ),
    Resources(
        rows.gather_kernel,
        "rows of 4096 bf16",
        _types(p_i64="table ids out", i32="dim table_stride"),
        {"BLOCK": rows.PIECE},
        aligned=_aligned("dim table_stride"),
        max_registers=64,
    ),
    Resources(
        rows.largest_of_chunks_kernel,
        "fp32",
        _types(p_fp32="logits tops", p_i32="firsts", i32="vocab stride"),
        {"CHUNK": rows.CHUNK},
        num_warps=8,
        aligned=_aligned("vocab stride"),
        max_registers=96,
    ),
)

_SEQUENCES = "starts lengths rows"
_DELTA_SIZES = "x_stride gates_stride state_stride key_heads value_heads key_dim value_dim"

STATES = (
    Resources(
        states.gated_kernel,
        "SiLU, bf16",
        _types(p_bf16="x gate out", i32="columns x_stride gate_stride"),
        {"BY": 1, "ONE": False, "BLOCK": activation.MOST},
        aligned=_aligned("columns x_stride gate_stride"),
        max_registers=48,
    ),
    Resources(
        states.causal_conv_kernel,
        "four taps, bf16",
        _types(
            p_bf16="x weight out",
            p_fp32="state",
            p_i32=_SEQUENCES,
            i32="channels x_stride state_stride",
        ),
        {"bias": None, "WIDTH": 4, "SILU": True, "BLOCK": states.CHANNELS},
        aligned=_aligned("channels x_stride state_stride"),
        max_registers=96,
    ),
    Resources(
        states.gated_delta_kernel,
        "heads of 128, bf16",
        _types(
            p_bf16="x gates out",
            p_fp32="decay bias state",
            p_i32=_SEQUENCES,
            i32=_DELTA_SIZES,
            fp32="scale eps",
        ),
        {"KEYS": 128, "BLOCK": states.COLUMNS},
        aligned=_aligned("x_stride gates_stride state_stride key_heads value_heads value_dim"),
        max_registers=168,
    ),
)

RESOURCES: tuple[Resources, ...] = (
    *DECODE,
    *(_mla(heads) for heads in (16, 128)),
    *PREFILL,
    *BYTES,
    *WORDS,
    *EXPERTS,
    FINISH,
    *MATRIX_ROWS,
    *ROUND,
    *NORM,
    *ROTARY,
    *DRAW,
    *SMALL,
    *STATES,
)

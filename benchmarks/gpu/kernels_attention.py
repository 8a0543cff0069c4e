"""Attention over the paged cache: shares of bandwidth (decode) and of the tensor cores (prefill).
Also latent attention: bound by bandwidth with few heads, by both with many; and over the keys that
an indexer chooses, with the choice.

Heads of Llama-3-8B: 32 of queries, 8 of keys, head_dim 128. The minimum work: a decode reads the
keys and values of every sequence once, and its queries, and writes its results; a prefill has
4 head_dim operations for each head and each key that a query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from clock import Call, Timer, copies_for, timed
from notes import Notes
from place import DEVICE, sized
from steps import BLOCK_SIZE, Heads, cache, layout, token_bytes

from kvik.attention.fresh_prompts import FreshPrompts
from kvik.attention.triton import TritonAttention, places_of
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.triton.attention_chosen import ListedRows, attend_rows
from kvik.kernels.triton.attention_mla import latent_attention
from kvik.kernels.triton.attention_paged import PagedCache, PagedStep, Scoring, paged_attention
from kvik.kernels.triton.indexer import choose
from kvik.spec.kv import SCORES

HEADS = sized(Heads(), Heads(4, 2, 32))
SCALE = HEADS.dim**-0.5
FORMATS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
DECODES = sized(((64, 8192), (1, 32768), (256, 1024)), ((2, 33),))
# Heads of DeepSeek-V2-Lite and DeepSeek-V2 (128); widths of a key's latent and rotated parts.
LATENT_HEADS, LATENT = sized((((16, "read"), (128, "bf16")), (512, 64)), (((4, "read"),), (32, 16)))
# Of DeepSeek V3.2: heads of the indexer and their width, keys that a query reads, heads.
INDEX, TOP, READERS = sized(((64, 128), 2048, 128), ((4, 16), 16, 4))
WHOLE, CHUNK = "prefill 8k", "chunk of 2k behind 6k"
PREFILLS = {
    WHOLE: sized((0, 8192), (0, 80)),
    CHUNK: sized((6144, 2048), (10, 70)),
}


def measure(notes: Notes, time: Timer = timed) -> None:
    """Measure, first the cells that bars and advice need (report.py)."""
    parts: dict[str, Callable[[], None]] = {}

    def decode(batch: int, context: int, format: str) -> None:
        name = f"decode {batch} x {context // 1024}k {format}"
        parts[name] = partial(_decode, notes, time, name, batch, context, format)

    def prefill(name: str, format: str) -> None:
        parts[f"{name} {format}"] = partial(_prefill, notes, time, name, format)

    decode(*DECODES[0], "bf16")
    prefill(WHOLE, "bf16")
    parts[f"{WHOLE} sdpa"] = partial(_torch_prefill, notes, time)
    for format in FORMATS:
        for cell in DECODES:
            decode(*cell, format)
        if format != "int8":
            for name in PREFILLS:
                prefill(name, format)
    for heads, ceiling in LATENT_HEADS:
        name = f"latent decode, {heads} heads"
        parts[name] = partial(_latent_decode, notes, time, name, heads, ceiling)
    for name in ("decodes", "prompt"):
        parts[f"choice, {name}"] = partial(_chosen, notes, time, name)
    for name, part in parts.items():  # each in its first place
        notes.attempt(name, part)


def _decode(notes: Notes, time: Timer, name: str, batch: int, context: int, format: str) -> None:
    planned, blocks = layout([(context - 1, 1)] * batch)
    step = TritonAttention(TORCH).plan(planned, None).steps[0]
    first = cache(blocks, HEADS, FORMATS[format])
    keys = token_bytes(first) * batch * context
    caches = [first] + [cache(blocks, HEADS, FORMATS[format]) for _ in range(copies_for(keys) - 1)]
    q = torch.randn(batch, HEADS.queries, HEADS.dim, device=DEVICE).bfloat16()
    calls = [_call(q, PagedCache(kv.k, kv.v, kv.k_scales, kv.v_scales), step) for kv in caches]
    found = time(calls)
    moved = keys + 2 * q.nbytes
    notes.rate(name, found.seconds, "read", moved=moved, captured=found.captured)


def _latent_decode(notes: Notes, time: Timer, name: str, heads: int, ceiling: str) -> None:
    """Time a latent decode: one vector per token, which all heads share."""
    batch, context = DECODES[0]
    latent, rope = LATENT
    planned, blocks = layout([(context - 1, 1)] * batch)
    step = TritonAttention(TORCH).plan(planned, None).steps[0]
    vectors = torch.empty(blocks, BLOCK_SIZE, latent + rope, dtype=torch.bfloat16, device=DEVICE)
    vectors.normal_()
    q = torch.randn(batch, heads, latent + rope, device=DEVICE).bfloat16()
    both = q.split((latent, rope), 2)
    out = q.new_empty(batch, heads, latent)
    found = time([lambda: latent_attention(*both, vectors, step, SCALE, None, out)])
    keys = batch * context
    moved = 2.0 * (keys * (latent + rope) + batch * heads * (2 * latent + rope))
    operations = 2.0 * keys * heads * (2 * latent + rope)
    done = {"moved": moved} if ceiling == "read" else {"operations": operations}
    notes.rate(name, found.seconds, ceiling, **done, captured=found.captured)


def _chosen(notes: Notes, time: Timer, name: str) -> None:
    """Time the choice of keys, and attention over them."""
    batch, context = DECODES[0]
    spans = [(context - 1, 1)] * batch if name == "decodes" else [PREFILLS[CHUNK]]
    planned, blocks = layout(spans)
    at, tokens = places_of(planned), sum(new for _, new in spans)
    seen = sum(new * cached + new * (new + 1) // 2 for cached, new in spans)
    heads, dim = INDEX
    q, keys, weights = (
        torch.randn(*shape, device=DEVICE).bfloat16()
        for shape in ((tokens, heads, dim), (blocks * BLOCK_SIZE, dim), (tokens, heads))
    )
    choice = choose(q, weights, keys, at, TOP, SCORES // at.longest)
    found = time([lambda: choose(q, weights, keys, at, TOP, SCORES // at.longest)])
    operations = 2.0 * seen * heads * dim
    notes.rate(f"choice, {name}", found.seconds, "bf16", operations=operations)
    latent, rope = LATENT
    width = latent + rope
    rows = ListedRows(
        torch.randn(blocks * BLOCK_SIZE, width, device=DEVICE).bfloat16(), at, *choice
    )
    both = torch.randn(tokens, READERS, width, device=DEVICE).bfloat16().split(LATENT, 2)
    queries = [new for _, new in spans]
    found = time([lambda: attend_rows(*both, rows, None, SCALE, None, queries)])
    operations = 2.0 * int(choice[1].sum()) * READERS * (width + latent)
    notes.rate(f"chosen keys, {name}", found.seconds, "bf16", operations=operations)


def _prefill(notes: Notes, time: Timer, name: str, format: str) -> None:
    cached, new = PREFILLS[name]
    planned, blocks = layout([(cached, new)])
    step = TritonAttention(TORCH).plan(planned, None).steps[0]
    kv = cache(blocks, HEADS, FORMATS[format])
    q = torch.randn(new, HEADS.queries, HEADS.dim, device=DEVICE).bfloat16()
    found = time([_call(q, PagedCache(kv.k, kv.v, kv.k_scales, kv.v_scales), step)])
    done = _operations(cached, new)
    title = f"{name} {format}"
    notes.rate(title, found.seconds, "bf16", operations=done, captured=found.captured)


def _torch_prefill(notes: Notes, time: Timer) -> None:
    """Time the same prefill by torch, including gathering the keys from the cache."""
    tokens = PREFILLS[WHOLE][1]
    planned, blocks = layout([(0, tokens)])
    prompts = FreshPrompts(tokens)
    (prompt,) = prompts.take(planned, None).values()
    kv = cache(blocks, HEADS, torch.bfloat16)
    sizes = HEADS.queries, HEADS.keys
    q, v = (torch.randn(tokens, n, HEADS.dim, device=DEVICE).bfloat16() for n in sizes)
    found = time([lambda: prompts.attend(q, kv.k, v, prompt, SCALE)])
    done = _operations(0, tokens)
    notes.rate(f"{WHOLE} sdpa", found.seconds, "bf16", operations=done, captured=found.captured)


def _call(q: torch.Tensor, kv: PagedCache, step: PagedStep) -> Call:
    out = torch.empty_like(q)
    return lambda: paged_attention(q, kv, step, Scoring(SCALE), out)


def _operations(cached: int, new: int) -> float:
    return 4.0 * HEADS.dim * HEADS.queries * (new * cached + new * (new + 1) / 2)

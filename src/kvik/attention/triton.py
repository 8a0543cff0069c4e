"""Attention by Triton kernels over the paged cache, for GPUs.

The kernels read the step's layout on the device, so a plan is a summary of it in plain integers,
and a step can be captured in a CUDA graph. A mixed step is a few launches, by number of queries:
`kernels/triton/attention_paged.py` decides which kernel processes which sequence. Long prompts that
begin in this step may be computed by torch (`fresh_prompts.py`), but never in a captured step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvik.attention.base import (
    OPTIONS,
    Attend,
    AttendLatent,
    AttentionBackend,
    AttentionMetadata,
    BackendCaps,
    LayerKV,
)
from kvik.attention.compressed import AttendCompressed
from kvik.attention.fresh_prompts import FreshPrompt, FreshPrompts
from kvik.attention.indexed import Choice, Indexed, store_keys
from kvik.attention.layout import StepLayout
from kvik.kernels.ops import Ops
from kvik.kernels.triton.attention_chosen import LastKeys, ListedRows, attend_rows
from kvik.kernels.triton.attention_mla import latent_attention
from kvik.kernels.triton.attention_paged import (
    PagedCache,
    PagedStep,
    Scoring,
    paged_attention,
    runs_of,
)
from kvik.kernels.triton.entries import make_entries, turn_last
from kvik.kernels.triton.indexer import Places, choose
from kvik.kernels.triton.rotary import keep_queries, rotate_and_store
from kvik.spec.kv import ENTRY_TOKENS, SCORES, IndexSpec
from kvik.spec.visible_keys import Window


@dataclass(frozen=True, slots=True)
class TritonMetadata(AttentionMetadata):
    """The plan of a step."""

    # The sequences between the fresh prompts; without fresh prompts, one step of all.
    steps: tuple[PagedStep, ...]
    # Prompts that torch's kernels compute, in layers that they support.
    fresh: tuple[FreshPrompt, ...]
    all: tuple[PagedStep, ...]  # one step of all sequences, for other layers


class TritonAttention(AttentionBackend):
    """See kernels/triton/attention_decode.py and attention_prefill.py."""

    caps = BackendCaps(
        name="triton",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        options=OPTIONS - {"bidirectional", "distances"},
    )

    def __init__(self, ops: Ops, prompts: FreshPrompts | None = None) -> None:
        """
        Args:
            prompts: attention for fresh prompts, for floats in a cache that does not round them.
        """
        super().__init__(ops)
        self.prompts = prompts

    def plan(self, layout: StepLayout, window: Window | None) -> TritonMetadata:
        fresh = {} if self.prompts is None else self.prompts.take(layout, window)
        steps = tuple(_steps_between(fresh, layout, window))
        every = tuple(_steps_between({}, layout, window)) if fresh else steps
        return TritonMetadata(layout, window, steps, tuple(fresh.values()), every)

    def run(self, attend: Attend) -> Tensor:
        metadata, kv = attend.metadata, attend.kv
        assert isinstance(metadata, TritonMetadata)
        q, k, v, spec = attend.q, attend.k, attend.wide_v, attend.spec
        slots, for_sinks = metadata.layout.slot_mapping, attend.for_sinks(self._ops)
        # The kernel rotates q and k alike, after their norms, and rounds halves of a head, which
        # must be whole bytes.
        odd = q.shape[2] % (4 if kv.k.dtype == torch.uint8 else 2)
        late = spec.norms is not None and spec.norms.after
        if odd or late or attend.q_rotation is not None or k is None or v is None:
            q, _, _ = attend.stored(self._ops)
        else:
            scales = None
            if kv.k_scales is not None and kv.v_scales is not None:
                scales = kv.k_scales, kv.v_scales
            norms = spec.norms
            by = None if norms is None or norms.k is None else (norms.q, norms.k, norms.eps)
            q = rotate_and_store(q, k, v, attend.rotation, (kv.k, kv.v), scales, slots, by)
        if kv.queries is not None:
            self._keep_queries(q, kv.queries, metadata.layout, spec.scale)
        cache = PagedCache(kv.k, kv.v, kv.k_scales, kv.v_scales)
        out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
        scoring = Scoring(spec.scale, spec.softcap, spec.sinks, spec.slopes)
        steps, fresh = metadata.steps, metadata.fresh
        if v is None or self.prompts is None or not self.prompts.can_do(spec, q.shape[2]):
            steps, fresh = metadata.all, ()
        for step in steps:
            paged_attention(q, cache, step, scoring, out, for_sinks)
        for prompt in fresh:
            assert self.prompts is not None and v is not None
            out[prompt.start : prompt.end] = self.prompts.attend(q, kv.k, v, prompt, spec.scale)
        return attend.narrowed(out)

    def _keep_queries(self, q: Tensor, ring: Tensor, layout: StepLayout, scale: float) -> None:
        assert layout.state_rows is not None
        where = layout.query_start_loc, layout.seq_lens, layout.state_rows
        keep_queries(q, ring, *where, scale, max(layout.num_scheduled))

    def run_latent(self, attend: AttendLatent) -> Tensor:
        metadata, kv = attend.metadata, attend.kv
        assert isinstance(metadata, TritonMetadata)
        if attend.choice is not None:
            return self.run_chosen(attend, attend.choice)
        q_rope, k_rope = attend.turned(self._ops)
        self.store_latents(attend.latent, k_rope, kv, metadata.layout.slot_mapping)
        if not metadata.fresh or attend.spec.options:
            q = attend.up.into_queries(self._ops, attend.q)
            return attend.up.to_values(self._ops, self.means(attend, q, q_rope))
        tokens, heads, _ = attend.q.shape
        out = q_rope.new_empty(tokens, heads, attend.up.value)
        if rest := _rows_between(metadata.fresh, tokens):
            q = q_rope.new_empty(tokens, heads, attend.up.rank)
            for rows in rest:
                q[rows] = attend.up.into_queries(self._ops, attend.q[rows])
            means = self.means(attend, q, q_rope)
            for rows in rest:
                out[rows] = attend.up.to_values(self._ops, means[rows])
        for prompt in metadata.fresh:
            assert self.prompts is not None
            attended = self.prompts.attend_latent(attend, q_rope, k_rope, prompt)
            out[prompt.start : prompt.end] = attended
        return out

    def means(self, attend: AttendLatent, q: Tensor, q_rope: Tensor) -> Tensor:
        """Return the means, which are undefined for fresh prompts of a layer without options."""
        assert isinstance(attend.metadata, TritonMetadata)
        means = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        spec, metadata = attend.spec, attend.metadata
        for step in metadata.all if spec.options else metadata.steps:
            latent_attention(q, q_rope, attend.kv.k, step, spec.scale, spec.sinks, means)
        return means

    def choose(self, of: Indexed, kv: LayerKV, layout: StepLayout) -> Choice:
        """See `base.AttentionBackend.choose`. Unless KV heads choose keys of their own, the choice
        is what `indexer.choose` returns."""
        if of.spec.span:
            return super().choose(of, kv, layout)
        assert kv.index is not None and of.weights is not None
        rows, at = kv.index.view(-1, of.spec.stored), places_of(layout)
        store_keys(self._ops, of, kv.index, layout)
        if of.bias is not None:
            at = replace(at, every=of.spec.pool)
            keys = rows[:, : of.spec.dim]
            make_entries(rows, layout.block_table, keys, at, len(of.q), of.bias)
        return [*_choice(of.queries.to(rows.dtype), of.weights, rows, at, of.spec)]

    def run_chosen(self, attend: AttendLatent, choice: Choice) -> Tensor:
        layout, cache, spec = attend.metadata.layout, attend.kv.k, attend.spec
        q_rope, k_rope = attend.turned(self._ops)
        self.store_latents(attend.latent, k_rope, attend.kv, layout.slot_mapping)
        places, counts = choice
        assert isinstance(places, Tensor) and isinstance(counts, Tensor)
        rows = ListedRows(cache.view(-1, cache.shape[3]), places_of(layout), places, counts)
        q, queries = attend.up.into_queries(self._ops, attend.q), layout.num_scheduled
        means = attend_rows(q, q_rope, rows, None, spec.scale, spec.sinks, queries)
        return attend.up.to_values(self._ops, means)

    def over_entries(self, attend: AttendCompressed) -> Tensor:
        of, layout, rotation = attend.spec, attend.layouts[0], attend.rotation
        k, cache, near = attend.k, attend.caches[0], places_of(layout)
        turn_last(k[:, None], rotation)
        stored = k if attend.inputs is None else torch.cat((k, attend.inputs), 1)
        self._ops.store_kv(stored, stored[:, :0], cache, cache[..., :0], layout.slot_mapping)
        tokens, start = attend.tokens, k.shape[1]
        at = [places_of(each, of.every) for each in attend.layouts[1:]]
        for maker, made, places in zip(attend.makers, attend.entries, at, strict=True):
            norm, rotations = (maker.weight, maker.eps), (maker.high, maker.low, maker.last)
            cached = tokens[:, start:], near.block_table, made, places, len(k)
            make_entries(*cached, maker.bias, norm, rotations)
            start += 2 * maker.bias.shape[1]
        last, rows = LastKeys(tokens, near, attend.window), None
        if attend.entries:
            choice: tuple[Tensor, ...] = ()
            if attend.indexed is not None and of.index is not None:
                queries, weights = attend.indexed
                queries = turn_last(queries.unflatten(1, (of.index.heads, -1)), rotation)
                choice = _choice(queries, weights, attend.entries[1], at[1], of.index)
            rows = ListedRows(attend.entries[0], at[0], *choice)
        q, seen = turn_last(attend.q, rotation), (rows, last, attend.scale, attend.sinks)
        return turn_last(attend_rows(q, None, *seen, layout.num_scheduled), rotation, back=True)


def places_of(layout: StepLayout, every: int = 1) -> Places:
    """Return where keys are, or entries of `every` tokens, if that is not 1."""
    lengths = layout.query_start_loc, layout.seq_lens, layout.block_table
    entry_tokens = 1 if every == 1 else ENTRY_TOKENS
    return Places(*lengths, layout.first_keys, layout.tree, layout.block_size, every, entry_tokens)


def _choice(
    q: Tensor, weights: Tensor, keys: Tensor, at: Places, spec: IndexSpec
) -> tuple[Tensor, ...]:
    """Return what `indexer.choose` returns; nothing if all tokens read all that they see."""
    top = spec.top // (spec.pool or 1)
    if at.longest <= top:
        return ()
    return choose(q, weights, keys, at, top, SCORES // at.longest, pools=spec.pool > 0)


def _steps_between(
    fresh: Mapping[int, FreshPrompt], layout: StepLayout, window: Window | None
) -> Iterator[PagedStep]:
    """Yield steps of the sequences that are not fresh; each step covers a contiguous run of
    sequences."""
    first = start = 0
    for last in (*sorted(fresh), len(layout.num_scheduled)):
        if last > first:
            of = slice(first, last)
            yield PagedStep(
                layout.query_start_loc,
                layout.seq_lens,
                layout.block_table,
                layout.first_keys,
                layout.tree,
                layout.block_size,
                window,
                runs_of(layout.num_scheduled[of], layout.contexts[of], first, start),
            )
        first = last + 1
        start = fresh[last].end if last in fresh else start


def _rows_between(fresh: tuple[FreshPrompt, ...], tokens: int) -> list[slice]:
    """Return the ranges of a step's tokens that belong to no fresh prompt."""
    starts = [0, *(prompt.end for prompt in fresh)]
    ends = [*(prompt.start for prompt in fresh), tokens]
    return [slice(a, b) for a, b in zip(starts, ends, strict=True) if a < b]

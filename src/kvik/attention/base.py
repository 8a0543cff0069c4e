"""The interface of attention backends: a backend plans a step once, then runs each layer.

The tokens of a step are flat, sequence after sequence: q is [tokens, heads, head_dim], without a
batch dimension and padding. K and V of all requests are in blocks of one cache per layer, and the
block table of a sequence lists its blocks (`StepLayout`; Kwon et al. 2023, PagedAttention, arXiv
2309.06180, section 4.1). A backend writes the K and V of this step's tokens into the cache, then
attends over each sequence's keys there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.attention.budget import weights_of
from kvik.attention.compressed import AttendCompressed, attend_compressed, store_compressed
from kvik.attention.indexed import Choice, Indexed, choose_keys, index_keys
from kvik.attention.layout import StepLayout
from kvik.errors import ConfigError
from kvik.frozen import frozen
from kvik.kernels.kv_rounding import movable, round_vectors, unround_vectors
from kvik.kernels.ops import Ops
from kvik.kernels.weights import Matrix
from kvik.spec.kv import COPIED
from kvik.spec.visible_keys import Window


@dataclass(frozen=True, slots=True)
class LayerKV:
    """K and V of one layer. A backend may order the elements within a block in its own way."""

    # k, v: [num_blocks, block_size, kv_heads, head_dim], in four bits [..., head_dim / 2]. For
    # latent vectors v has no columns: a value is the first channels of its key.
    k: Tensor
    v: Tensor
    # k_scales, v_scales: [num_blocks, block_size, kv_heads], if k and v are rounded
    # (kernels/kv_rounding.py); None: they are floats, of any dtype.
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    # [slots, last, heads, head_dim] fp32, the last queries of each request, scaled; the query of
    # position p is in row p % last. None: the layer keeps all tokens.
    queries: Tensor | None = None
    # [num_blocks, block_size, 1, dim], the key of an indexer of each token; None: the layer has
    # none.
    index: Tensor | None = None

    @property
    def latent(self) -> bool:
        """Whether K and V share one latent vector."""
        return not self.v.shape[3]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in dtypes that can be copied: each [num_blocks, block_size, ...]."""
        values = (None, None) if self.latent else (self.v, self.v_scales)
        every = (self.k, values[0], self.k_scales, values[1], self.index)
        return tuple(movable(tensor) for tensor in every if tensor is not None)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each head of q and of k (Qwen3; `Ops.rms_norm`)."""

    # q, k: [head_dim], weights; k is None if another layer stores the keys.
    q: Tensor
    k: Tensor | None
    eps: float
    # They follow the rotation, else they precede it. Not with sinks of a window.
    after: bool = False

    def normalised(self, ops: Ops, q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if k is not None and self.k is not None:
            k = ops.rms_norm(k, self.k, self.eps)
        return ops.rms_norm(q, self.q, self.eps), k


# Fields of an `AttentionSpec` that not every backend supports, with their names in errors.
NAMED_OPTIONS = {
    "softcap": "softcap",
    "sinks": "sinks",
    "slopes": "ALiBi",
    "distances": "biases of distances",
    "bidirectional": "bidirectional attention",
}
OPTIONS = frozenset(NAMED_OPTIONS)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention computes in one layer, fixed when the model is built."""

    scale: float  # of the scores
    # Of the heads of q and k; None: none. The backend applies them, so that a kernel can do it
    # while it writes k into the cache.
    norms: HeadNorms | None = None
    # A scaled score s becomes softcap * tanh(s / softcap); None: it is unchanged.
    softcap: float | None = None
    # [heads] fp32, an extra score of each head, with no value, in addition to those of the keys it
    # sees; None: none.
    sinks: Tensor | None = None
    # The consumer of the result can use the heads of one process only (`Between`).
    local_heads: bool = False
    # How far from its own position, on either side, a query sees the keys of its sequence, which
    # are all in the step; None: it sees no later keys (causal).
    bidirectional: int | None = None
    value_dim: int | None = None  # channels of a head's value; None: as many as of its key
    # [heads] fp32: a capped score of the key at position j and the query at position p gets
    # slope * (j - p) added (ALiBi, Press et al. 2021, arXiv 2108.12409, section 3). For sinks of a
    # window, p counts the keys that the query sees. None: nothing is added. Not bidirectional.
    slopes: Tensor | None = None
    # [heads, 1 + 2 n] fp32: in an encoder, a capped score of the key at position j and the query at
    # position p gets number n + j - p added, greater distances counting as n (T5, Raffel et al.
    # 2020, section 2.1). None: nothing is added.
    distances: Tensor | None = None

    def of_heads(self, heads: slice) -> AttentionSpec:
        """Return what some of the heads compute."""
        sinks, slopes, distances = (
            None if of_all is None else of_all[heads]
            for of_all in (self.sinks, self.slopes, self.distances)
        )
        return replace(self, sinks=sinks, slopes=slopes, distances=distances)

    @property
    def options(self) -> frozenset[str]:
        """The options of the layer that not every kernel supports: a subset of `OPTIONS`."""
        return frozenset(name for name in OPTIONS if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Arrays of one step for one KV group. A backend may subclass it with its own plan."""

    layout: StepLayout
    window: Window | None


@frozen
class Attend:
    """The inputs of attention in one layer and step."""

    # [tokens, heads, head_dim]; k: [tokens, kv_heads, head_dim], v: [tokens, kv_heads, value_dim],
    # or None: another layer has already stored K and V of this step in the same cache. A backend
    # that rotates q and k may overwrite them.
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    # kv, metadata: the layer's cache, and the plan of its KV group.
    kv: LayerKV
    metadata: AttentionMetadata
    spec: AttentionSpec  # what the layer computes
    # [tokens, head_dim] fp32 for `Ops.rotary`; None: no rotation. The backend rotates, so that a
    # kernel can do it while it writes k into the cache.
    rotation: Tensor | None = None
    # The same for q, if it is rotated differently from k; None: as k.
    q_rotation: Tensor | None = None
    # The same for queries on sinks of the window. Keys are stored rotated by their positions, so q
    # is rotated a second time, for the position after all keys that it sees. None: as for other
    # keys.
    sink_rotation: Tensor | None = None
    # As `AttentionBackend.choose` returns it; None: each token reads all that it sees.
    choice: Choice | None = None

    def for_sinks(self, ops: Ops) -> Tensor | None:
        """Return q normalised and rotated for sinks of the window; None: the same as for other
        keys. Call this before `turned`, which may overwrite q."""
        if self.sink_rotation is None:
            return None
        q, norms = self.q, self.spec.norms
        if norms is not None:
            q, _ = norms.normalised(ops, q, None)
        else:
            q = ops.scaled(q.flatten(1), 1.0).view(q.shape)
        return ops.rotary(q, q[:, :0], self.sink_rotation)[0]

    def turned(self, ops: Ops) -> tuple[Tensor, Tensor | None]:
        """Return q and k normalised and rotated, for backends whose kernels do not do this."""
        q, k, norms = self.q, self.k, self.spec.norms
        if norms is not None and not norms.after:
            q, k = norms.normalised(ops, q, k)
        if self.rotation is not None:
            q, k = self._rotated(ops, q, k, self.rotation)
        if norms is not None and norms.after:
            q, k = norms.normalised(ops, q, k)
        return q, k

    def _rotated(
        self, ops: Ops, q: Tensor, k: Tensor | None, rotation: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if self.q_rotation is None and k is not None:
            return ops.rotary(q, k, rotation)
        q, _ = ops.rotary(q, q[:, :0], rotation if self.q_rotation is None else self.q_rotation)
        if k is not None:
            _, k = ops.rotary(k[:, :0], k, rotation)
        return q, k

    @property
    def wide_v(self) -> Tensor | None:
        """v as the cache stores it: zeros follow values that are narrower than keys."""
        if self.v is None or self.spec.value_dim is None:
            return self.v
        return F.pad(self.v, (0, self.q.shape[2] - self.spec.value_dim))

    def narrowed(self, out: Tensor) -> Tensor:
        """Return the channels of values of a result [tokens, heads, head_dim]."""
        return out[..., : self.spec.value_dim]

    def stored(self, ops: Ops) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Write k and v, if any, with torch's operations. Returns q as from `turned`, and k and v
        as from `store`."""
        (q, k), v = self.turned(ops), self.wide_v
        if k is None or v is None:
            return q, None, None
        return q, *store(ops, k, v, self.kv, self.metadata.layout.slot_mapping)


@dataclass(frozen=True, slots=True)
class LatentUp:
    """Projections from latent vectors to keys and values of all heads (DeepSeek-V2, section 2.1.2).
    Backends either multiply queries and results by them, and so attend over the latent vectors
    themselves ("absorbed"), or compute the keys and values."""

    # For `Ops.linear_each`, maps a head's query [nope] to [rank]. Transposed, it maps a latent
    # vector to the head's key.
    keys: Matrix
    values: Matrix  # for `Ops.linear_each`, maps a latent vector [rank] to the head's [value]
    rank: int
    value: int

    def into_queries(self, ops: Ops, q: Tensor) -> Tensor:
        """Map q [tokens, heads, nope] to queries on latent vectors, [tokens, heads, rank]."""
        return ops.linear_each(q, self.keys, self.rank)

    def to_values(self, ops: Ops, means: Tensor) -> Tensor:
        """Map means of latent vectors [tokens, heads, rank] to means of values, [tokens, heads,
        value]."""
        return ops.linear_each(means, self.values, self.value)


@frozen
class AttendLatent:
    """The inputs of attention over latent vectors in one layer and step (`LatentSpec`)."""

    q: Tensor  # [tokens, heads, nope], the part of queries for keys made from latent vectors
    q_rope: Tensor  # [tokens, heads, rope], the part of queries for keys with positions
    # latent, k_rope: [tokens, rank] and [tokens, 1, rope], which the cache stores. A backend that
    # rotates q_rope and k_rope may overwrite them.
    latent: Tensor
    k_rope: Tensor
    up: LatentUp  # projections to keys and values
    # kv, metadata, spec: see `Attend`; no norms.
    kv: LayerKV
    metadata: AttentionMetadata
    spec: AttentionSpec
    rotation: Tensor | None  # [tokens, rope] fp32, only for q_rope and k_rope; None: no rotation
    # As `AttentionBackend.choose` returns it; None: each token reads all that it sees.
    choice: Choice | None = None

    def turned(self, ops: Ops) -> tuple[Tensor, Tensor]:
        """Return q_rope and k_rope rotated."""
        if self.rotation is None:
            return self.q_rope, self.k_rope
        return ops.rotary(self.q_rope, self.k_rope, self.rotation)

    def joined(self, ops: Ops) -> Attend:
        """Return the equivalent attention with one kv head whose values are its keys; the first
        `rank` channels of its result are means of latent vectors."""
        q_rope, k_rope = self.turned(ops)
        k = torch.cat((self.latent[:, None], k_rope), 2)
        q = torch.cat((self.up.into_queries(ops, self.q), q_rope), 2)
        return Attend(q, k, k[..., :0], self.kv, self.metadata, self.spec)


@dataclass(frozen=True, slots=True)
class BackendCaps:
    """The abilities of a backend as data, so that choosing one needs no trial run."""

    name: str
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    options: frozenset[str] = OPTIONS  # the options of `AttentionSpec` that it supports

    def check(self, spec: AttentionSpec) -> None:
        """Raise `ConfigError` if the backend lacks an option that a layer needs."""
        missing = sorted(NAMED_OPTIONS[name] for name in spec.options - self.options)
        if missing:
            reason = f"{self.name!r} has no {' and no '.join(missing)}, which the model needs"
            raise ConfigError("attention_backend", reason)


class AttentionBackend:
    """A family of attention kernels over the paged cache. By default a plan is only the layout, and
    the cache is read and written with torch's operations."""

    caps: BackendCaps

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def plan(self, layout: StepLayout, window: Window | None) -> AttentionMetadata:
        """Return the part of a step that is the same for all layers of a KV group.

        Args:
            window: which keys a query sees; None: all.
        """
        return AttentionMetadata(layout, window)

    def run(self, attend: Attend) -> Tensor:
        """Normalise and rotate q and k, write this step's k and v into the cache, then attend.

        Returns:
            [tokens, heads, value_dim].
        """
        raise NotImplementedError

    def run_latent(self, attend: AttendLatent) -> Tensor:
        """Rotate, write this step's latent vectors into the cache, then attend.

        Returns:
            [tokens, heads, value].
        """
        if attend.choice is not None:
            return self.run_chosen(attend, attend.choice)
        means = self.run(attend.joined(self._ops))[..., : attend.up.rank]
        return attend.up.to_values(self._ops, means)

    def run_compressed(self, attend: AttendCompressed) -> Tensor:
        """Attend over a window and over entries, and multiply the results of each group of heads.

        Returns:
            [tokens, groups, group_rank].
        """
        return attend.grouped(self._ops, self.over_entries(attend))

    def over_entries(self, attend: AttendCompressed) -> Tensor:
        """Write what this step adds to the caches of a layer, then attend over its window and its
        entries.

        Returns:
            [tokens, heads, head_dim].
        """
        store_compressed(self._ops, attend)
        return attend_compressed(attend)

    def choose(self, of: Indexed, kv: LayerKV, layout: StepLayout) -> Choice:
        """Write the keys of a layer's indexer into the cache, and return which keys each token
        reads, for `choice` of the same backend; see `choose_keys`. Nothing: each token reads all
        that it sees."""
        assert kv.index is not None
        index_keys(self._ops, of, kv.index, layout)
        return choose_keys(of, kv.index, layout)

    def choice_of(self, choice: Choice, kv_heads: slice) -> Choice:
        """Return what some KV heads have chosen."""
        return [of_token[kv_heads] for of_token in choice]

    def run_by_head(self, attend: Attend, choice: Choice) -> Tensor:
        """Do the same as `run` over the keys that each KV head has chosen. They are copied to a
        cache of their own, in which each head of each token has a sequence, so that kernels need
        not know of the choice."""
        (q, _, _), kv, spec = attend.stored(self._ops), attend.kv, attend.spec
        assert spec.sinks is None and spec.slopes is None
        spec, kv_heads = replace(spec, norms=None, local_heads=False), kv.k.shape[2]
        slots, out = _slots_of_tokens(attend.metadata.layout), torch.empty_like(q)
        for first in range(0, len(choice), COPIED):
            part = slice(first, first + COPIED)
            at = [
                all_of[places]
                for all_of, of_heads in zip(slots[part], choice[part], strict=True)
                for places in of_heads
            ]
            copy, layout = _copy_of(kv, at, kv_heads)
            queries = q[part].unflatten(1, (kv_heads, -1)).flatten(0, 1)
            of_copies = Attend(queries, None, None, copy, self.plan(layout, None), spec)
            out[part] = self.run(of_copies).view_as(q[part])
        return attend.narrowed(out)

    def run_chosen(self, attend: AttendLatent, choice: Choice) -> Tensor:
        """Do the same as `run_latent` over the chosen keys: they are copied to a cache of their
        own, in which each token has a sequence, so that kernels need not know of the choice."""
        layout = attend.metadata.layout
        q_rope, k_rope = attend.turned(self._ops)
        self.store_latents(attend.latent, k_rope, attend.kv, layout.slot_mapping)
        q = attend.up.into_queries(self._ops, attend.q)  # [tokens, heads, rank]
        means = torch.empty_like(q)
        slots = _slots_of_tokens(layout)
        for first in range(0, len(choice), COPIED):
            part = slice(first, first + COPIED)
            chosen = zip(slots[part], choice[part], strict=True)
            kv, copied = _copy_of(attend.kv, [all_of[places[0]] for all_of, places in chosen])
            of_copies = replace(attend, kv=kv, metadata=self.plan(copied, None))
            means[part] = self.means(of_copies, q[part], q_rope[part])
        return attend.up.to_values(self._ops, means)

    def store_latents(
        self, latent: Tensor, k_rope: Tensor, kv: LayerKV, slot_mapping: Tensor
    ) -> None:
        """Write latent [tokens, rank] and k_rope [tokens, 1, rope] into the cache."""
        k = torch.cat((latent[:, None], k_rope), 2)
        store(self._ops, k, k[..., :0], kv, slot_mapping)

    def means(self, attend: AttendLatent, q: Tensor, q_rope: Tensor) -> Tensor:
        """Attend over the latent vectors in the cache.

        Args:
            q: [tokens, heads, rank]. q_rope: [tokens, heads, rope], rotated.

        Returns:
            Means of latent vectors, [tokens, heads, rank].
        """
        joined, rest = torch.cat((q, q_rope), 2), (attend.kv, attend.metadata, attend.spec)
        return self.run(Attend(joined, None, None, *rest))[..., : q.shape[2]]

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        """Copy the cached keys and values of some tokens to other positions.

        Args:
            source, target: [n] int64, KV positions. Targets are distinct, and target[i] is not
                source[j] for any j > i.
        """
        for tensor in kv.tensors:
            move_tokens(tensor, source, target)

    def keys(self, kv: LayerKV, at: Tensor) -> Tensor:
        """Return the cached keys of some tokens, [n, kv_heads, head_dim] fp32.

        Args:
            at: [n] int64, KV positions.
        """
        return read(kv.k, kv.k_scales, at).float()

    def rank_heads(self, heads: int, kv_heads: int) -> int:
        """Return how many query heads of a layer this process computes."""
        return heads

    def key_weights(self, kv: LayerKV, at: Tensor, queries: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the attention of the last queries of a request to each of its keys, summed over
        queries: [heads, keys] fp32.

        Args:
            at: [keys] int64, KV positions.
            queries: [queries, heads, head_dim] fp32, of `LayerKV.queries`.
            spec: of the layer.
        """
        return weights_of(queries, self.keys(kv, at), spec.softcap, spec.sinks)


# Writing and reading the cache in any of its formats, with torch's operations.


def _slots_of_tokens(layout: StepLayout) -> list[Tensor]:
    """Return, for each token of a step, the KV positions of its sequence."""
    slots: list[Tensor] = []
    for seq, length in enumerate(layout.num_scheduled):
        slots += [layout.slots(seq)] * length
    return slots


def _copy_of(kv: LayerKV, at: Sequence[Tensor], heads: int = 1) -> tuple[LayerKV, StepLayout]:
    """Copy keys and values, with the same bits, to a cache that has one KV head.

    Args:
        at: KV positions of the keys of each sequence of the copy; those of head h are in every
            `heads`-th sequence, from h on.
    """
    counts, size, device = [len(slots) for slots in at], kv.k.shape[1], kv.k.device
    blocks = -(-max(counts) // size)  # of a sequence
    each = partial(torch.tensor, dtype=torch.int32, device=device)
    layout = StepLayout(
        query_start_loc=each(range(len(at) + 1)),
        seq_lens=each(counts),
        block_table=each(range(len(at) * blocks)).view(len(at), blocks),
        slot_mapping=torch.cat(
            [torch.arange(n, device=device) + i * blocks * size for i, n in enumerate(counts)]
        ),
        num_scheduled=(1,) * len(at),
        contexts=tuple(counts),
        block_size=size,
    )
    numbers = torch.arange(len(at), device=device) % heads
    from_heads = numbers.repeat_interleave(torch.tensor(counts, device=device))
    slots = torch.cat(list(at))

    def copied(stored: Tensor) -> Tensor:
        rows = movable(stored).flatten(0, 1)[slots, from_heads]
        copy = rows.new_zeros(len(at) * blocks * size, *rows.shape[1:])
        copy[layout.slot_mapping] = rows
        return copy.view(stored.dtype).unflatten(0, (-1, size))[:, :, None]

    k, k_scales = copied(kv.k), None if kv.k_scales is None else copied(kv.k_scales)
    if kv.latent:
        none = None if k_scales is None else k_scales[..., :0]
        return LayerKV(k, k[..., :0], k_scales, none), layout
    v_scales = None if kv.v_scales is None else copied(kv.v_scales)
    return LayerKV(k, copied(kv.v), k_scales, v_scales), layout


def move_tokens(stored: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy what a tensor of a `LayerKV` holds of some tokens; see `AttentionBackend.move`."""
    tokens = stored.flatten(0, 1)
    tokens.index_copy_(0, target, tokens.index_select(0, source))


def store(
    ops: Ops, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write each token's K and V at its position.

    Args:
        k, v: [tokens, kv_heads, head_dim]; for latent vectors v has no columns.
        slot_mapping: [tokens].

    Returns:
        k and v as `read_both` will return them, [tokens, kv_heads, head_dim].
    """
    if kv.k_scales is None or kv.v_scales is None:
        stored = k.to(kv.k.dtype), v.to(kv.v.dtype)
        ops.store_kv(*stored, kv.k, kv.v, slot_mapping)
        return stored[0].to(k.dtype), stored[0 if kv.latent else 1].to(v.dtype)
    keys, key_scales = round_vectors(k, kv.k.dtype)
    values, value_scales = keys[..., :0], key_scales[..., :0]
    if not kv.latent:
        values, value_scales = round_vectors(v, kv.v.dtype)
    ops.store_kv(movable(keys), movable(values), movable(kv.k), movable(kv.v), slot_mapping)
    ops.store_kv(key_scales, value_scales, kv.k_scales, kv.v_scales, slot_mapping)
    stored_k = unround_vectors(keys, key_scales).to(k.dtype)
    if kv.latent:
        return stored_k, stored_k
    return stored_k, unround_vectors(values, value_scales).to(v.dtype)


def read(stored: Tensor, scales: Tensor | None, at: Tensor) -> Tensor:
    """Read the keys, or values, of some positions.

    Args:
        stored, scales: of a `LayerKV`.
        at: [n] int64, KV positions.

    Returns:
        [n, kv_heads, head_dim]: fp32, or the stored dtype if they are floats.
    """
    numbers = stored.flatten(0, 1).index_select(0, at)
    if scales is None:
        return numbers
    return unround_vectors(numbers, scales.flatten(0, 1).index_select(0, at))


def read_both(kv: LayerKV, at: Tensor) -> tuple[Tensor, Tensor]:
    """Read keys and values, each as in `read`; for latent vectors they are the same."""
    k = read(kv.k, kv.k_scales, at)
    return k, k if kv.latent else read(kv.v, kv.v_scales, at)


def keep_queries(q: Tensor, ring: Tensor, layout: StepLayout, scale: float) -> None:
    """Write the last queries of each sequence of a step to `LayerKV.queries`.

    Args:
        q: [tokens, heads, head_dim], rotated. scale: of scores.
    """
    assert layout.state_rows is not None
    start, last = 0, ring.shape[1]
    for row, length, context in zip(
        layout.state_rows.tolist(), layout.num_scheduled, layout.contexts, strict=True
    ):
        count = min(length, last)
        places = torch.arange(context - count, context, device=ring.device) % last
        ring[row, places] = q[start + length - count : start + length].float() * scale
        start += length

"""The shape of the KV cache, without torch: formats, layers, groups of layers; and states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from torch import Tensor

MAX_TAPS = 8  # largest width of a short convolution in the kernels
STATE_BYTES = 4  # per number: states are fp32, because every token adds to them


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state that one layer keeps per request, independent of the request's length.

    Attributes:
        channels, width: of a short convolution, which keeps the last width - 1 inputs.
        bias: the convolution and its projections have biases.
        key_heads, value_heads, key_dim, value_dim: of a gated delta net after it, which keeps a
            matrix [key_dim, value_dim] for each value head; all 0: none.
    """

    channels: int
    width: int
    bias: bool = False
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @staticmethod
    def delta(
        key_heads: int, value_heads: int, key_dim: int, value_dim: int, width: int
    ) -> StateSpec:
        """Return the state of a gated delta net, whose queries, keys and values are convolved."""
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        return StateSpec(channels, width, False, key_heads, value_heads, key_dim, value_dim)

    @property
    def values(self) -> int:
        """Width of the values of all heads of the delta net."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Numbers that the convolution keeps."""
        return (self.width - 1) * self.channels

    @property
    def size(self) -> int:
        """Numbers that a request keeps."""
        return self.convolved + self.key_dim * self.values

    @property
    def flops(self) -> int:
        """Operations per token: of the convolution, and of the delta rule, in which each number of
        the matrices decays, is multiplied by a key, updated, and multiplied by a query."""
        return 2 * self.width * self.channels + 7 * self.key_dim * self.values

    @property
    def step_width(self) -> int:
        """Upper bound of numbers per token that a step holds, without the residual stream."""
        if self.value_heads:
            return 2 * self.channels + 4 * self.values + 2 * self.value_heads
        return 6 * self.channels


AUTO = "auto"  # the model's dtype
PAGE_HEAD_BYTES = 64  # header of a page of a tier, before the bytes of its block (nn/pages.py)
SYNONYMS = {"fp8_e4m3": "fp8", "bfloat16": "bf16"}  # names in other engines


@dataclass(frozen=True, slots=True)
class KVFacts:
    """A format of the KV cache.

    Attributes:
        name: as in `EngineConfig.kv_cache_dtype`.
        bits: of a number.
        scale_bytes: bytes of a vector's scale and zero point, if any.
        meaning: how keys and values are stored, for help texts.
    """

    name: str
    bits: int
    scale_bytes: int
    meaning: str

    def vector_bytes(self, head_dim: int) -> int:
        """Return the bytes of K or V of one token and KV head, scale included."""
        return -(-head_dim * self.bits // 8) + self.scale_bytes


# In descending order of bits, then of accuracy.
KV_FORMATS: Mapping[str, KVFacts] = {
    facts.name: facts
    for facts in (
        KVFacts("fp32", 32, 0, "as 32-bit floats"),
        KVFacts("bf16", 16, 0, "as bfloat16"),
        KVFacts("fp16", 16, 0, "as float16"),
        KVFacts("int8", 8, 2, "in 8 bits, a scale for each token and head"),
        KVFacts("fp8", 8, 2, "in 8 bits (E4M3), a scale for each token and head"),
        KVFacts("int4", 4, 2, "in 4 bits, a scale and a zero point for each token and head"),
    )
}


@dataclass(frozen=True, slots=True)
class Window:
    """Which keys the queries of a layer see, if not all.

    Attributes:
        keys: the largest number that a query sees, including its own.
        chunked: a query sees keys from the last multiple of `keys` (Llama 4); else the last `keys`
            ones.
        sinks: number of first keys of the sequence that a query also sees, at positions just before
            the window ("attention sinks"; StreamingLLM, Xiao et al. 2023, section 3.2). Not with
            `chunked`.
    """

    keys: int
    chunked: bool = False
    sinks: int = 0

    @property
    def most(self) -> int:
        """The largest number of keys that a query sees."""
        return self.keys + self.sinks

    @overload
    def first(self, position: int) -> int: ...
    @overload
    def first(self, position: Tensor) -> Tensor: ...
    def first(self, position: int | Tensor) -> int | Tensor:
        """Return the first key that the query at `position` sees, except sinks; below 0: it sees
        all."""
        return position - (position % self.keys if self.chunked else self.keys - 1)

    def pairs(self, end: int) -> int:
        """Return the total number of keys that the queries at positions 0 .. end - 1 see."""
        if self.chunked:
            chunks, rest = divmod(end, self.keys)
            return chunks * _triangle(self.keys) + _triangle(rest)
        return _triangle(min(end, self.most)) + max(0, end - self.most) * self.most


@dataclass(frozen=True, slots=True)
class Budget:
    """How many tokens of a request a layer keeps, if not all.

    A prompt is computed whole. At the end of a prompt that exceeds the budget, and again after each
    `every` further tokens, the layer keeps `tokens` of its tokens: the first, the last, and of the
    others the ones that the last queries attend to most (SnapKV, Li et al. 2024, arXiv 2404.14469,
    section 4). They move to the places directly before the next token, and no query sees anything
    before them. The positions of these cuts depend only on the length of the prompt.

    Attributes:
        tokens: number of kept tokens.
        first, last: numbers of tokens that are always kept; the `last` queries choose the others.
        every: number of further tokens before the next cut.
    """

    tokens: int
    first: int = 4
    last: int = 32
    every: int = 256

    @property
    def least(self) -> int:
        """The smallest allowed `tokens`."""
        return self.first + self.last

    def first_cut(self, prompt: int) -> int:
        """Return the number of tokens after which the first cut happens.

        Args:
            prompt: length of the prompt.
        """
        return prompt if prompt > self.tokens else self.tokens + self.every

    def next_cut(self, position: int, prompt: int) -> int:
        """Return the number of tokens, at least `position`, after which the next cut happens."""
        first = self.first_cut(prompt)
        return first + max(0, -(-(position - first) // self.every)) * self.every

    def first_key(self, position: int, prompt: int) -> int:
        """Return the position of the first key that the query at `position` sees."""
        first = self.first_cut(prompt)
        if position < first:
            return 0
        return position - (position - first) % self.every - self.tokens

    def cut_blocks(self, end: int, block_size: int) -> range:
        """Return the blocks to which the kept tokens move in the cut after `end` tokens."""
        return range((end - self.tokens) // block_size, -(-end // block_size))

    def most_blocks(self, block_size: int) -> int:
        """Return the largest number of `cut_blocks`."""
        return -(-(self.tokens - 1) // block_size) + 1

    def pairs(self, end: int, prompt: int) -> int:
        """Return the total number of keys that the queries at positions 0 .. end - 1 see."""
        first = self.first_cut(prompt)
        total = _triangle(min(end, first))
        whole, rest = divmod(max(0, end - first), self.every)
        total += whole * (_triangle(self.every) + self.tokens * self.every)
        return total + _triangle(rest) + self.tokens * rest


def first_visible(position: int, window: Window | None) -> int:
    """Return the first key that the query at `position` sees, except sinks.

    Args:
        window: None: it sees all.
    """
    return 0 if window is None else max(0, window.first(position))


def keys_read(first: int, end: int, window: Window | None) -> int:
    """Return the number of keys that at least one query at positions first .. end - 1 sees."""
    seen = first_visible(first, window)
    return end - seen + (0 if window is None else min(seen, window.sinks))


def visible_pairs(first: int, end: int, window: Window | None) -> int:
    """Return the total number of keys that the queries at positions first .. end - 1 see.

    Args:
        window: None: each sees all up to its own.
    """
    if window is None:
        return _triangle(end) - _triangle(first)
    return window.pairs(end) - window.pairs(first)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer stores per token, and how long it stays visible.

    Attributes:
        num_kv_heads, head_dim: shape of one token's K (and V).
        bytes_per_token: K and V of one layer, scales included.
        window: which keys a query sees; None: all.
        budget: how many tokens of a request it keeps; None: all.
        format: of the numbers, as in `KV_FORMATS`, or "auto".
        latent: a token has one vector, whose first channels are its value.
        readers: number of layers that read it, including its own.
    """

    num_kv_heads: int
    head_dim: int
    bytes_per_token: int
    window: Window | None = None
    format: str = AUTO
    latent: bool = False
    readers: int = 1
    budget: Budget | None = None

    @property
    def vectors(self) -> int:
        """Vectors stored per token: K and V of each head, or both in one."""
        return self.num_kv_heads * (1 if self.latent else 2)

    @property
    def numbers(self) -> int:
        """Numbers stored per token, without scales."""
        return self.vectors * self.head_dim

    @property
    def scale_bytes(self) -> int:
        """The part of `bytes_per_token` that is scales."""
        return self.vectors * KV_FORMATS[self.format].scale_bytes if self.format != AUTO else 0

    @property
    def windowed(self) -> bool:
        """Whether blocks become invisible as a request grows."""
        return self.window is not None

    def hidden_blocks(self, position: int, block_size: int, prompt: int | None = None) -> range:
        """Return the blocks before `position` that hold no key visible to its query. No later query
        sees them either; the start of the range never changes.

        Args:
            prompt: length of the prompt, which decides the cuts of a budget; None: before any cut.
        """
        if self.budget is not None and prompt is not None:
            return range(self.budget.first_key(position, prompt) // block_size)
        sinks = 0 if self.window is None else -(-self.window.sinks // block_size)
        return range(sinks, first_visible(position, self.window) // block_size)

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the largest number of blocks that a request of `num_tokens` holds, if a step adds
        at most `chunk` tokens."""
        blocks, window = -(-num_tokens // block_size), self.window
        if self.budget is not None and num_tokens > self.budget.tokens:
            # A prompt is computed whole, and kept tokens are copied before the rest is freed.
            return blocks + self.budget.most_blocks(block_size)
        if window is None:
            return blocks
        if not window.chunked:
            # keys - 1 earlier keys and the step's own, with partial blocks at both ends
            seen = -(-(window.keys - 1 + chunk) // block_size) + 1
            return min(blocks, -(-window.sinks // block_size) + seen)
        # The worst case is a step that begins with the last query of a chunk. The alignment of
        # chunks and blocks repeats after a few chunks.
        most, apart = 0, block_size // gcd(window.keys, block_size)
        for first in range(0, num_tokens, window.keys)[:apart]:
            end = min(num_tokens, first + window.keys - 1 + chunk)
            most = max(most, -(-end // block_size) - first // block_size)
        return most

    def hit_length(self, cached: Callable[[int], bool], length: int, block_size: int) -> int:
        """Return the largest number of blocks, up to `length`, that a request can take from the
        prefix cache: every block that its next query sees must be cached.

        Args:
            cached: whether block i of the prefix is cached.
        """
        if self.window is None:
            return next((i for i in range(length) if not cached(i)), length)
        while length:
            hidden = self.hidden_blocks(length * block_size, block_size)
            sinks = range(min(hidden.start, length))
            seen = chain(reversed(range(max(len(sinks), hidden.stop), length)), reversed(sinks))
            missing = next((i for i in seen if not cached(i)), None)
            if missing is None:
                break
            length = missing  # every longer prefix up to here needs this block
        return length


def stored_as(
    specs: Sequence[KVCacheSpec | None], format: str, skipped: Collection[int] = ()
) -> list[KVCacheSpec | None]:
    """Return the layers with another format.

    Args:
        format: of `KV_FORMATS`; "auto" changes nothing.
        skipped: layers that keep their format.
    """
    if format == AUTO:
        return list(specs)

    def stored(spec: KVCacheSpec) -> KVCacheSpec:
        size = spec.vectors * KV_FORMATS[format].vector_bytes(spec.head_dim)
        return replace(spec, bytes_per_token=size, format=format)

    return [spec if spec is None or i in skipped else stored(spec) for i, spec in enumerate(specs)]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that see the same keys. Every group of a model allocates blocks from one shared pool:
    block b holds the K/V of `block_size` tokens for all layers of the one group that owns b.

    Attributes:
        specs: of each layer. They may differ in format, and so in bytes.
        shares: number of its layers that share the memory of a block for one of the model's largest
            layers. Its layers divide that memory into smaller blocks; those of block b begin at
            number `shares` * b.
    """

    specs: tuple[KVCacheSpec, ...]
    layers: tuple[int, ...]
    shares: int = 1

    @property
    def spec(self) -> KVCacheSpec:
        """What the layers have in common: everything but the format and its bytes."""
        return self.specs[0]

    @property
    def bytes_per_token(self) -> int:
        """Sum over the layers."""
        return sum(spec.bytes_per_token for spec in self.specs)

    @property
    def readers(self) -> int:
        """Number of layers that read what its layers store."""
        return sum(spec.readers for spec in self.specs)

    @property
    def read_bytes_per_token(self) -> int:
        """Bytes that all layers together read for one visible token."""
        return sum(spec.bytes_per_token * spec.readers for spec in self.specs)

    @property
    def budgeted(self) -> bool:
        """Whether its layers drop tokens."""
        return bool(self.specs) and self.spec.budget is not None

    def layers_in(self, format: str) -> tuple[int, ...]:
        pairs = zip(self.layers, self.specs, strict=True)
        return tuple(layer for layer, spec in pairs if spec.format == format)

    def places(self, format: str) -> int:
        """Return the memory of the layers in a format, in units of one of the model's largest."""
        return -(-len(self.layers_in(format)) // self.shares)


def group_layers(
    specs: Sequence[KVCacheSpec | None], *, apart: bool = False
) -> tuple[KVGroup, ...]:
    """Group layers that see the same keys. `specs[i]` belongs to layer i; None: it stores nothing.
    Groups are ordered by first layer.

    A block is as large as the largest group needs. So kinds with many layers are split into groups
    of about the size of the smallest kind (say, five window layers for each full layer), as long as
    that reduces padding. If a layer is a fraction of the largest one, several share its memory.

    Args:
        apart: a block belongs to all groups at once, so that no two layers share memory.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    stored = {layer: spec for layer, spec in enumerate(specs) if spec is not None}
    for layer, spec in stored.items():
        shape = spec.num_kv_heads, spec.head_dim, spec.latent
        alike[spec.window, spec.budget, *shape].append(layer)
    if not stored:
        return ()
    largest = max(spec.numbers for spec in stored.values())
    kinds: list[tuple[list[int], int]] = []  # layers, number that share the memory of the largest
    for layers in alike.values():
        share, rest = divmod(largest, stored[layers[0]].numbers)
        kinds.append((layers, share if rest == 0 and not apart else 1))

    def padded(places: int) -> int:
        """Return the places of all groups together, if a block has `places` places for layers."""
        return places * sum(-(-len(layers) // (places * share)) for layers, share in kinds)

    needed = [-(-len(layers) // share) for layers, share in kinds]
    most = max(needed)
    places = most if apart else min(range(min(needed), most + 1), key=padded)
    groups = []
    for layers, share in kinds:
        parts = -(-len(layers) // (places * share))
        for i in range(parts):
            part = layers[len(layers) * i // parts : len(layers) * (i + 1) // parts]
            specs_of = tuple(stored[layer] for layer in part)
            groups.append(KVGroup(specs_of, tuple(part), share))
    return tuple(sorted(groups, key=lambda g: g.layers[0]))


def formats_of(groups: Sequence[KVGroup]) -> tuple[str, ...]:
    """Return the distinct formats of the layers."""
    return tuple(dict.fromkeys(spec.format for group in groups for spec in group.specs))


def block_bytes(groups: Sequence[KVGroup], block_size: int) -> int:
    """Return the bytes of one block of the shared pool: for each format the largest need of a
    group, because only layers of the same format can share memory. Scales can share it only if
    layers also have equal numbers of heads."""
    need: dict[object, int] = defaultdict(int)
    for group in groups:
        for spec in set(group.specs):
            layers, scales = group.places(spec.format) * group.shares, spec.scale_bytes
            numbers = spec.format, spec.numbers * group.shares
            need[numbers] = max(need[numbers], layers * (spec.bytes_per_token - scales))
            alike = spec.format, spec.num_kv_heads, group.shares
            need[alike] = max(need[alike], layers * scales)
    return block_size * sum(need.values())

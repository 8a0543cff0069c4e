"""The shape of the KV cache, without torch: formats, layers, groups of layers; and states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvik.spec.visible_keys import ALL_KEYS, Budget, VisibleKeys, Window

MAX_TAPS = 8  # largest width of a short convolution in the kernels
STATE_BYTES = 4  # per number: states are fp32, because every token adds to them


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state that one layer keeps per request, independent of the request's length."""

    # channels, width: of a short convolution, which keeps the last width - 1 inputs; 0 and 1: there
    # is none.
    channels: int
    width: int
    bias: bool = False  # the convolution has biases
    # key_heads, value_heads, key_dim, value_dim: of a recurrence after it, which keeps a matrix
    # [key_dim, value_dim] for each value head; all 0: none.
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    # Numbers that each value head reads per token: 2 in a gated delta net, 1 + key_dim in one whose
    # states' rows each have their own decay, 1 in a state space, value_dim if it is `by_channel`.
    gates: int = 0
    # Below 0: the logarithm of a row's own decay is at least this; 0: any number.
    bound: float = 0.0
    # How fast each value head forgets, if it does so by a constant: e to the power of minus this is
    # the decay. (): it depends on the tokens.
    rates: tuple[float, ...] = ()
    # Each number of a matrix has its own decay, and each channel of a value its own gate (Mamba).
    # The convolution then has the values alone.
    by_channel: bool = False
    # rank, eps: then also, width of the vectors from which gates are computed; and eps of the norms
    # of these, of keys and of queries, None: they are not normalised.
    rank: int = 0
    eps: float | None = None
    # Most drafts in a step, whose inputs it keeps until they are accepted or rejected.
    drafts: int = 0

    @staticmethod
    def recurrent(
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        width: int,
        *,
        gates: int = 2,
        bound: float = 0.0,
        bias: bool = False,
    ) -> StateSpec:
        """Return the state of a layer whose queries, keys and values are convolved."""
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        heads = key_heads, value_heads, key_dim, value_dim
        return StateSpec(channels, width, bias, *heads, gates, bound)

    @staticmethod
    def by_channels(
        channels: int, size: int, width: int, rank: int, *, bias: bool, eps: float | None
    ) -> StateSpec:
        """Return the state of a Mamba layer: `size` numbers for each channel."""
        state = StateSpec(channels, width, bias, 1, 1, size, channels, gates=channels)
        return replace(state, by_channel=True, rank=rank, eps=eps)

    @property
    def delta(self) -> bool:
        """Whether the recurrence is the gated delta rule, not a state space."""
        return self.gates > 1 and not self.by_channel

    @property
    def decays(self) -> int:
        """Gates of decays of each value head."""
        return self.gates - self.delta

    @property
    def values(self) -> int:
        """Width of the values of all heads of the recurrence."""
        return self.value_heads * self.value_dim

    @property
    def inputs(self) -> int:
        """Width of the queries, keys and values of the recurrence."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def convolved(self) -> int:
        """Numbers that the convolution keeps."""
        return (self.width - 1 + self.drafts) * self.channels

    @property
    def matrices(self) -> int:
        """Numbers in the matrices of the recurrence."""
        return self.key_dim * self.values

    @property
    def logged(self) -> int:
        """Numbers that the recurrence keeps of drafts: its inputs and gates."""
        return self.drafts * (self.inputs + self.gates * self.value_heads)

    @property
    def size(self) -> int:
        """Numbers that a request keeps."""
        return self.convolved + self.matrices + self.logged

    @property
    def flops(self) -> dict[str, int]:
        """Operations per token by kind: of the convolution, and of the recurrence, in which each
        number of the matrices decays, is updated, and is multiplied by a query, and by the delta
        rule also by a key; or has its own decay."""
        flops = {"convolution": 2 * self.width * self.channels} if self.channels else {}
        if self.by_channel:
            flops["state space by channel"] = 7 * self.matrices
        elif self.delta:
            by_row = self.gates > 2
            flops["delta rule by row" if by_row else "delta rule"] = 7 * self.matrices
        elif self.value_heads:
            flops["state space"] = 5 * self.matrices
        return flops

    @property
    def step_width(self) -> int:
        """Upper bound of numbers per token that a step holds, without the residual stream."""
        if self.value_heads:
            return 2 * self.inputs + 4 * self.values + self.gates * self.value_heads
        return 6 * self.channels


SCORES = 1 << 24  # of keys by an indexer on a GPU that are in memory at a time
COPIED = 8  # tokens whose chosen keys are copied at a time


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """An indexer, which chooses the keys that a query reads (DeepSeek Sparse Attention, DeepSeek-AI
    2025, arXiv 2512.02556, section 2.1). Its score of a key is the sum over its heads of a weight
    of the query times relu(q k / sqrt(dim)) / sqrt(heads). Or each of its heads chooses blocks of
    keys for a KV head, by the largest q k of a block (MiniMax-M3).
    """

    # heads, dim: of its queries; all have the same key.
    heads: int
    dim: int
    top: int  # most keys that a query reads: those with the largest scores
    # Neighbouring channels are rotated together, else those of two halves.
    interleaved: bool = False
    # The layer has no indexer: it reads the keys that the last one before it chose (IndexShare,
    # arXiv 2603.12201).
    shared: bool = False
    # span, local: keys of a block, which begins at a multiple of them, 0: keys are chosen one by
    # one; and the number of the last blocks, which a query always reads.
    span: int = 0
    local: int = 0
    # Keys are scored in pools of as many, by a mean of their keys, weighed for each channel by the
    # softmax of gates; whole pools are chosen, and the keys after the last whole pool are always
    # read (GLM-5.3). 0: keys are scored one by one.
    pool: int = 0

    @property
    def stored(self) -> int:
        """Numbers that a token stores: its key, and its gates."""
        return self.dim * (2 if self.pool else 1)

    @property
    def most(self) -> int:
        """The most keys that a query reads."""
        return self.top + max(0, self.pool - 1)


ENTRY_TOKENS = 4  # tokens whose places in the cache an entry takes


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Attention with one vector per token, which is key and value of all heads, over a window, and
    over entries that sum up several tokens each (DeepSeek-V4; attention/compressed.py)."""

    q_rank: int  # width of the vector that queries are computed from
    rope: int  # rotated channels of a head, the last ones
    # groups, group_rank: of heads, whose results each become a vector of this width.
    groups: int
    group_rank: int
    every: int = 0  # tokens of an entry; 0: there are none
    overlap: bool = False  # tokens also take part in the entry after theirs
    index: IndexSpec | None = None  # chooses the entries that a query reads; None: it reads all

    @property
    def reach(self) -> int:
        """Tokens that take part in an entry."""
        return self.every * (1 + self.overlap)

    def dims(self, head_dim: int) -> tuple[int, ...]:
        """Return the widths of an entry and of its key for the indexer, as far as there are any."""
        if not self.every:
            return ()
        return (head_dim, self.index.dim) if self.index else (head_dim,)

    def inputs(self, head_dim: int) -> int:
        """Return how many numbers of a token entries are made of."""
        return 2 * (1 + self.overlap) * sum(self.dims(head_dim))


AUTO = "auto"  # the model's dtype
PAGE_HEAD_BYTES = 64  # header of a page of a tier, before the bytes of its block (nn/pages.py)
STATE_HEAD_BYTES = 8  # after it in pages of states: how many tokens the state covers
MAX_STATE_PAGES = 1 << 16
SYNONYMS = {"fp8_e4m3": "fp8", "bfloat16": "bf16"}  # names in other engines


@dataclass(frozen=True, slots=True)
class KVFacts:
    """A format of the KV cache."""

    name: str  # as in `EngineConfig.kv_cache_dtype`
    bits: int  # of a number
    scale_bytes: int  # bytes of a vector's scale and zero point, if any
    meaning: str  # how keys and values are stored, for help texts

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
class KVCacheSpec:
    """What one layer stores per token, and how long it stays visible."""

    # num_kv_heads, head_dim: shape of one token's K (and V, in which zeros follow narrower values).
    num_kv_heads: int
    head_dim: int
    bytes_per_token: int  # K and V of one layer, scales and the key of an indexer included
    window: Window | None = None  # which keys a query sees; None: all
    format: str = AUTO  # of the numbers, as in `KV_FORMATS`, or "auto"
    latent: bool = False  # a token has one vector, whose first channels are its value
    readers: int = 1  # number of layers that read it, including its own
    budget: Budget | None = None  # how many tokens of a request it keeps; None: all
    # Chooses the keys that a query reads; None: it reads all that it sees.
    index: IndexSpec | None = None
    index_bytes: int = 0  # of the indexer's key, in the model's dtype
    read_width: int = 0  # numbers of a token that a query reads at most, of `head_dim`; 0: all
    entries_of: int | None = None  # the layer whose entries it has, or their keys; None: tokens

    @property
    def read_bytes(self) -> int:
        """The part of `bytes_per_token` that a query reads."""
        return self.bytes_per_token * (self.read_width or self.head_dim) // self.head_dim

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
    def visible(self) -> VisibleKeys:
        """Which keys a query sees."""
        return self.budget or self.window or ALL_KEYS


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
        size = spec.vectors * KV_FORMATS[format].vector_bytes(spec.head_dim) + spec.index_bytes
        return replace(spec, bytes_per_token=size, format=format)

    return [spec if spec is None or i in skipped else stored(spec) for i, spec in enumerate(specs)]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that see the same keys. Every group of a model allocates blocks from one shared pool:
    block b holds the K/V of `block_size` tokens for all layers of the one group that owns b."""

    specs: tuple[KVCacheSpec, ...]  # of each layer. They may differ in format, and so in bytes.
    layers: tuple[int, ...]
    # Number of its layers that share the memory of a block for one of the model's largest layers.
    # Its layers divide that memory into smaller blocks; those of block b begin at number `shares` *
    # b.
    shares: int = 1

    @property
    def spec(self) -> KVCacheSpec:
        """What the layers have in common: everything but the format and its bytes."""
        return self.specs[0]

    @property
    def visible(self) -> VisibleKeys:
        """Which keys a query sees."""
        return self.spec.visible

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
        return sum(spec.read_bytes * spec.readers for spec in self.specs)

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
    specs: Sequence[KVCacheSpec | None], *, separate: bool = False
) -> tuple[KVGroup, ...]:
    """Group layers that see the same keys. `specs[i]` belongs to layer i; None: it stores nothing.
    Groups are ordered by first layer.

    A block is as large as the largest group needs. So kinds with many layers are split into groups
    of about the size of the smallest kind (say, five window layers for each full layer), as long as
    that reduces padding. If a layer is a fraction of the largest one, several share its memory.

    Args:
        separate: a block belongs to all groups at once, so that no two layers share memory.
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
        kinds.append((layers, share if rest == 0 and not separate else 1))

    def padded(places: int) -> int:
        """Return the places of all groups together, if a block has `places` places for layers."""
        return places * sum(-(-len(layers) // (places * share)) for layers, share in kinds)

    needed = [-(-len(layers) // share) for layers, share in kinds]
    largest_kind = max(needed)
    places = largest_kind if separate else min(range(min(needed), largest_kind + 1), key=padded)
    groups = []
    for layers, share in kinds:
        parts = -(-len(layers) // (places * share))
        for i in range(parts):
            part = layers[i::parts]  # so that each stage of a pipeline has some of them
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
            stored = spec.bytes_per_token - scales - spec.index_bytes
            need[numbers] = max(need[numbers], layers * stored)
            alike = spec.format, spec.num_kv_heads, group.shares
            need[alike] = max(need[alike], layers * scales)
        indexed = sum(spec.index_bytes for spec in group.specs)
        need["index"] = max(need["index"], indexed)
    return block_size * sum(need.values())


def state_pages(state_bytes: int, block_page: int) -> tuple[int, int]:
    """Return how many pages of a tier hold the states of a request, and the bytes of each. They are
    not larger than a page of a block, since all pages in memory have places of one size.

    Args:
        block_page: bytes of the largest page of a block.
    """
    head = PAGE_HEAD_BYTES + STATE_HEAD_BYTES
    count = min(-(-state_bytes // max(1, block_page - head)), MAX_STATE_PAGES)
    return count, head + -(-state_bytes // count)

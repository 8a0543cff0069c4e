"""Configuration of the engine core: the shape of the KV cache and the limits of a step."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.spec.kv import KVGroup

RESERVED_BLOCKS = 1  # per pool: block 0, which is never allocated
POLICIES = (
    "fcfs",
    "priority",
    "shortest-prefill-first",
    "longest-prefix-match",
    "static",
    "dynamic",
)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Where blocks are kept beyond the KV cache."""

    # Of one block of each KV group, header included; then of a page of states, if layers keep any.
    page_bytes: tuple[int, ...]
    memory: int  # pages in the memory tier; 0: there is none
    disk: int = 0  # bytes of the disk tier; 0: there is none
    peers: bool = False  # pages can be loaded from other engines
    lends: bool = False  # other engines can load pages of the memory tier
    state_pages: int = 0  # pages that hold the states of a request; 0: no layer keeps a state


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: one pool of blocks shared by all groups."""

    block_size: int
    num_blocks: int  # blocks that requests can use
    groups: tuple[KVGroup, ...]
    enable_prefix_caching: bool = True
    pinned_share: float = 0.75  # share of the blocks that all tenants together may pin
    tenant_pinned_share: float = 0.5  # share of the blocks that one tenant may pin
    # Number of copies of states, apart from the states of running requests; None: no layer keeps a
    # state.
    checkpoints: int | None = None
    # The data of a request is stored outside of its blocks, which only count its tokens, so
    # requests cannot share it.
    private: bool = False
    tiers: TierSizes | None = None  # None: blocks evicted from the KV cache are computed again

    @property
    def salt(self) -> str:
        """What keys and values of a block depend on in addition to its tokens and those before it:
        which keys layers see. Hashes of blocks cover it."""
        return "".join(group.visible.salt for group in self.groups)

    @property
    def pool_size(self) -> int:
        """Blocks in memory."""
        return self.num_blocks + RESERVED_BLOCKS

    def max_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks a request of `num_tokens` holds at once when a step adds at most `chunk`."""
        size = self.block_size
        return sum(group.visible.max_blocks(num_tokens, chunk, size) for group in self.groups)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue, and the policy."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    batch_size: int = 8
    # Seconds for which a batch waits to fill; None: the policy's default.
    max_wait: float | None = None
    ageing: float = 10.0
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_194_304
    # Places in the KV cache that a decoding request gets beyond its step, if there are spare
    # blocks.
    num_lookahead_tokens: int = 0
    stages: int = 1  # of the pipeline; each computes a different step at the same time
    # Requests are prompts without output, each computed by a single step.
    whole_prompts: bool = False

"""Pinned prefixes: prefixes of prompts that stay in the prefix cache for a time, used or not.

A pin keeps a prefix of a prompt, in full blocks, until a given time has passed since its last use.
However much else passes through the cache, the next request that starts with a pinned prefix
matches it. Two things end a pin early.

- *Quotas.* A tenant pins at most its share of the blocks; beyond that its own pins are dropped,
  least recently used first. All tenants together pin at most a share too; beyond that the tenant
  that pins most loses its least recently used pin. A pin that exceeds a quota is not made.
- *Need.* Requests come first: pinned blocks without references count as free. When no other free
  block is left, pins are dropped, least recently used first. So no request waits or is preempted
  because of pins.

Time is an argument. Each call costs O(1) per block or pin it concerns, and expiry O(log n).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from kvik.core.block_pool import BlockPool
from kvik.core.config import CacheConfig


@dataclass(slots=True, eq=False)
class TenantPins:
    """The pins of one tenant."""

    name: str
    pins: OrderedDict[bytes, PinnedPrefix] = field(default_factory=OrderedDict)  # oldest use first
    blocks: Counter[int] = field(default_factory=Counter)  # how many of its pins hold each block


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """A pin that was made."""

    tenant: TenantPins
    first: bytes  # hash of its first block
    key: bytes  # hash of the whole prefix
    blocks: tuple[int, ...]  # what a match of the prefix needs, the end of the prefix last
    seconds: float
    until: float
    dropped: bool = False


class PinTable:
    """All pins of a block pool."""

    def __init__(self, pool: BlockPool, config: CacheConfig) -> None:
        self.pool = pool
        self.max_blocks = int(config.pinned_share * config.num_blocks)
        self.max_of_tenant = int(config.tenant_pinned_share * config.num_blocks)
        self.tenants: dict[str, TenantPins] = {}
        self.by_use: OrderedDict[PinnedPrefix, None] = OrderedDict()  # of all tenants, oldest first
        self._block_size = config.block_size
        self._visible = [group.visible for group in config.groups]
        # The earliest time at which each pin may end: it may have been used since.
        self._ends: list[tuple[float, int, PinnedPrefix]] = []
        self._num_made = 0

    def pin(self, tenant: str, hashes: Sequence[bytes], seconds: float, now: float) -> bool:
        """Pin the prefix whose full blocks have these hashes. If it is pinned already, this counts
        as a use, and the longer of the two times applies.

        Returns:
            Whether the pin is new. Nothing is pinned if blocks are missing or quotas exceeded.
        """
        owner = self.tenants.get(tenant) or TenantPins(tenant)
        pinned = owner.pins.get(hashes[-1])
        if pinned is not None:
            pinned.seconds = max(pinned.seconds, seconds)
        elif not self._make(owner, hashes, seconds, now):
            return False
        self.use(tenant, hashes, now)
        return pinned is None

    def use(self, tenant: str, hashes: Sequence[bytes], now: float) -> None:
        """Note that a prefix is used: the time of all its pins starts again."""
        owner = self.tenants.get(tenant)
        if owner is None:
            return
        for key in reversed(hashes):  # a longer one is dropped before one that it contains
            pin = owner.pins.get(key)
            if pin is not None:
                pin.until = max(pin.until, now + pin.seconds)
                owner.pins.move_to_end(key)
                self.by_use.move_to_end(pin)

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over."""
        ends = self._ends
        while ends and (ends[0][0] <= now or ends[0][2].dropped):
            _, number, pin = heappop(ends)
            if not pin.dropped:
                if pin.until <= now:
                    self._drop(pin)
                else:
                    heappush(ends, (pin.until, number, pin))

    def unpin_free(self, count: int) -> None:
        """Unpin `count` more blocks without references.

        Pins of prefixes in use are kept while others suffice: dropping them would free nothing.
        """
        pool, by_use = self.pool, self.by_use
        target = pool.num_free - pool.num_kept + count
        for _ in range(len(by_use)):
            if pool.num_free - pool.num_kept >= target:
                return
            oldest = next(iter(by_use))
            if self._in_use(oldest):
                by_use.move_to_end(oldest)
            else:
                self._drop(oldest)
        # Blocks of one prefix may have different users if different requests computed them.
        while pool.num_free - pool.num_kept < target:
            self._drop(next(iter(by_use)))

    def forget(self, first: bytes) -> None:
        """Drop the pins of all prefixes with this first block, whose contents are in doubt."""
        for pin in [pin for pin in self.by_use if pin.first == first]:
            self._drop(pin)

    def clear(self) -> None:
        for pin in list(self.by_use):
            self._drop(pin)
        self._ends.clear()

    def _make(self, owner: TenantPins, hashes: Sequence[bytes], seconds: float, now: float) -> bool:
        """Pin the blocks of a prefix that is not pinned yet, within the quotas."""
        blocks = self._blocks(hashes)
        if blocks is None or len(blocks) > self.max_of_tenant:  # too large even as the only pin
            return False
        for block in blocks:
            self.pool.pin(block)
        owner.blocks.update(blocks)
        pin = PinnedPrefix(owner, hashes[0], hashes[-1], blocks, seconds, now + seconds)
        self.tenants[owner.name] = owner
        owner.pins[pin.key] = pin
        self.by_use[pin] = None
        self._note_end(pin)
        return self._keep_quotas(pin)

    def _blocks(self, hashes: Sequence[bytes]) -> tuple[int, ...] | None:
        """Return the blocks that a match of the prefix needs, in its order: those that its next
        query sees. None if one is gone."""
        size = self._block_size
        hidden = [visible.hidden_blocks(len(hashes) * size, size) for visible in self._visible]
        cached = [
            self.pool.lookup((group, key))
            for i, key in enumerate(hashes)
            for group in range(len(hidden))
            if i not in hidden[group]
        ]
        blocks = tuple(block for block in cached if block is not None)
        return blocks if len(blocks) == len(cached) else None

    def _keep_quotas(self, new: PinnedPrefix) -> bool:
        """Drop pins beyond the quotas, which may include the new one. Returns whether it stays."""
        owner = new.tenant
        while len(owner.blocks) > self.max_of_tenant:
            self._drop(next(iter(owner.pins.values())))
        while self.pool.num_pinned > self.max_blocks:
            # If several pin equally many, the tenant of the new pin.
            largest = max(self.tenants.values(), key=lambda t: (len(t.blocks), t is owner))
            self._drop(next(iter(largest.pins.values())))
        return not new.dropped

    def _drop(self, pin: PinnedPrefix) -> None:
        owner = pin.tenant
        pin.dropped = True
        del owner.pins[pin.key], self.by_use[pin]
        for block in reversed(pin.blocks):  # the end of the prefix is evicted first
            self.pool.unpin(block)
            owner.blocks[block] -= 1
            if not owner.blocks[block]:
                del owner.blocks[block]
        if not owner.pins:
            del self.tenants[owner.name]

    def _in_use(self, pin: PinnedPrefix) -> bool:
        """Return whether a request holds the end of the prefix."""
        return any(self.pool.ref_counts[block] for block in pin.blocks[-len(self._visible) :])

    def _note_end(self, pin: PinnedPrefix) -> None:
        self._num_made += 1
        heappush(self._ends, (pin.until, self._num_made, pin))
        if len(self._ends) > 64 + 2 * len(self.by_use):  # most were dropped before their time
            self._ends = [end for end in self._ends if not end[2].dropped]
            heapify(self._ends)

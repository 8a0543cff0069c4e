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

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from kvik.core.block_pool import BlockPool
from kvik.core.config import CacheConfig


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One block of a pinned prefix, in each group without a window. The nodes of a tenant form a
    prefix tree: pins with a common beginning share its nodes."""

    key: bytes  # the hash of the prefix up to the end of this block
    parent: PrefixNode | None
    blocks: tuple[int, ...]
    uses: int = 0  # pins that end here, and nodes that follow


@dataclass(slots=True, eq=False)
class TenantPins:
    """The pins of one tenant, and the prefix tree of their blocks."""

    name: str
    nodes: dict[bytes, PrefixNode] = field(default_factory=dict)
    pins: OrderedDict[bytes, PinnedPrefix] = field(default_factory=OrderedDict)  # oldest use first
    num_blocks: int = 0  # a block that the windows of two pins share counts twice


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """A pin that was made."""

    tenant: TenantPins
    first: bytes  # hash of its first block
    key: bytes  # hash of the whole prefix
    end: PrefixNode | None  # None where every group has a window
    window: tuple[int, ...]  # blocks of groups with a window that a match of the prefix needs
    seconds: float
    until: float
    dropped: bool = False


class PinTable:
    """All pins of a block pool."""

    def __init__(self, pool: BlockPool, config: CacheConfig) -> None:
        self.pool = pool
        self.most_blocks = int(config.pinned_share * config.num_blocks)
        self.most_of_tenant = int(config.tenant_pinned_share * config.num_blocks)
        self.tenants: dict[str, TenantPins] = {}
        self.by_use: OrderedDict[PinnedPrefix, None] = OrderedDict()  # of all tenants, oldest first
        self._block_size = config.block_size
        kinds = [(g, group.visible) for g, group in enumerate(config.groups)]
        self._full = [g for g, visible in kinds if not visible.slides]
        self._sliding = [(g, visible) for g, visible in kinds if visible.slides]
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
        held = owner.pins.get(hashes[-1])
        if held is not None:
            held.seconds = max(held.seconds, seconds)
        elif not self._make(owner, hashes, seconds, now):
            return False
        self.use(tenant, hashes, now)
        return held is None

    def use(self, tenant: str, hashes: Sequence[bytes], now: float) -> None:
        """Note that a prefix is used: the time of all its pins starts again."""
        owner = self.tenants.get(tenant)
        if owner is None:
            return
        for key in reversed(hashes):  # a longer one is dropped before one that it contains
            held = owner.pins.get(key)
            if held is not None:
                held.until = max(held.until, now + held.seconds)
                owner.pins.move_to_end(key)
                self.by_use.move_to_end(held)

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over."""
        ends = self._ends
        while ends and (ends[0][0] <= now or ends[0][2].dropped):
            _, number, held = heappop(ends)
            if not held.dropped:
                if held.until <= now:
                    self._drop(held)
                else:
                    heappush(ends, (held.until, number, held))

    def give_way(self, count: int) -> None:
        """Unpin `count` more blocks without references.

        Pins of prefixes in use are kept while others suffice: dropping them would free nothing.
        """
        pool, by_use = self.pool, self.by_use
        wanted = pool.num_free - pool.num_kept + count
        for _ in range(len(by_use)):
            if pool.num_free - pool.num_kept >= wanted:
                return
            oldest = next(iter(by_use))
            if self._in_use(oldest):
                by_use.move_to_end(oldest)
            else:
                self._drop(oldest)
        # Blocks of one prefix may have different users if different requests computed them.
        while pool.num_free - pool.num_kept < wanted:
            self._drop(next(iter(by_use)))

    def forget(self, first: bytes) -> None:
        """Drop the pins of all prefixes with this first block, whose contents are in doubt."""
        for held in [held for held in self.by_use if held.first == first]:
            self._drop(held)

    def clear(self) -> None:
        for held in list(self.by_use):
            self._drop(held)
        self._ends.clear()

    def _make(self, owner: TenantPins, hashes: Sequence[bytes], seconds: float, now: float) -> bool:
        """Pin the blocks of a prefix that is not pinned yet, within the quotas."""
        window = self._window_blocks(hashes)
        new = self._new_nodes(owner, hashes)
        if window is None or new is None:
            return False
        if len(hashes) * len(self._full) + len(window) > self.most_of_tenant:
            return False  # too large even as the only pin
        end = owner.nodes.get(hashes[-1 - len(new)]) if len(new) < len(hashes) else None
        for key, blocks in new:
            if end is not None:
                end.uses += 1
            end = owner.nodes[key] = PrefixNode(key, end, blocks)
            self._pin_blocks(blocks)
        if end is not None:
            end.uses += 1
        self._pin_blocks(window)
        owner.num_blocks += len(new) * len(self._full) + len(window)
        held = PinnedPrefix(owner, hashes[0], hashes[-1], end, window, seconds, now + seconds)
        self.tenants[owner.name] = owner
        owner.pins[held.key] = held
        self.by_use[held] = None
        self._note_end(held)
        return self._keep_quotas(held)

    def _window_blocks(self, hashes: Sequence[bytes]) -> tuple[int, ...] | None:
        """Return the blocks that the query after the prefix sees through windows; None if one is
        gone."""
        found = []
        for g, visible in self._sliding:
            hidden = visible.hidden_blocks(len(hashes) * self._block_size, self._block_size)
            found += [self.pool.lookup((g, key)) for i, key in enumerate(hashes) if i not in hidden]
        blocks = tuple(block for block in found if block is not None)
        return blocks if len(blocks) == len(found) else None

    def _new_nodes(
        self, owner: TenantPins, hashes: Sequence[bytes]
    ) -> list[tuple[bytes, tuple[int, ...]]] | None:
        """Return key and blocks of the nodes that the tenant's tree lacks, in order; None if a
        block is gone."""
        new = []
        for key in reversed(hashes if self._full else ()):
            if key in owner.nodes:
                break
            found = [self.pool.lookup((g, key)) for g in self._full]
            blocks = tuple(block for block in found if block is not None)
            if len(blocks) < len(found):
                return None
            new.append((key, blocks))
        return new[::-1]

    def _keep_quotas(self, new: PinnedPrefix) -> bool:
        """Drop pins beyond the quotas, which may include the new one. Returns whether it stays."""
        owner = new.tenant
        while owner.num_blocks > self.most_of_tenant:
            self._drop(next(iter(owner.pins.values())))
        while self.pool.num_pinned > self.most_blocks:
            # If several pin equally many, the tenant of the new pin.
            most = max(self.tenants.values(), key=lambda t: (t.num_blocks, t is owner))
            self._drop(next(iter(most.pins.values())))
        return not new.dropped

    def _drop(self, held: PinnedPrefix) -> None:
        owner = held.tenant
        held.dropped = True
        del owner.pins[held.key], self.by_use[held]
        self._unpin_blocks(owner, held.window)
        node = held.end
        while node is not None:  # from the end of the prefix, so that the end is evicted first
            node.uses -= 1
            if node.uses:
                break
            del owner.nodes[node.key]
            self._unpin_blocks(owner, node.blocks)
            node = node.parent
        if not owner.pins:
            del self.tenants[owner.name]

    def _in_use(self, held: PinnedPrefix) -> bool:
        """Return whether a request holds the end of the prefix."""
        blocks = held.window if held.end is None else held.end.blocks
        return any(self.pool.ref_counts[block] for block in blocks[-1:])

    def _note_end(self, held: PinnedPrefix) -> None:
        self._num_made += 1
        heappush(self._ends, (held.until, self._num_made, held))
        if len(self._ends) > 64 + 2 * len(self.by_use):  # most were dropped before their time
            self._ends = [end for end in self._ends if not end[2].dropped]
            heapify(self._ends)

    def _pin_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pool.pin(block)

    def _unpin_blocks(self, owner: TenantPins, blocks: Sequence[int]) -> None:
        owner.num_blocks -= len(blocks)
        for block in blocks:
            self.pool.unpin(block)

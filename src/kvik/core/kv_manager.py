"""The block tables of requests: match a prefix, allocate, commit, fork, free.

K and V of a request are in blocks of `block_size` tokens, anywhere in one pool, and its block table
lists them in order (Kwon et al. 2023, PagedAttention, arXiv 2309.06180, section 4). So memory is
allocated as a text grows, and of the blocks of a request at most the last is partly empty.

When a block is full and its step is done, it is committed: published under the hash of all tokens
up to its end, so that a request with the same prefix shares it instead of computing it. A shared
block is never written. A partly filled one that is shared is copied before the first write (copy on
write, section 4.4).

`block_pool.py` has the blocks and the index of their contents.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvik.core.block_pool import (
    NULL_BLOCK,
    BlockKey,
    BlockPool,
    block_hash,
    extend_hashes,
    root_hash,
)
from kvik.core.checkpoints import CheckpointTable
from kvik.core.config import CacheConfig
from kvik.core.pins import PinTable
from kvik.core.plan import BudgetCut
from kvik.core.types import Request, RequestStatus
from kvik.spec.visible_keys import NEVER, VisibleKeys


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix that need not be computed: its length, and its blocks per group."""

    num_tokens: int
    block_ids: list[list[int]]
    # Tokens whose blocks are cached; more than `num_tokens` if there is no checkpoint of states at
    # that place.
    num_shared: int = 0


class KVCacheManager:
    """Gives requests blocks of the shared pool, and indexes the contents of full blocks.

    All tables of a request have the same length, one entry per `block_size` tokens; entries that
    slid out of a window, or that a budget dropped, are the null block.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.groups = config.groups
        self.caching = config.enable_prefix_caching
        self.pool = BlockPool(config.num_blocks)
        # (key, hash of the block before, block) for each block published since the list was last
        # emptied; None: there are no tiers.
        self.committed: list[tuple[BlockKey, bytes, int]] | None = None
        self.pins = PinTable(self.pool, config)
        # None: no layer keeps a state.
        self.checkpoints: CheckpointTable | None = None
        if config.checkpoints is not None:
            self.checkpoints = CheckpointTable(config.checkpoints, config.block_size, self.reusable)
        self._visible = [group.visible for group in config.groups]
        self._budgets = [group.visible for group in config.groups if group.budgeted]
        self._slides = any(visible.slides for visible in self._visible)
        self._cuts: list[BudgetCut] = []  # since they were taken
        self.cut_blocks: list[int] = []  # that they read, and that may be free already
        # Sources of copies since then: a cut comes before them, so it may not take these blocks.
        self._sources: list[int] = []
        # If all layers see the same keys, the blocks of a token are released together.
        self._releases_tokens = len(set(self._visible)) == 1 and self._slides

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        total = self.pool.num_blocks
        return 1.0 - self.pool.num_free / total if total else 0.0

    def match(self, request: Request) -> PrefixMatch:
        """Return the longest cached prefix of a waiting request. Nothing is acquired yet."""
        usable = (len(request.token_ids) - 1) // self.block_size
        if self.caching:
            extend_hashes(
                request.block_hashes, request.token_ids, self.block_size, request.cache_salt, usable
            )
        usable = min(usable, self.num_cacheable(request) // self.block_size)
        if not self.caching or usable == 0:
            match = PrefixMatch(0, [[] for _ in self.groups])
        else:
            match = self._longest_cached(request.block_hashes[:usable])
        if request.num_kept_tokens:
            match = self._with_rest(request, match)
        forked = self._fork(request)
        return forked if forked and forked.num_tokens > match.num_tokens else match

    def num_cacheable(self, request: Request) -> int:
        """Return the known tokens of a request that may come from the prefix cache."""
        return min(request.num_cacheable_tokens, self.reusable(request.num_prompt_tokens))

    def reusable(self, prompt: int) -> int:
        """See `VisibleKeys.reusable`: the least of all groups."""
        return min((visible.reusable(prompt) for visible in self._budgets), default=NEVER)

    def demand(self, match: PrefixMatch, num_tokens: int, chunk: int) -> int:
        """Return how many free blocks a request with this match takes for `num_tokens` tokens."""
        num_matched = sum(len(ids) - ids.count(NULL_BLOCK) for ids in match.block_ids)
        if match.num_tokens % self.block_size:
            num_matched -= len(self.groups)  # the shared partial block is copied
        return self.config.max_blocks(num_tokens, chunk) - num_matched + self._revived(match)

    def prompt_demand(self, request: Request, chunk: int) -> int:
        """Return how many more blocks a running request needs for its known tokens; 0 if it
        waits."""
        if request.status is not RequestStatus.RUNNING:
            return 0
        needed = self.config.max_blocks(len(request.token_ids), chunk)
        return max(0, needed - self.num_allocated(request))

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Return how many blocks `extend` would allocate."""
        missing = -(-num_tokens // self.block_size) - len(request.block_ids[0])
        return max(0, missing) * len(self.groups) + sum(
            len(self._visible[group].cut_blocks(request.num_computed_tokens, self.block_size))
            for group in self._due(request)
        )

    def num_allocated(self, request: Request) -> int:
        """Return how many blocks a running request holds, shared ones included."""
        if not (self._slides or request.num_cut_tokens):
            return len(self.groups) * len(request.block_ids[0])
        return sum(
            len(ids) - self._num_released(visible, ids)
            for visible, ids in zip(self._visible, request.block_ids, strict=True)
        )

    def _num_released(self, visible: VisibleKeys, ids: list[int]) -> int:
        """Return the number of null blocks of a table, by binary search: they are contiguous."""
        first = visible.hidden_blocks(0, self.block_size).start
        return max(0, bisect(ids, False, first, key=lambda block: block != NULL_BLOCK) - first)

    def tokens(self, running: Iterable[Request]) -> tuple[int, int]:
        """Return how many tokens the blocks of running requests have room for, and how many are
        computed or promised, summed over groups. A shared block counts for each holder."""
        allocated = empty = 0
        for request in running:
            allocated += self.num_allocated(request) * self.block_size
            capacity = len(request.block_ids[0]) * self.block_size
            empty += len(self.groups) * (capacity - request.num_computed_tokens)
        return allocated, allocated - empty

    def admit(
        self, request: Request, match: PrefixMatch, num_tokens: int
    ) -> list[tuple[int, int]] | None:
        """Give a waiting request the matched blocks, and blocks for its first `num_tokens` tokens.

        Returns:
            Block copies (source, target) to make before the step, or None if too few blocks are
            free, in which case nothing changed.
        """
        # A partly filled last block is shared until the first write, which is now: copy it.
        partial = match.num_tokens % self.block_size != 0
        length = -(-num_tokens // self.block_size)
        new = sum(length - len(ids) + partial for ids in match.block_ids)
        if new + self._revived(match) > self.pool.num_free:
            return None
        for ids in match.block_ids:
            for block in ids:
                if block != NULL_BLOCK:
                    self.pool.acquire(block)
        request.block_ids = [list(ids) for ids in match.block_ids]
        copies = []
        if partial:
            for ids in request.block_ids:
                source = ids[-1]
                if request.takes_block and self.pool.ref_counts[source] == 1:
                    self.pool.forget(source)  # it is overwritten
                    continue
                ids[-1] = self._allocate(1)[0]
                copies.append((source, ids[-1]))
                self._sources.append(source)
        for ids in request.block_ids:
            ids.extend(self._allocate(length - len(ids)))
        if not self._budgets:
            self._release_sources()
        request.num_computed_tokens = request.num_written_tokens = match.num_tokens
        request.num_shared_tokens = match.num_shared
        request.num_committed_blocks = match.num_tokens // self.block_size
        request.next_cut = self.cut_after(request, match.num_tokens)
        return copies

    def extend(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Allocate blocks for `num_tokens` tokens in all. Returns new ids per group, or None.

        Where a budget drops tokens, first move those that it keeps (`take_cuts`).
        """
        if self._slides:
            self._release_unseen(request)
        if self.num_missing(request, num_tokens) > self.pool.num_free:
            return None
        if request.next_cut == request.num_computed_tokens:
            self._cut(request)
        missing = max(0, -(-num_tokens // self.block_size) - len(request.block_ids[0]))
        new = [self._allocate(missing) for _ in self.groups]
        for ids, more in zip(request.block_ids, new, strict=True):
            ids.extend(more)
        return new

    def commit(self, request: Request) -> None:
        """Publish blocks that became full of written, delivered tokens; free those out of windows.

        Blocks that a step in flight will write are not published: the step may fail.
        """
        full = min(request.num_written_tokens, len(request.token_ids)) // self.block_size
        first, public = request.num_committed_blocks, self.num_public(request, full)
        if self.caching and public > first:
            extend_hashes(
                request.block_hashes, request.token_ids, self.block_size, request.cache_salt, public
            )
            for group, ids in enumerate(request.block_ids):
                for i in range(first, public):
                    if ids[i] != NULL_BLOCK:
                        self.pool.commit(ids[i], (group, request.block_hashes[i]))
            if self.committed is not None:
                self.committed += self._new_contents(request, first, public)
        request.num_committed_blocks = max(first, full)
        if self._slides:
            self._release_unseen(request)

    def commit_rest(self, request: Request) -> None:
        """Publish the partly filled last block of a request, so that others can continue it."""
        full, rest = divmod(request.num_written_tokens, self.block_size)
        if not rest or not self.caching or self.checkpoints is not None:
            return
        if self.num_public(request, full + 1) <= full or len(request.block_hashes) < full:
            return
        key = self.prefix_key(request, request.num_written_tokens)
        for group, ids in enumerate(request.block_ids):
            if ids[full] != NULL_BLOCK:
                self.pool.commit(ids[full], (group, key))
        request.rest = key

    def drop_rest(self, request: Request) -> None:
        """Withdraw what `commit_rest` published: no request will continue it."""
        for group in range(len(self.groups) if request.rest else 0):
            block = self.pool.lookup((group, request.rest))
            if block is not None:
                self.pool.discard(block)

    def use_pins(self, request: Request, now: float) -> None:
        """Note the use of pinned prefixes that an admitted request shares."""
        if self.pins.by_use:
            shared = request.block_hashes[: request.num_committed_blocks]
            self.pins.use(request.tenant, shared, now)
        if request.pins:
            self.pin(request, now)

    def pin(self, request: Request, now: float) -> None:
        """Pin the prefixes that a request asks for, as far as they are published."""
        if not self.caching:
            return
        prompt, done = request.num_prompt_tokens, 0
        for pin in request.pins:
            tokens = min(pin.num_tokens, prompt)
            length = tokens // self.block_size
            if length > request.num_committed_blocks:
                break
            done += 1
            # If a pin ends with the prompt, longer prompts match all of it. A request with the same
            # prompt computes its last token again, so the blocks that token sees are pinned too.
            for blocks in dict.fromkeys((min(tokens, prompt - 1) // self.block_size, length)):
                hashes = request.block_hashes[:blocks]
                if hashes and self.pins.pin(request.tenant, hashes, pin.seconds, now):
                    written = blocks * self.block_size - request.num_cached_tokens
                    request.num_pinned_tokens = max(request.num_pinned_tokens, written)
        request.pins = request.pins[done:]

    def free(self, request: Request, *, forget: bool = False) -> None:
        """Release all blocks. The end of the table is evicted first, so that blocks shared with
        others live longest. `forget`: the contents are in doubt and must not be matched."""
        for ids in request.block_ids:
            blocks = [b for b in reversed(ids) if b != NULL_BLOCK]
            if forget:
                for block in blocks:
                    self.pool.forget(block)
            self.pool.release(blocks)
        if forget and request.block_hashes:
            self.pins.forget(request.block_hashes[0])
            if self.checkpoints is not None:
                self.checkpoints.forget(request.block_hashes)
        if self._releases_tokens:  # some of these may be forgotten
            del request.block_hashes[request.num_prompt_tokens // self.block_size :]
        request.block_ids = []
        request.num_cut_tokens, request.next_cut = 0, NEVER
        request.num_committed_blocks = 0
        request.num_computed_tokens = request.num_written_tokens = 0

    # Cuts: where layers drop tokens that queries have seen.
    #
    # Groups drop tokens at different times. The kept tokens of a request move to private blocks,
    # whose table entries are the last before the next token. So later tokens still have their
    # positions as places, and tables of all groups have the same length. Blocks that others may
    # share are read, and never written.

    def cut_after(self, request: Request, num_tokens: int) -> int:
        """Return after how many tokens, at least `num_tokens`, a group next drops some."""
        prompt = request.num_prompt_tokens
        cuts = (visible.next_cut(num_tokens, prompt) for visible in self._visible)
        return min(cuts, default=NEVER)

    def take_cuts(self) -> list[BudgetCut]:
        """Return the cuts since the last call, which the worker makes before the next forward."""
        cuts, self._cuts = self._cuts, []
        self.cut_blocks.clear()
        self._release_sources()
        return cuts

    def _release_sources(self) -> None:
        self.pool.release(self._sources)
        self._sources.clear()

    def num_public(self, request: Request, blocks: int) -> int:
        """Return how many of the first `blocks` blocks others may share once they are computed.
        Blocks after the first cut depend on what was kept, so they cannot be shared."""
        return min(blocks, self.cut_after(request, 0) // self.block_size)

    def before_cuts(self, request: Request, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens can be stored for later: all, or whole
        blocks of those that no cut has moved."""
        reusable = self.reusable(request.num_prompt_tokens)
        return (
            num_tokens if num_tokens <= reusable else reusable // self.block_size * self.block_size
        )

    def _due(self, request: Request) -> list[int]:
        """Return the groups that drop tokens before the next one."""
        at, prompt = request.num_computed_tokens, request.num_prompt_tokens
        if request.next_cut != at:
            return []
        return [g for g, kind in enumerate(self._visible) if kind.next_cut(at, prompt) == at]

    def _cut(self, request: Request) -> None:
        """Allocate blocks for what the due groups keep, and release those that they had."""
        end = request.num_computed_tokens
        released: list[int] = []
        for group in self._due(request):
            ids, visible = request.block_ids[group], self._visible[group]
            where = visible.cut_blocks(end, self.block_size)
            new = self._allocate(len(where))
            first_key = visible.first_key(end, request.num_prompt_tokens)
            self._cuts.append(BudgetCut(request.slot, group, end, first_key, new))
            released += [block for block in reversed(ids[: where.stop]) if block != NULL_BLOCK]
            later = ids[where.stop :]  # places for future tokens
            ids[:] = [NULL_BLOCK] * where.start + new + later
        self.pool.release(released)
        self.cut_blocks += released
        request.num_cut_tokens = end
        request.next_cut = self.cut_after(request, end + 1)

    def reset(self) -> int:
        """Forget the contents of all blocks, pinned ones included; requests continue. Returns how
        many contents there were."""
        self.pins.clear()
        if self.committed:
            self.committed.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()
        return self.pool.forget_all()

    def _allocate(self, count: int) -> list[int]:
        """Allocate free blocks; pins are dropped if no others are left."""
        short = count - (self.pool.num_free - self.pool.num_kept)
        if short > 0:
            self.pins.unpin_free(short)
        return self.pool.allocate(count)

    def _revived(self, match: PrefixMatch) -> int:
        """Return how many blocks of the match are free now."""
        refs = self.pool.ref_counts
        return sum(refs[b] == 0 for ids in match.block_ids for b in ids if b != NULL_BLOCK)

    def _new_contents(
        self, request: Request, first: int, end: int
    ) -> Iterable[tuple[BlockKey, bytes, int]]:
        hashes = request.block_hashes
        for i in range(first, end):
            parent = hashes[i - 1] if i else root_hash(request.cache_salt)
            for group, ids in enumerate(request.block_ids):
                if ids[i] != NULL_BLOCK:
                    yield (group, hashes[i]), parent, ids[i]

    def acquire(self, blocks: Sequence[int], count: int) -> list[int] | None:
        """Acquire blocks, and allocate `count` others. Returns the latter, or None if too few are
        free, in which case nothing changed."""
        revived = sum(self.pool.ref_counts[block] == 0 for block in blocks)
        if revived + count > self.pool.num_free:
            return None
        for block in blocks:
            self.pool.acquire(block)
        return self._allocate(count)

    def _with_rest(self, request: Request, match: PrefixMatch) -> PrefixMatch:
        """Extend a match by the partly filled block that the request had when it was preempted, if
        that was loaded, or by that of the request which it continues."""
        tokens = request.num_kept_tokens
        if not match.num_tokens < tokens <= self.num_cacheable(request):
            return match
        length, rest = divmod(tokens, self.block_size)
        tables = match.block_ids
        if self.checkpoints is not None:  # the match may end at an earlier checkpoint
            hashes = request.block_hashes[:length]
            known = rest and len(hashes) == length
            if not known or self._cached_length(hashes, length) < length:
                return match
            if self.checkpoints.index_of(self.prefix_key(request, tokens)) is None:
                return match
            tables = self._tables(hashes)
        elif length != match.num_tokens // self.block_size:
            return match
        key = self.prefix_key(request, tokens)
        blocks = [self.pool.lookup((group, key)) for group in range(len(self.groups))]
        tables = [
            [*ids, block] for ids, block in zip(tables, blocks, strict=True) if block is not None
        ]
        is_cached = len(tables) == len(blocks)
        return PrefixMatch(tokens, tables, match.num_shared) if is_cached else match

    def _longest_cached(self, hashes: list[bytes]) -> PrefixMatch:
        """Match the longest prefix for which every group has the blocks it needs and, if layers
        keep states, there is a checkpoint."""
        length = shared = self._cached_length(hashes, len(hashes))
        if self.checkpoints is not None:
            while length != (hit := self.checkpoints.hit_length(hashes, length)):
                length = self._cached_length(hashes, hit)
        tables = self._tables(hashes[:length])
        return PrefixMatch(length * self.block_size, tables, shared * self.block_size)

    def _tables(self, hashes: list[bytes]) -> list[list[int]]:
        """Return the cached blocks of a prefix for each group, without those that it hides."""
        tables = []
        for g, visible in enumerate(self._visible):
            hidden = visible.hidden_blocks(len(hashes) * self.block_size, self.block_size)
            blocks = (
                NULL_BLOCK if i in hidden else self.pool.lookup((g, key))
                for i, key in enumerate(hashes)
            )
            tables.append([b for b in blocks if b is not None])
        return tables

    def _cached_length(self, hashes: list[bytes], length: int) -> int:
        """Walk the chain of hashes, up to `length`, as far as every group has its blocks."""
        return self.usable_length(hashes, length, lambda key: self.pool.lookup(key) is not None)

    def usable_length(
        self, hashes: list[bytes], length: int, is_there: Callable[[BlockKey], bool]
    ) -> int:
        """Return the length in blocks, up to `length`, of the longest usable prefix, if the blocks
        for which `is_there` returns true are available."""
        before = -1
        while length != before:  # where one group stops short, others may see what they lack
            before = length
            for g, visible in enumerate(self._visible):
                length = visible.hit_length(
                    lambda block, g=g: is_there((g, hashes[block])),  # type: ignore[misc]
                    length,
                    self.block_size,
                )
            if not self._slides:
                break
        return length

    def prefix_key(self, request: Request, num_tokens: int) -> bytes:
        """Return the hash of the first `num_tokens` tokens of a request, at least one. Those of its
        full blocks must be known. If the last block is partly filled, no full block has the same
        hash, since this one covers fewer tokens."""
        full, rest = divmod(num_tokens, self.block_size)
        if not rest:
            return request.block_hashes[full - 1]
        parent = request.block_hashes[full - 1] if full else root_hash(request.cache_salt)
        return block_hash(parent, request.token_ids[full * self.block_size : num_tokens])

    def _fork(self, request: Request) -> PrefixMatch | None:
        """Match the prompt of a sibling: it shares its leader's blocks of the prompt, including a
        partly filled last one."""
        leader = request.leader
        if self.checkpoints is not None:
            return None  # the leader's state has moved on; its checkpoint is found by its prefix
        if self.config.private:
            return None
        if leader is None or leader.status is not RequestStatus.RUNNING or leader.num_cut_tokens:
            return None
        # Its first token proves that the prompt's K/V were written by an earlier step. After a
        # preemption of either the prefix cache serves as well.
        fresh = leader.first_token is not None and not leader.num_preemptions
        length = request.num_prompt_tokens - 1
        if not fresh or request.num_preemptions or length == 0:
            return None
        if self.num_cacheable(request) < length:
            return None
        blocks = -(-length // self.block_size)
        tables = [list(ids[:blocks]) for ids in leader.block_ids]
        for visible, ids in zip(self._visible, tables, strict=True):
            hidden = visible.hidden_blocks(length, self.block_size)
            for i, block in enumerate(ids):
                if i in hidden:
                    ids[i] = NULL_BLOCK
                elif block == NULL_BLOCK:
                    return None  # the leader's window has moved on
        return PrefixMatch(length, tables)

    def _release_unseen(self, request: Request) -> None:
        """Release blocks that slid out of the window of the first query that may still come."""
        position = request.num_written_tokens
        for visible, ids in zip(self._visible, request.block_ids, strict=True):
            unseen = []
            for gone in reversed(visible.hidden_blocks(position, self.block_size)):
                if ids[gone] == NULL_BLOCK:
                    break
                unseen.append(ids[gone])
                ids[gone] = NULL_BLOCK
            self.pool.release(unseen)
        if self._releases_tokens:
            self._forget_hashes(request, len(unseen))

    def _forget_hashes(self, request: Request, count: int) -> None:
        """Forget the hashes of the last `count` released blocks, those of the output only: they are
        not needed until the request starts again."""
        gone = self._visible[0].hidden_blocks(request.num_written_tokens, self.block_size)
        first = max(gone.stop - count, request.num_prompt_tokens // self.block_size)
        for i in range(first, min(gone.stop, len(request.block_hashes) - 1)):
            request.block_hashes[i] = b""

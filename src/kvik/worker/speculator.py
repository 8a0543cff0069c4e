"""Drafts from one step to the next: who gets how many, what was proposed, what it took.

The drafts themselves stand in the request table, behind the tokens that are known. The scheduler is
told how many there are and decides how many of them, the first ones, are checked in the next step
of their request; the others are forgotten then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvik.config.speculative import ResolvedSpeculation
from kvik.core.plan import DraftTimes, NewRequest
from kvik.frozen import frozen
from kvik.kernels.upload import upload
from kvik.worker.adaptive import DraftControl, StepFigures
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.graphs import EngineNetwork, StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.rejection import Chains, Trees
from kvik.worker.request_table import RequestTable
from kvik.worker.sampler import StepSampler, StepTokens
from kvik.worker.sampling_batch import NOTHING, Guesses, Offers
from kvik.worker.sampling_table import SamplingTable

# A step whose rows have drafts: which are right, and what that leaves in tables and cache.


@frozen
class CheckedDrafts:
    """Attributes:
    found: tokens of the rows of logits.
    first: [sampling rows], the first row of logits of each.
    rows: [tokens], the rows of logits whose tokens are output, one sampling row after another.
    lengths: [sampling rows], how many of them are of each.
    """

    found: StepTokens
    first: np.ndarray
    rows: np.ndarray
    lengths: np.ndarray

    @property
    def newest(self) -> np.ndarray:
        """[sampling rows], the row of logits that gave each its newest token."""
        newest: np.ndarray = self.rows[self.lengths.cumsum() - 1]
        return newest

    def paths(self, drafts: int) -> np.ndarray:
        """[sampling rows, drafts] bool, which of the drafts of each were accepted: the row of
        logits after a draft is output if and only if the draft is."""
        owners = np.arange(len(self.first)).repeat(self.lengths)
        found = np.zeros((len(self.first), 1 + drafts), np.bool_)
        found[owners, self.rows - self.first[owners]] = True
        return found[:, 1:]


class DraftChecker:
    def __init__(
        self,
        network: EngineNetwork,
        table: RequestTable,
        sampler: StepSampler,
        speculator: Speculator,
        device: torch.device,
    ) -> None:
        self.network = network
        self.table = table
        self.sampler = sampler
        self.speculator = speculator
        self.device = device

    def check(self, batch: InputBatch, output: StepOutput, counts: np.ndarray) -> CheckedDrafts:
        """Sample the step and accept drafts. Of each request the table has the accepted tokens
        then, and the cache their K and V; what was rejected is not counted any more.

        Args:
            counts: [sampling rows], drafts of each.
        """
        table, slots = self.table, batch.slots[batch.sampling_rows]
        tokens, tree = batch.logit_tokens, self.speculator.tree
        assert tokens is not None and batch.logit_positions is not None
        rows: Chains | Trees
        judged: Guesses | Offers | None = None
        if tree is None:
            rows = Chains.of(counts, tokens)
            judged = self.speculator.guesses(slots, rows)
        else:
            rows = Trees.of(tree, counts, tokens)
        typical = self.speculator.speculation.typical
        if typical is not None:
            judged = Offers(*rows.offers(), typical)
        judging = slots.repeat(counts + 1)  # [logit rows]
        found = self.sampler.sample(
            output,
            judging,
            batch.logit_positions + 1,
            rows.supposed() if self.sampler.sampling.reads_output(slots) else NOTHING,
            judged,
        )
        bad = None
        if found.bad_rows:
            bad = np.zeros(len(judging), np.bool_)
            bad[list(found.bad_rows)] = True
        kept, lengths = rows.output(found.token_ids, bad)
        if tree is not None:
            self._gather(slots, rows.starts[:-1], kept, lengths)
        table.num_computed[slots] -= (counts + 1 - lengths).astype(np.int32)
        table.append_runs(slots, lengths, found.token_ids[kept])
        return CheckedDrafts(found, rows.starts[:-1], kept, lengths)

    def _gather(
        self, slots: np.ndarray, first: np.ndarray, kept: np.ndarray, lengths: np.ndarray
    ) -> None:
        """Move the K and V of accepted paths to where they would lie without the rest of the tree.

        Args:
            slots, first, lengths: [rows], see `CheckedDrafts`. kept: [tokens], its `rows`.
        """
        owners = np.repeat(np.arange(len(slots)), lengths)
        nodes = kept - first[owners]
        depths = np.arange(len(kept)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        moved = np.flatnonzero(nodes != depths)
        if not len(moved):
            return
        owner = slots[owners[moved]]
        root = self.table.num_tokens[owner].astype(np.int64) - 1
        for group, layers in enumerate(self.network.groups):
            source = self._kv_positions(group, owner, root + nodes[moved])
            target = self._kv_positions(group, owner, root + depths[moved])
            for layer in layers.layers:
                self.network.backend.move(self.network.kv[layer], source, target)

    def _kv_positions(self, group: int, slots: np.ndarray, places: np.ndarray) -> torch.Tensor:
        block, offset = np.divmod(places, self.table.block_size)
        blocks = self.table.block_tables[group][slots, block].astype(np.int64)
        return upload(blocks * self.table.block_size + offset, self.device)


log = logging.getLogger(__name__)


class Speculator:
    """A drafter at work. It may raise whatever it likes: that costs its drafts alone.

    Attributes:
        num_drafts: [slots] int64, proposed for each slot's next step.
    """

    def __init__(
        self,
        speculation: ResolvedSpeculation,
        drafter: Drafter,
        table: RequestTable,
        sampling: SamplingTable,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.speculation = speculation
        self.clock = clock
        self.drafter = drafter
        self.table = table
        self.sampling = sampling
        self.tree: DraftTree | None = None
        slots, self._max_model_len = table.token_ids.shape
        self.control = DraftControl(slots, speculation.num_draft_tokens, speculation.max_draft_rows)
        self.num_drafts = np.zeros(slots, np.int64)
        self._vocab_size = vocab_size
        self._most = np.zeros(slots, np.int64)  # drafts in a step; 0: the request wants none
        self._last = np.zeros(slots, np.int64)  # place of the last token that a request may have
        self._probs: dict[int, Tensor] = {}  # by slot, [drafts, vocab]
        # When drafts were made last; see `StepFigures`. With what looking at the step took.
        self._making, self._asked = 0.0, 0
        self._waiting = False  # some slot has drafts
        self._complained = False

    def enter(self, new: NewRequest) -> None:
        """A request stands in the table."""
        params, slot = new.params, new.slot
        longest = self._max_model_len
        if params.max_tokens is not None:
            longest = min(longest, new.num_prompt_tokens + params.max_tokens)
        self._last[slot] = longest - 1
        self._most[slot] = self.speculation.num_draft_tokens if params.speculation else 0
        self._forget(slot)
        self.control.enter(slot)
        if params.speculation:
            try:
                self.drafter.enter(slot)
            except Exception:
                self._most[slot] = 0
                self._complain()

    def leave(self, slot: int) -> None:
        if self._most[slot]:
            try:
                self.drafter.leave(slot)
            except Exception:
                self._complain()
        self._most[slot] = 0
        self._forget(slot)

    def guesses(self, slots: np.ndarray, chains: Chains) -> Guesses | None:
        """The drafts of a step that were drawn from a distribution; None if none was.

        Args:
            slots: [requests], of the chains.
        """
        if not self._probs:
            return None
        rows, probs = [], []
        for slot, start, end in zip(
            slots.tolist(), chains.starts[:-1].tolist(), chains.starts[1:].tolist(), strict=True
        ):
            drawn = self._probs.get(slot)
            if drawn is not None and end - start > 1:
                rows.append(np.arange(start, end - 1))
                probs.append(drawn[: end - start - 1])
        if not rows:
            return None
        found = np.concatenate(rows)
        return Guesses(found, chains.judged[found], torch.cat(probs))

    def passed(self, requests: int, seconds: float, *, pure: bool) -> bool:
        """A step without drafts is done, for which none were looked for, as nearly all are where
        they do not pay.

        Args:
            requests: that sampled. seconds, pure: see `observe`.

        Returns:
            Whether `propose` is due; else no request gets drafts.
        """
        return self.control.passed(requests, seconds, pure=pure)

    @property
    def idle(self) -> bool:
        """Whether a step without drafts has but `passed`, and neither `observe` nor `propose`."""
        return not (self._asked or self._waiting) and self.speculation.adaptive

    def observe(
        self,
        slots: np.ndarray,
        drafts: np.ndarray,
        accepted: np.ndarray,
        seconds: float,
        *,
        pure: bool,
        paths: np.ndarray | None = None,
    ) -> DraftTimes:
        """A step is done, and with it all drafts of its requests.

        Args:
            slots, drafts, accepted: [rows], of the requests that sampled.
            seconds: that it took.
            pure: it computed nothing else.
            paths: [rows, drafts of the tree] bool, which ones were accepted; None: they are chains.
        """
        started = self.clock()
        making, asked = self._making, self._asked
        self.control.observe(
            StepFigures(slots, drafts, accepted, seconds, making, asked, pure, paths)
        )
        self.num_drafts[slots] = 0
        self._waiting = bool(np.count_nonzero(self.num_drafts))
        if self._probs:
            for slot in slots.tolist():
                self._probs.pop(slot, None)
        self._making, self._asked = self.clock() - started, 0
        if not pure or not asked:
            return DraftTimes(making)
        if not np.count_nonzero(drafts):
            return DraftTimes(making, making + seconds, seconds)
        plain = self.control.plain_seconds(len(slots))
        if plain is None:
            return DraftTimes(making)
        right = sum(accepted.tolist()) / len(slots)
        return DraftTimes(making, making + seconds, plain * (1.0 + right))

    def propose(self, slots: np.ndarray, hidden: Callable[[np.ndarray], Tensor]) -> None:
        """Drafts for requests that have sampled.

        Args:
            slots: [rows], all that go on.
            hidden: indices among `slots` -> their rows for `DraftRows.hidden`.
        """
        started = self.clock()
        limits = self._limits(slots)
        chosen = limits.nonzero()[0]
        if not len(chosen):
            self.control.decided(self._making + self.clock() - started)
            self._making = 0.0
            return
        some = slots[chosen]
        rows = DraftRows(some, limits[chosen], lambda: hidden(chosen))
        try:
            self._keep(rows, self.drafter.propose(rows))
        except Exception:
            self._complain()
        self._asked = max(limits.tolist())
        self._waiting = bool(np.count_nonzero(self.num_drafts))
        self._making += self.clock() - started

    def _limits(self, slots: np.ndarray) -> np.ndarray:
        """Most drafts for each slot: what the request and the step have room for. The scheduler may
        leave requests with drafts for a later step, so theirs count as well."""
        known = self.table.num_tokens[slots]
        limits = np.minimum(self._most[slots], self._last[slots] - known)
        if self.speculation.num_lookahead_tokens:
            # The newest token and all drafts but the last are written where the drafter computes.
            places = self.table.num_blocks[0][slots] * self.table.block_size
            limits = np.minimum(limits, places - known + 1)
        np.maximum(limits, 0, out=limits)
        if self.speculation.adaptive:
            limits = self.control.limits(slots, limits)
        room = self.speculation.max_draft_rows
        if self._waiting:
            room -= int(self.num_drafts.sum())
        return shared_out(limits, room)

    def _keep(self, rows: DraftRows, drafts: Drafts) -> None:
        """Put drafts where the next step finds them.

        Raises:
            ValueError: they are not what a drafter may propose.
        """
        counts, tokens = drafts.counts, drafts.token_ids
        if len(counts) != len(rows.limits) or np.count_nonzero(counts > rows.limits):
            raise ValueError("more drafts than were asked for")
        if not len(tokens):
            return
        # What is negative is large without a sign.
        if np.count_nonzero(tokens.view(np.uint64) >= self._vocab_size):
            raise ValueError(f"a draft is no token in [0, {self._vocab_size - 1}]")
        if drafts.probs is not None and drafts.probs.shape != (len(tokens), self._vocab_size):
            raise ValueError("drafts come without their probabilities")
        if self.tree is not None and drafts.tree is not self.tree:
            raise ValueError("the tree of drafts changed")
        if drafts.tree is not None and counts.max() > drafts.tree.drafts:
            raise ValueError("more drafts than the tree has nodes for")
        if self.tree is None and drafts.tree is not None:
            self.tree = drafts.tree
            self.control.follow(self.tree.parents)
        self.table.put_drafts(rows.slots, counts, tokens)
        self.num_drafts[rows.slots] = counts
        if drafts.probs is not None:
            split = drafts.probs.split(counts.tolist())
            for slot, certain, probs in zip(
                rows.slots.tolist(), self.sampling.certain(rows.slots).tolist(), split, strict=True
            ):
                if not certain and len(probs):
                    self._probs[slot] = probs

    def _forget(self, slot: int) -> None:
        self.num_drafts[slot] = 0
        self._probs.pop(slot, None)

    def _complain(self) -> None:
        """Of the exception that is being handled, if it is the first."""
        if not self._complained:
            log.warning("a drafter failed; its requests go on without drafts", exc_info=True)
        self._complained = True


def shared_out(limits: np.ndarray, room: int) -> np.ndarray:
    """`room` shared out as evenly as the limits allow; the first ones get what is left over.

    Args:
        limits: [rows].
    """
    if sum(limits.tolist()) <= room:
        return limits
    given = np.zeros_like(limits)
    while room > 0:
        open_ = np.flatnonzero(given < limits)
        each = room // len(open_)
        if each == 0:
            given[open_[:room]] += 1
            break
        more = np.minimum(limits[open_] - given[open_], each)
        given[open_] += more
        room -= int(more.sum())
    return given

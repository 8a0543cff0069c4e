"""Proposes the drafts of the next step: how many each request gets, and what they cost.

Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) in the worker: after a step a drafter
guesses the next tokens of its requests (`drafters/`), as many as `adaptive.py` allows. The model
computes them with the newest token in the next step, and `rejection.py` decides how many of them
are output.

The request table contains the drafts, after the known tokens. The scheduler is given their number
and decides how many, from the first on, are checked in the next step of their request; the others
are dropped then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvik.config.speculative import FORCED, ResolvedSpeculation
from kvik.core.plan import DraftTimes, NewRequest
from kvik.core.structured import TextMatcher
from kvik.kernels.upload import upload
from kvik.worker.adaptive import DraftControl, StepFigures
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.model_runner import Participant, RunningStep
from kvik.worker.rejection import Chains
from kvik.worker.request_table import RequestTable
from kvik.worker.sampling_batch import Guesses
from kvik.worker.sampling_table import SamplingTable

log = logging.getLogger(__name__)


class Speculator(Participant[None]):
    """Calls a drafter after each step and decides how many drafts it makes.

    An exception of the drafter only loses its drafts.
    """

    reads_output = True

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
        slots, self._max_model_len = table.token_ids.shape
        self.control = DraftControl(slots, speculation.num_draft_tokens, speculation.max_draft_rows)
        # [slots] int64, proposed for each slot's next step.
        self.num_drafts = np.zeros(slots, np.int64)
        self._vocab_size = vocab_size
        # Most drafts in a step; 0: the request wants none.
        self._max_drafts = np.zeros(slots, np.int64)
        self._last = np.zeros(slots, np.int64)  # index of the last token that a request may have
        self._probs: dict[int, Tensor] = {}  # by slot, [drafts, vocab]
        self._certain = np.zeros(slots, np.bool_)  # a grammar forces the drafts of this slot
        # See `StepFigures`; the time includes that of `observe`.
        self._making, self._requested = 0.0, 0
        self._waiting = False  # some slot has drafts
        self._ended = clock()  # end of the last step
        self._complained = False

    def enter(self, new: NewRequest) -> None:
        """Enter a request that the table contains."""
        params, slot = new.params, new.slot
        longest = self._max_model_len
        if params.max_tokens is not None:
            longest = min(longest, new.num_prompt_tokens + params.max_tokens)
        self._last[slot] = longest - 1
        self._max_drafts[slot] = self.speculation.num_draft_tokens if params.speculation else 0
        self._forget(slot)
        self.control.enter(slot)
        if params.speculation:
            try:
                self.drafter.enter(slot)
            except Exception:
                self._max_drafts[slot] = 0
                self._complain()

    def leave(self, slot: int) -> None:
        if self._max_drafts[slot]:
            try:
                self.drafter.leave(slot)
            except Exception:
                self._complain()
        self._max_drafts[slot] = 0
        self._forget(slot)

    def read(self, step: RunningStep, launched: None) -> None:
        """Record which drafts of a step were accepted, and propose those of the next one."""
        batch = step.batch
        assert step.output is not None
        try:
            self.drafter.read_step(batch, step.output)
        except Exception:
            self._complain()
        rows = len(batch.sampling_rows)
        if rows:
            seconds = self.clock() - step.started
            # Fewer steps also save what the engine does between them, unless it was idle.
            seconds += min(step.started - self._ended, seconds)
            step.result.turn_seconds = seconds
            if self.table.draft_tree is not None:
                step.result.draft_places = self.table.draft_tree.reach
            if step.checked is None and self.idle:
                due = self.control.passed(rows, seconds, pure=bool(batch.starts[-1] == rows))
            else:
                due, step.result.draft_times = True, self._observe(step, seconds)
            guesses = due and self.speculation.method != FORCED
            if guesses or self._forced(self.sampling.structured(batch.slots[batch.sampling_rows])):
                step.result.num_draft_tokens = self._propose(step, guesses=guesses)
        self._ended = self.clock()

    def _observe(self, step: RunningStep, seconds: float) -> DraftTimes:
        """Count the accepted drafts of the step and the time until its tokens were there."""
        batch, checked = step.batch, step.checked
        slots, num_tokens = batch.slots[batch.sampling_rows], int(batch.starts[-1])
        if checked is None or batch.num_drafts is None:
            none = np.zeros(len(slots), np.int64)
            return self.observe(slots, none, none, seconds, pure=num_tokens == len(slots))
        drafts, tree = batch.num_drafts, self.table.draft_tree
        return self.observe(
            slots,
            drafts,
            checked.lengths - 1,
            seconds,
            pure=len(slots) == len(batch.slots) and num_tokens == len(slots) + int(drafts.sum()),
            paths=None if tree is None else checked.paths(tree.drafts),
        )

    def _forced(self, structured: Mapping[int, TextMatcher]) -> dict[int, list[int]]:
        """Return the next tokens that grammars force, by row."""
        if self.speculation.trees:  # forced tokens form a chain, not a tree
            return {}
        return {row: run for row, matcher in structured.items() if (run := matcher.forced())}

    def _propose(self, step: RunningStep, *, guesses: bool) -> list[int]:
        """Return how many drafts each row of the step gets for its next one.

        Args:
            guesses: whether to propose drafts that no grammar forces, too.
        """
        batch, output, checked = step.batch, step.output, step.checked
        assert output is not None
        rows = batch.sampling_rows
        newest = np.arange(len(rows)) if checked is None else checked.newest
        if step.result.errors:
            going_on = np.array([row not in step.result.errors for row in rows.tolist()], np.bool_)
            rows, newest = rows[going_on], newest[going_on]

        def hidden(chosen: np.ndarray) -> Tensor:
            indices = upload(newest[chosen], output.hidden.device)
            # In a pipeline they are on the host, where the inputs of a later step are collected.
            of_logits = batch.tensors.logits_indices.to(output.hidden.device)
            places = of_logits.index_select(0, indices)
            return output.hidden.index_select(0, places)

        slots = batch.slots[rows]
        self.propose(slots, hidden, guesses=guesses)
        proposed = np.zeros(len(batch.slots), np.int64)
        proposed[rows] = self.num_drafts[slots]
        num_drafts: list[int] = proposed.tolist()
        return num_drafts

    def guesses(self, slots: np.ndarray, chains: Chains) -> Guesses | None:
        """Return the drafts of a step that were sampled; None if none was.

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
        judged_rows = np.concatenate(rows)
        return Guesses(judged_rows, chains.judged[judged_rows], torch.cat(probs))

    @property
    def idle(self) -> bool:
        """Whether no drafts were made or requested, the usual case if they do not pay off. The
        control then only counts the step."""
        return not (self._requested or self._waiting) and self.speculation.adaptive

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
        """Record a finished step, and drop the drafts of its requests.

        Args:
            slots, drafts, accepted: [rows], of the requests that sampled.
            seconds: duration of the step.
            pure: it computed nothing else.
            paths: [rows, drafts of the tree] bool, which ones were accepted; None: they are chains.
        """
        started = self.clock()
        making, requested = self._making, self._requested
        certain = self._certain[slots]
        guessed = ~certain if certain.any() else None
        self.control.observe(
            StepFigures(slots, drafts, accepted, seconds, making, requested, pure, paths, guessed)
        )
        self.num_drafts[slots] = 0
        self._certain[slots] = False
        self._waiting = bool(np.count_nonzero(self.num_drafts))
        if self._probs:
            for slot in slots.tolist():
                self._probs.pop(slot, None)
        self._making, self._requested = self.clock() - started, 0
        if not pure or not requested:
            return DraftTimes(making)
        if not np.count_nonzero(drafts):
            return DraftTimes(making, making + seconds, seconds)
        plain = self.control.plain_seconds(len(slots))
        if plain is None:
            return DraftTimes(making)
        right = sum(accepted.tolist()) / len(slots)
        return DraftTimes(making, making + seconds, plain * (1.0 + right))

    def propose(
        self, slots: np.ndarray, hidden: Callable[[np.ndarray], Tensor], *, guesses: bool = True
    ) -> None:
        """Propose drafts for requests that have sampled: what a grammar forces, else guesses.

        Args:
            slots: [rows], all that continue.
            hidden: indices into `slots` -> their rows for `DraftRows.hidden`.
            guesses: if false, propose only forced tokens.
        """
        started = self.clock()
        structured = self.sampling.structured(slots)
        forced = self._forced(structured)
        limits = self._limits(slots, forced, guesses=guesses)
        chosen = limits.nonzero()[0]
        if not len(chosen):
            self.control.decided(self._making + self.clock() - started)
            self._making = 0.0
            return
        for row in [row for row in forced if limits[row]]:
            self._certain[slots[row]] = True
            only = DraftRows(slots[[row]], limits[[row]], lambda: hidden(chosen[:0]))
            self._keep(only, Drafts.of([forced[row][: limits[row]]]))
        chosen = np.array([row for row in chosen.tolist() if row not in forced], np.int64)
        if len(chosen):
            rows = DraftRows(slots[chosen], limits[chosen], lambda: hidden(chosen))
            matchers = {
                i: structured[row] for i, row in enumerate(chosen.tolist()) if row in structured
            }
            try:
                self._keep(rows, _cut(self.drafter.propose(rows), matchers))
            except Exception:
                self._complain()
        self._requested = max(limits.tolist())
        self._waiting = bool(np.count_nonzero(self.num_drafts))
        self._making += self.clock() - started

    def _limits(
        self, slots: np.ndarray, forced: Mapping[int, Sequence[int]], *, guesses: bool
    ) -> np.ndarray:
        """Return the most drafts for each slot, by the limits of the request and of the step. The
        scheduler may leave requests with drafts for a later step, so those count as well.

        Args:
            forced: row -> tokens that will come in any case.
            guesses: whether the other rows may get drafts.
        """
        lengths = self.table.num_tokens[slots]
        limits = np.minimum(self._max_drafts[slots], self._last[slots] - lengths)
        if self.speculation.num_lookahead_tokens:
            # The newest token and all drafts but the last are written where the drafter computes.
            places = self.table.num_blocks[0][slots] * self.table.block_size
            limits = np.minimum(limits, places - lengths + 1)
        np.maximum(limits, 0, out=limits)
        certain = {row: min(int(limits[row]), len(run)) for row, run in forced.items()}
        if not guesses:
            limits = np.zeros_like(limits)
        elif self.speculation.adaptive:
            limits = self.control.limits(slots, limits)
        for row, count in certain.items():
            limits[row] = count
        free_rows = self.speculation.max_draft_rows
        if self._waiting:
            free_rows -= int(self.num_drafts.sum())
        return shared_out(limits, free_rows)

    def _keep(self, rows: DraftRows, drafts: Drafts) -> None:
        """Check drafts and store them for the next step.

        Raises:
            ValueError: they violate the protocol of drafters.
        """
        counts, tokens = drafts.counts, drafts.token_ids
        if len(counts) != len(rows.limits) or np.count_nonzero(counts > rows.limits):
            raise ValueError("more drafts than were asked for")
        if not len(tokens):
            return
        # Negative numbers are large as unsigned ones.
        if np.count_nonzero(tokens.view(np.uint64) >= self._vocab_size):
            raise ValueError(f"a draft is not a token in [0, {self._vocab_size - 1}]")
        if drafts.probs is not None and drafts.probs.shape != (len(tokens), self._vocab_size):
            raise ValueError("drafts come without their probabilities")
        tree = self.table.draft_tree
        if tree is not None and drafts.tree is not tree:
            raise ValueError("the tree of drafts changed")
        if drafts.tree is not None and counts.max() > drafts.tree.drafts:
            raise ValueError("more drafts than the tree has nodes for")
        if tree is None and drafts.tree is not None:
            self.table.draft_tree = drafts.tree
            self.control.follow(drafts.tree.parents)
        self.table.put_drafts(rows.slots, counts, tokens)
        self.num_drafts[rows.slots] = counts
        if drafts.probs is not None:
            split = drafts.probs.split(counts.tolist())
            for slot, certain, probs in zip(
                rows.slots.tolist(),
                self.sampling.must_match(rows.slots).tolist(),
                split,
                strict=True,
            ):
                if not certain and len(probs):
                    self._probs[slot] = probs

    def _forget(self, slot: int) -> None:
        self.num_drafts[slot] = 0
        self._certain[slot] = False
        self._probs.pop(slot, None)

    def _complain(self) -> None:
        """Log the exception being handled, if it is the first."""
        if not self._complained:
            log.warning("a drafter failed; its requests continue without drafts", exc_info=True)
        self._complained = True


def _cut(drafts: Drafts, structured: Mapping[int, TextMatcher]) -> Drafts:
    """Remove the drafts after the last one that a grammar allows.

    Args:
        structured: by row.
    """
    if not structured:
        return drafts
    rows, tree = drafts.by_row(), drafts.tree
    counts = drafts.counts.copy()
    for row, matcher in structured.items():
        valid = matcher.valid
        counts[row] = valid(rows[row]) if tree is None else tree.last_valid(rows[row], valid)
    is_valid = np.concatenate(
        [np.arange(len(run)) < n for run, n in zip(rows, counts, strict=True)]
    )
    probs = None if drafts.probs is None else drafts.probs[torch.from_numpy(is_valid)]
    return Drafts(counts, drafts.token_ids[is_valid], tree, probs)


def shared_out(limits: np.ndarray, total: int) -> np.ndarray:
    """Distribute a number as evenly as the limits allow; the first rows get the remainder.

    Args:
        limits: [rows].
    """
    if sum(limits.tolist()) <= total:
        return limits
    shares = np.zeros_like(limits)
    while total > 0:
        open_ = np.flatnonzero(shares < limits)
        share = total // len(open_)
        if share == 0:
            shares[open_[:total]] += 1
            break
        more = np.minimum(limits[open_] - shares[open_], share)
        shares[open_] += more
        total -= int(more.sum())
    return shares

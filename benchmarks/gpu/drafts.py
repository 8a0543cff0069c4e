"""Time decoding steps that verify drafts, captured and not. All drafts are made up and most are
wrong, so that the step is timed, independent of a drafter's quality."""

from __future__ import annotations

import time
from functools import partial

from engine import Engine, Skipped, answers
from models import BEFORE, BUDGET, WARM_UP, Measured
from notes import Notes
from place import DEVICE, sized

from kvik.worker.captures import MAX_PADDING
from kvik.worker.drafters import registry
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.replays import DecodeGraphs

DRAFTS = sized(5, 2)  # drafts of each request in each step
CELLS = sized(((1, 1024), (8, 1024), (64, 1024)), ((1, 5), (2, 5)))  # batch, context
SEQS, LONGEST = sized((64, 8192), (2, 96))


class MadeUp(Drafter):
    """Stands in for a lookup drafter: proposes as many drafts as are asked for."""

    def propose(self, rows: DraftRows) -> Drafts:
        return Drafts.of([[5] * limit for limit in rows.limits.tolist()])


class Judging(Measured):
    """A measurement that waits for a captured graph with room for the drafts of all requests."""

    def fill(self, batch: int, context: int, tokens: int) -> list[str]:
        ends = time.monotonic() + WARM_UP
        while not self._captured(batch) and self.engine.loop.idle_step():
            if time.monotonic() > ends:
                break
        return super().fill(batch, context, tokens)

    def warm_up(self, batch: int, *, wait: bool) -> bool:
        for _ in range(BEFORE):
            self.engine.step()
        return wait and self._captured(batch)

    def _captured(self, batch: int) -> bool:
        """Return whether a step is a replay: a much larger size serves it, but is not used."""
        graph, tokens = self.real, batch * (1 + DRAFTS)
        return isinstance(graph, DecodeGraphs) and any(
            size.serves(batch, tokens, 1 + DRAFTS, tokens, tree=False)
            and size.tokens <= MAX_PADDING * tokens
            for size in graph.captured
        )


def measure(notes: Notes, shape: str) -> None:
    registry.DRAFTERS["ngram"] = lambda parts: MadeUp()
    started = time.monotonic()
    engine = Engine.random(
        shape,
        max_model_len=LONGEST,
        max_num_seqs=SEQS,
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False,
        spec_method="ngram",
        spec_tokens=DRAFTS,
        speculative_config={"adaptive": False},
        **sized({}, {"kv_cache_memory": 4 << 20}),
    )
    answers(engine, [[1, 2, 3]], 2)
    format = f"bf16, {DRAFTS} drafts"
    notes.fact("ready", time.monotonic() - started, shape=shape, format=format)
    model = Judging(notes, engine, shape, format)
    spec, rows = engine.resolved.model, SEQS * (1 + DRAFTS)
    model.skipped = Skipped(rows, spec.hidden_size, spec.vocab_size, DEVICE)
    for batch, context in CELLS:
        for eager in (False, True):
            name = f"judge {batch} x {context}{', no graphs' * eager}"
            notes.attempt(name, partial(model.decode, batch, context, eager=eager), 3)

"""Drafters for tests: right, wrong, right with a known probability, and broken ones."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from helpers.optional_native import needs_native

from kvik import LLM, SamplingParams
from kvik.config.draft_heads import HeadsSpec
from kvik.errors import KvikError
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.drafters.registry import DRAFTERS, DrafterParts
from kvik.worker.graphs import StepOutput
from kvik.worker.input_batch import InputBatch

METHOD, TREE_METHOD = "ngram", "medusa"  # whose drafters `install` replaces
GOLDEN = 0.6180339887498949


def with_newest(counts: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
    """Return the token before each row of logits: of each request, its newest token and then its
    drafts."""
    found = iter(drafts)
    return np.array([token for n in counts for token in (1000, *itertools.islice(found, n))])


class _Known(Drafter):
    """Knows texts: prompts with their outputs."""

    def __init__(self, parts: DrafterParts, texts: Sequence[Sequence[int]]) -> None:
        self.table = parts.table
        self.vocab_size = parts.vocab_size
        self.texts = [list(text) for text in texts]

    def rest(self, slot: int) -> list[int]:
        """Return how the text of a slot continues."""
        known = self.table.token_ids[slot, : self.table.num_tokens[slot]].tolist()
        text = next((t for t in self.texts if t[: len(known)] == known), known)
        return text[len(known) :]


class Scripted(_Known):
    """Drafts the continuations of known texts, with a chosen number of right tokens.

    Args:
        right: maps the number of drafts to how many of them are right.
    """

    def __init__(
        self, parts: DrafterParts, texts: Sequence[Sequence[int]], right: Callable[[int], int]
    ) -> None:
        super().__init__(parts, texts)
        self.right = right
        self.slots: set[int] = set()

    def enter(self, slot: int) -> None:
        assert slot not in self.slots, "entered twice"
        self.slots.add(slot)

    def leave(self, slot: int) -> None:
        self.slots.remove(slot)

    def propose(self, rows: DraftRows) -> Drafts:
        assert rows.hidden().shape[0] == len(rows.slots)
        assert self.slots.issuperset(rows.slots.tolist())
        found = []
        for slot, limit in zip(rows.slots.tolist(), rows.limits.tolist(), strict=True):
            truth = self.rest(slot)[:limit]
            right = self.right(len(truth))
            lies = [(token + 1) % self.vocab_size for token in truth[right:]]
            found.append(truth[:right] + lies)
        return Drafts.of(found)


class ScriptedTree(_Known):
    """Drafts the continuations of known texts along a different path of the tree each time; other
    nodes are wrong."""

    TREE = DraftTree((-1, 0, 0, 0, 1, 2, 2, 4, 5, 6, 9), (0, 0, 1, 2, 0, 0, 1, 0, 0, 0, 0))
    calls = 0

    def propose(self, rows: DraftRows) -> Drafts:
        pairs = zip(rows.slots.tolist(), rows.limits.tolist(), strict=True)
        return Drafts.of(
            [self._drafts(self.rest(slot))[:limit] for slot, limit in pairs], self.TREE
        )

    def _drafts(self, truth: list[int]) -> list[int]:
        self.calls += 1
        path = self.TREE.path(self.calls % (self.TREE.drafts + 1))
        drafts = []
        for node in range(1, self.TREE.drafts + 1):
            depth = int(self.TREE.depths[node])
            right = truth[depth - 1] if depth <= len(truth) else 0
            lie = (right + 1 + self.TREE.ranks[node]) % self.vocab_size
            drafts.append(right if node in path else lie)
        return drafts


class Garbage(Drafter):
    """Drafts random tokens, and every few steps tokens that no drafter may propose."""

    def __init__(self, parts: DrafterParts) -> None:
        self.vocab_size = parts.vocab_size
        self.rng = np.random.default_rng(0)
        self.calls = 0

    def propose(self, rows: DraftRows) -> Drafts:
        self.calls += 1
        counts = [int(self.rng.integers(0, limit + 1)) for limit in rows.limits]
        drafts = [self.rng.integers(0, self.vocab_size, count).tolist() for count in counts]
        broken = {
            3: [*drafts[:-1], [self.vocab_size]],
            7: [*drafts[:-1], [0] * (rows.limits[-1] + 1)],
            11: drafts[:-1],
            13: [*drafts[:-1], [-1]],
        }
        return Drafts.of(broken.get(self.calls % 17, drafts))


class Broken(Drafter):
    """Raises at every `every`-th call."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.calls = 0

    def enter(self, slot: int) -> None:
        self._count()

    def leave(self, slot: int) -> None:
        self._count()

    def propose(self, rows: DraftRows) -> Drafts:
        self._count()
        return Drafts.of([[5] * limit for limit in rows.limits])

    def _count(self) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            raise RuntimeError("the drafter broke")


def with_probability(chance: float) -> Callable[[int], int]:
    """Return `right` for `Scripted`: each draft is right with this probability if all before it
    are. The deciding numbers are evenly spread, so that short runs have nearly this acceptance."""
    calls = 0

    def right(most: int) -> int:
        nonlocal calls
        calls += 1
        point = (calls * GOLDEN) % 1.0
        count = 0
        while count < most and point < chance ** (count + 1):
            count += 1
        return count

    return right


def always_right(most: int) -> int:
    return most


def always_wrong(most: int) -> int:
    return 0


class Noting(Drafter):
    """Notes the drafts of another drafter after each text."""

    def __init__(
        self, inner: Drafter, parts: DrafterParts, noted: dict[tuple[int, ...], list[int]]
    ) -> None:
        self.inner = inner
        self.table = parts.table
        self.noted = noted

    def read_step(self, batch: InputBatch, output: StepOutput) -> None:
        self.inner.read_step(batch, output)

    def propose(self, rows: DraftRows) -> Drafts:
        drafts = self.inner.propose(rows)
        for slot, found in zip(rows.slots.tolist(), drafts.by_row(), strict=True):
            text = self.table.token_ids[slot, : self.table.num_tokens[slot]].tolist()
            self.noted[tuple(text)] = found
        return drafts


def note_drafts(patch: pytest.MonkeyPatch, method: str) -> dict[tuple[int, ...], list[int]]:
    """Return what new engines draft after each text."""
    noted: dict[tuple[int, ...], list[int]] = {}
    make = DRAFTERS[method]
    patch.setitem(DRAFTERS, method, lambda parts: Noting(make(parts), parts, noted))  # type: ignore[index]
    return noted


def install(monkeypatch: pytest.MonkeyPatch, make: Callable[[DrafterParts], Drafter]) -> None:
    """Make new engines with METHOD or TREE_METHOD use this drafter."""
    no_heads = HeadsSpec(TREE_METHOD, 1, 1, 1)
    monkeypatch.setattr("kvik.launch.heads_for", lambda *_: no_heads)
    for method in (METHOD, TREE_METHOD):
        monkeypatch.setitem(DRAFTERS, method, make)


# Heads that read the hidden states of all tokens.


class DefinedHead(Protocol):
    def drafts(self, text: tuple[int, ...], count: int) -> list[int]:
        """Return the drafts after a text, by the definition of the head."""
        ...


@cache
def defined_drafts(head: DefinedHead, text: tuple[int, ...], count: int) -> list[int]:
    """Return `head.drafts`, which is slow, and the same for many engines."""
    return head.drafts(text, count)


def head_options(root: Path, method: str, **more: Any) -> dict[str, Any]:
    """Return options of an engine that drafts with the head of a folder, which has its model."""
    drafting = {"method": method, "model": str(root / "head"), "num_speculative_tokens": 3}
    return {
        "model": str(root / "model"),
        "device": "cpu",
        "threads": 1,
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 8,
        "speculative_config": {**drafting, "adaptive": False},
        **more,
    }


def check_refused_heads(
    root: Path, folder: Path, method: str, *changes: Mapping[str, object]
) -> None:
    """Check that an engine refuses the head of `root` after each change of its config.json.

    Args:
        folder: for the changed heads.
    """
    stored = json.loads((root / "head" / "config.json").read_text())
    shutil.copytree(root / "head", folder / "head")
    drafting = {"method": method, "model": str(folder / "head")}
    for change in changes:
        (folder / "head" / "config.json").write_text(json.dumps(stored | change))
        with pytest.raises(KvikError, match="^spec_model: "):
            LLM(**head_options(root, method, speculative_config=drafting))


PROCESSES = {"threads": 4}  # that several processes share
HEAD_WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "torch": {"kernels": "torch"},
    "chunks": {"max_num_batched_tokens": 17, "block_size": 8},
    "preemption": {"num_blocks": 12},
    "swap": {"num_blocks": 12, "kv_tiers": "memory:64MiB"},
    "two processes": {**PROCESSES, "tensor_parallel_size": 2},
    "three processes": {**PROCESSES, "tensor_parallel_size": 3},
    "two stages": {**PROCESSES, "pipeline_parallel_size": 2},
    "three stages": {**PROCESSES, "pipeline_parallel_size": 3},
    "two stages of two processes": {
        **PROCESSES,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
    },
    "two processes, swap": {
        **PROCESSES,
        "tensor_parallel_size": 2,
        "num_blocks": 12,
        "kv_tiers": "memory:64MiB",
    },
    "two stages, swap": {
        **PROCESSES,
        "pipeline_parallel_size": 2,
        "num_blocks": 12,
        "kv_tiers": "memory:64MiB",
    },
    "two processes, torch": {**PROCESSES, "tensor_parallel_size": 2, "kernels": "torch"},
    "two stages of two processes, fast cut": {
        **PROCESSES,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "kernels": "torch",
        "tensor_parallel_cut": "fast",
    },
}


FAST_WAYS = ("two processes", "two stages")
# Combined from ways that remain; the heads of `mtp` run in these too.
KNOWN_OF_OTHERS = ("swap", "torch", "two stages of two processes")


def head_ways(*leave_out: str) -> list[object]:
    """Return the ways as parameters of tests in a module that uses the fixture `forked`."""
    ways = []
    for way, options in HEAD_WAYS.items():
        several = PROCESSES.items() <= options.items()
        marks = [] if way in FAST_WAYS else [pytest.mark.full]
        if way not in leave_out:
            ways.append(pytest.param(way, marks=[*marks, *([needs_native] if several else [])]))
    return ways


def head_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 96) for _ in range(n)] for n in (1, 2, 8, 16, 31, 40)]


def check_drafts_of_head(
    head: DefinedHead,
    noted: Mapping[tuple[int, ...], list[int]],
    options: Mapping[str, Any],
    way: str,
) -> None:
    """Check that an engine makes the drafts of the definition, some of them right.

    Args:
        noted: by `note_drafts`.
        way: of `HEAD_WAYS`, which the options have.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    with LLM(**options) as llm:
        llm.generate(head_prompts()[-1:], greedy)  # alone: its first chunks get no token
        first = llm.generate(head_prompts(), greedy)
        longer = [out.prompt_token_ids + out.outputs[0].token_ids + [5, 6] for out in first]
        again = llm.generate([*longer, *head_prompts()], greedy)  # with prefixes in the cache
        scarce, tiers = "num_blocks" in HEAD_WAYS[way], "kv_tiers" in HEAD_WAYS[way]
        assert scarce or any(out.num_cached_tokens for out in again)
        assert tiers or not scarce or llm.stats().preemptions
        assert not tiers or llm.stats().moves.totals.loaded_tokens
        drafts = llm.stats().speculation.drafts
        assert 0 < drafts.accepted < drafts.drafts
    assert sum(map(len, noted.values())) > 50
    for text, found in noted.items():
        assert found == defined_drafts(head, text, len(found))


def check_drafts_of_forks(
    head: DefinedHead, noted: Mapping[tuple[int, ...], list[int]], options: Mapping[str, Any]
) -> None:
    """Like `check_drafts_of_head` for siblings, which all run together."""
    siblings = SamplingParams(temperature=0.0, n=3, max_tokens=9, ignore_eos=True)
    with LLM(**options) as llm:
        llm.generate(head_prompts(), siblings)
    assert noted
    for text, found in noted.items():
        assert found == defined_drafts(head, text, len(found))

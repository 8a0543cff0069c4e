"""Texts with key-value pairs hidden in filler and a question for one of them at the end, and the
small model that answers (`tests/data/recall`, trained by `tools/train_recall.py`).

The model cannot answer what its cache has dropped: `recall(llm, ...)` is the share of right answers
to questions at the end of a prompt, and `recall_behind(...)` to questions after it, where layers
with budgets have dropped tokens. Tokens are ids; there is no tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvik import LLM
    from kvik.core.scheduler import Scheduler
    from kvik.worker.worker import Worker

MODEL = Path(__file__).parents[1] / "data" / "recall"
BEGIN, ASK = 0, 1
FILLER, KEYS, VALUES = range(2, 64), range(64, 96), range(96, 128)
VOCAB, CONTEXT = 128, 1024
QUESTION = 2  # tokens at the end of a text: ASK and a key


@dataclass(frozen=True, slots=True)
class Question:
    """A text that ends with a question.

    Attributes:
        token_ids: begin with BEGIN and end with ASK and a key.
        answer: the token that should come next.
        distance: tokens from the requested value to the end of the text, both included.
    """

    token_ids: tuple[int, ...]
    answer: int
    distance: int


def hide(dice: random.Random, length: int, pairs: int, distance: range | None = None) -> Question:
    """Return a text of `length` tokens with `pairs` pairs and a question for one of them.

    Args:
        distance: allowed distances of the requested value, see `Question`; None: all.
    """
    free = range(1, length - QUESTION - 1)  # places of keys, each with its value after it
    wanted = free if distance is None else range(length - distance[-1] - 1, length - distance[0])
    wanted = range(max(wanted.start, free.start), min(wanted.stop, free.stop))
    places = [dice.choice(wanted)]
    while len(places) < pairs:
        place = dice.choice(free)
        if all(abs(place - other) > 1 for other in places):
            places.append(place)
    text = [BEGIN, *dice.choices(FILLER, k=length - 1)]
    keys, values = dice.sample(KEYS, pairs), dice.choices(VALUES, k=pairs)
    for place, key, value in zip(places, keys, values, strict=True):
        text[place : place + 2] = key, value
    text[-QUESTION:] = ASK, keys[0]
    return Question(tuple(text), values[0], length - 1 - places[0])


def questions(
    count: int, length: int, pairs: int = 16, distance: range | None = None, seed: int = 0
) -> list[Question]:
    """Return texts, the same in each run. See `hide` for the arguments."""
    dice = random.Random(f"{seed} {length} {pairs} {distance}")
    return [hide(dice, length, pairs, distance) for _ in range(count)]


def recall(llm: LLM, asked: Sequence[Question]) -> float:
    """Return the share of questions that a model answers with its most likely token."""
    from kvik import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    outputs = llm.generate([list(one.token_ids) for one in asked], params)
    right = [
        output.outputs[0].token_ids == [one.answer]
        for one, output in zip(asked, outputs, strict=True)
    ]
    return sum(right) / len(right)


def rows_behind(
    scheduler: Scheduler, worker: Worker, name: str, ids: Sequence[int], prompt: int
) -> Iterator[tuple[int, Tensor]]:
    """Compute a text like that of a preempted request; the scheduler decides which tokens to drop.

    For each step with tokens from the prompt's last one on, yield the place of the first of these
    and their hidden states, [tokens, hidden].
    """
    from kvik.core.plan import ModelRunnerOutput
    from kvik.core.sampling_params import SamplingParams
    from kvik.core.types import FinishReason, Request

    params = SamplingParams(temperature=0.0, ignore_eos=True)
    request = Request(name, 0, params, list(ids), prompt, len(ids) + 1, frozenset(), 0, 0.0)
    scheduler.add(request, 0.0)
    end = 0
    while end < len(ids):
        plan = scheduler.schedule(0.0)
        hidden, count = worker.read(plan), plan.num_scheduled_tokens[0]
        end = request.num_computed_tokens
        first = max(end - count, prompt - 1)
        if first < end:
            yield first, hidden[first - (end - count) :]
        scheduler.update(ModelRunnerOutput(plan.step, [[0] if plan.samples[0] else []]), 0.0)
    scheduler.end(request, FinishReason.ABORT, 0.0)
    scheduler.take_finished()


def recall_behind(
    scheduler: Scheduler, worker: Worker, asked: Sequence[Question], *, twice: bool
) -> float:
    """Return the share of right answers to questions after the prompt.

    Args:
        twice: the prompt also ends with the question, so that the choice of kept tokens sees it.
    """
    right = 0
    for number, one in enumerate(asked):
        text, question = list(one.token_ids), list(one.token_ids[-QUESTION:])
        prompt = len(text) if twice else len(text) - QUESTION
        ids = [*text, one.answer, *question] if twice else text
        *_, (_, rows) = rows_behind(scheduler, worker, str(number), ids, prompt)
        right += int(worker.logits(rows[-1:]).argmax()) == one.answer
    return right / len(asked)

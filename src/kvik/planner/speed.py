"""How fast a setting is at most, and what its tokens cost: everything that needs rooflines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvik.planner.cost import Cost, cost
from kvik.planner.families import read_shape
from kvik.planner.memory import Memory
from kvik.planner.question import Question, load_of, request_of
from kvik.planner.roofline import (
    compute_bound_batch,
    decode,
    decode_rate,
    prefill,
    prefill_rate,
    step_time,
)
from kvik.planner.setting import Setting
from kvik.planner.shape import ModelShape
from kvik.planner.speculation import SpeculationCurve, speculation_curve, verify_cost

SHORTEST_PROMPT, PROMPT_STEP = 128, 4  # rows of the prefill table: 128, 512, 2048, ...
WIDEST_BATCH = 1024  # of the decode table, unless more is asked for


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One prompt. `floor`, `expected`: seconds; the same where nothing was measured."""

    tokens: int
    floor: float
    expected: float
    bound: str


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Attributes:
    ceiling, expected: tokens/s of all requests together.
    floor: seconds of a step, and so between two tokens of a request.
    """

    batch: int
    ceiling: float
    expected: float
    floor: float
    bound: str
    fits: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """What needs the speed of the device.

    Attributes:
        compute_bound_batch: where decode at this context has more to compute than to read; None:
            nowhere.
        cost: None: there is no price, or not one request fits.
    """

    prefill: tuple[PrefillRow, ...]
    decode: tuple[DecodeRow, ...]
    compute_bound_batch: int | None
    cost: Cost | None
    speculation: tuple[SpeculationCurve, ...]


def speed_of(shape: ModelShape, at: Setting, question: Question, memory: Memory) -> Speed:
    """Rooflines, costs and the gain of speculation.

    Raises:
        ConfigError: `tp` devices cannot share this model's layers, or have no link.
        ModelError: the draft is not found or cannot be read.
    """
    batches = {1, at.batch} if at.batch > 1 else {1}
    return Speed(
        prefill=tuple(_prefill(shape, at, tokens) for tokens in _prompts(at.context)),
        decode=tuple(_decode(shape, at, batch, memory) for batch in _batches(at, memory)),
        compute_bound_batch=compute_bound_batch(shape, at),
        cost=_cost(shape, at, question, memory),
        speculation=tuple(_speculation(shape, at, question, batch) for batch in sorted(batches)),
    )


def _prompts(context: int) -> list[int]:
    lengths, length = [], SHORTEST_PROMPT
    while length < context:
        lengths.append(length)
        length *= PROMPT_STEP
    return [*lengths, context]


def _batches(at: Setting, memory: Memory) -> list[int]:
    """Powers of two as far as they fit, what is asked for, and the largest that fits."""
    most = max(at.batch, min(memory.largest_batch, WIDEST_BATCH))
    batches = {at.batch, most} | {1 << power for power in range(most.bit_length())}
    return sorted(batch for batch in batches if batch <= most)


def _prefill(shape: ModelShape, at: Setting, tokens: int) -> PrefillRow:
    time = step_time(shape, at, prefill(tokens))
    return PrefillRow(tokens, time.floor, time.expected, time.bound)


def _decode(shape: ModelShape, at: Setting, batch: int, memory: Memory) -> DecodeRow:
    at = replace(at, batch=batch)
    time = step_time(shape, at, decode(at.group, at.context))
    fits = batch <= memory.largest_batch
    ceiling, expected = batch / time.floor, batch / time.expected
    return DecodeRow(batch, ceiling, expected, time.floor, time.bound, fits)


def _cost(shape: ModelShape, at: Setting, question: Question, memory: Memory) -> Cost | None:
    """At the rates of the asked batch, or of the largest that fits if that is smaller, its prompts
    together in a step and its outputs half done."""
    prompt, output = request_of(question, at.context)
    price = at.device.price if question.price is None else question.price
    batch = min(at.batch, memory.largest_batch)
    if price is None or batch == 0:
        return None
    halfway = replace(at, batch=batch, context=prompt + (output + 1) // 2)
    _, decoded = decode_rate(shape, halfway)
    _, prefilled = prefill_rate(shape, halfway, prompt)
    return cost(price, at.tp * at.pp, prefilled, decoded, load_of(question, at.context))


def _speculation(
    shape: ModelShape, at: Setting, question: Question, batch: int
) -> SpeculationCurve:
    at = replace(at, batch=batch)
    cost = _draft_cost(shape, at, question)
    return speculation_curve(batch, cost, lambda drafts: verify_cost(shape, at, drafts))


def _draft_cost(shape: ModelShape, at: Setting, question: Question) -> float:
    """As asked, or by the rooflines of both models, the draft alone on one device."""
    if question.draft_cost is not None or question.draft is None:
        return question.draft_cost or 0.0
    draft = read_shape(question.draft)
    target = step_time(shape, at, decode(at.group, at.context))
    step = decode(at.group, min(at.context, draft.max_context))
    return step_time(draft, replace(at, tp=1, pp=1), step).expected / target.expected

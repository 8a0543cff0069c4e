"""What `kvik plan` is asked, and which questions make no sense."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.errors import ConfigError
from kvik.planner.cost import Load, parse_load
from kvik.planner.memory import MOST_REQUESTS
from kvik.planner.parallel import check_parallel
from kvik.planner.setting import UTILIZATION
from kvik.planner.shape import ModelShape

USUAL_CONTEXT = 8192  # of a question that names none
OUTPUT_SHARE = 4  # of a request's context, one part in so many is generated
MOST_DOLLARS, MOST_DRAFT_COST = 1e6, 1e3


@dataclass(frozen=True, slots=True)
class Question:
    """Attributes:
    model: a folder, a hub id, the path of a config.json, or "": the bundled model.
    hardware: a known device, "this", or the path of a file that describes one.
    context: tokens of a request, prompt and output; None: the model's, up to `USUAL_CONTEXT`.
    batch: requests that run together.
    weight_format: None: the checkpoint's; on this machine what the engine would decide.
    kv_format: None: the dtype that is computed in.
    tp, pp: devices that share each layer; stages of whole layers.
    price: US dollars per hour and device; None: the device's own, if it has one.
    load: "50M" tokens a day, or "5/s" requests; None: no daily cost.
    output: tokens that are generated of a request's context; None: a quarter.
    draft: a model that drafts for speculative decoding.
    draft_cost: time of its step over one of the target; None: of `draft`, else 0.
    utilization: share of the device's memory the engine may plan with.
    """

    model: str = ""
    hardware: str = "this"
    context: int | None = None
    batch: int = 1
    weight_format: str | None = None
    kv_format: str | None = None
    tp: int = 1
    pp: int = 1
    price: float | None = None
    load: str | None = None
    output: int | None = None
    draft: str | None = None
    draft_cost: float | None = None
    utilization: float = UTILIZATION


def check_question(question: Question, shape: ModelShape) -> None:
    """Raise ConfigError for the first field that makes no sense for this model."""
    _integer("context", question.context, 1)
    most = shape.max_context
    if question.context is not None and question.context > most:
        raise ConfigError(
            "context", f"must be at most the model's {most} tokens, not {question.context}"
        )
    _integer("batch", question.batch, 1, MOST_REQUESTS)
    check_parallel(shape, question.tp, question.pp)
    _number("memory_utilization", question.utilization, 0.01, 1.0)
    _number("price", question.price, 0.0, MOST_DOLLARS)
    _number("draft_cost", question.draft_cost, 0.0, MOST_DRAFT_COST)
    context = context_of(question, shape)
    if question.output is not None and not 1 <= question.output < context:
        raise ConfigError(
            "output_tokens",
            f"must be in [1, {context - 1}], as prompt and output share the "
            f"context of {context}, not {question.output}",
        )
    load_of(question, context)


def context_of(question: Question, shape: ModelShape) -> int:
    """Tokens of a request."""
    return question.context or min(shape.max_context, USUAL_CONTEXT)


def request_of(question: Question, context: int) -> tuple[int, int]:
    """Tokens of a request's prompt and of its output; of a context of 1 the one is the prompt."""
    output = question.output or context // OUTPUT_SHARE
    return context - output, output


def load_of(question: Question, context: int) -> Load | None:
    """Raises ConfigError for a load that is none."""
    if question.load is None:
        return None
    return parse_load(question.load, *request_of(question, context))


def _integer(name: str, value: int | None, low: int, high: int | None = None) -> None:
    if value is None or (low <= value and (high is None or value <= high)):
        return
    allowed = f"in [{low}, {high}]" if high else f"of at least {low}"
    raise ConfigError(name, f"must be an integer {allowed}, not {value}")


def _number(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN is not either
        raise ConfigError(name, f"must be a number in [{low:g}, {high:g}], not {value:g}")

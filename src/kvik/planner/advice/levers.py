"""What can be changed about how a model is served: each lever's positions, and the flags for them.

A lever knows nothing of its effect. That is predicted, by whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvik.config.config import EngineConfig
from kvik.config.kv_spec import KV_FORMATS
from kvik.config.options import options_of
from kvik.planner.formats import WEIGHT_FORMATS, kv_facts, weight_facts, weight_format
from kvik.planner.memory import working_dtype
from kvik.planner.parallel import can_share
from kvik.planner.roofline import decode, step_time
from kvik.planner.serving import Drafting, Serving, Traffic, budgets, set_up
from kvik.planner.setting import Setting
from kvik.planner.shape import ModelShape

# The engine's options that move a lever; whether there are such options is looked up.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "precision": ("dtype",),
    "KV format": ("kv_cache_dtype",),
    "batching": ("max_num_seqs", "max_num_batched_tokens"),
    "prefix cache": ("enable_prefix_caching",),
    "quantisation": ("quantization",),
    "speculation": ("spec_method", "spec_model", "spec_tokens", "speculative_config"),
    "parallelism": ("tensor_parallel_size",),
}
DRAFTS = (1, 2, 3, 4, 5, 6, 8)
MOST_SEQS = 1024  # requests at a time
MOST_DEVICES = 32  # that share layers


@dataclass(frozen=True, slots=True)
class Position:
    """A lever in one position. `name`: in words, as after "with"."""

    name: str
    serving: Serving


def available(topic: str) -> bool:
    """Whether this engine has the options of a lever."""
    known = {option.name for option in options_of(EngineConfig)}
    return known.issuperset(OPTIONS.get(topic, ()))


def flag(option: str, value: object) -> str:
    """On the command line."""
    return f"--{option.replace('_', '-')} {value}"


def flags(serving: Serving, usual: Serving) -> tuple[str, ...]:
    """Everything that leads from the usual setting to this one, as far as this engine has it."""
    at, was = serving.at, usual.at
    made, other = weight_facts(at.weight_format), at.weight_format != was.weight_format
    drafting = serving.drafting
    model = drafting.model if drafting else ""
    pairs: list[tuple[str, str, object, bool]] = [
        ("precision", "dtype", made.dtype, bool(made.dtype) and other),
        ("quantisation", "quantization", made.quantization, bool(made.quantization) and other),
        ("KV format", "kv_cache_dtype", at.kv_format, at.kv_format != _kv_of(serving.shape, at)),
        ("batching", "max_num_seqs", serving.seqs, serving.seqs != usual.seqs),
        (
            "batching",
            "max_num_batched_tokens",
            serving.budget,
            serving.budget != serving.usual_budget,
        ),
        ("speculation", "spec_method", "draft_model" if model else "ngram", drafting is not None),
        ("speculation", "spec_model", model, bool(model)),
        ("speculation", "spec_tokens", drafting.drafts if drafting else 0, drafting is not None),
        ("parallelism", "tensor_parallel_size", at.tp, at.tp > 1),
    ]  # fmt: skip
    return tuple(
        flag(option, value)
        for topic, option, value, changed in pairs
        if changed and available(topic)
    )


def precisions(serving: Serving, traffic: Traffic) -> Iterator[Position]:
    """Dtypes of fewer bits than the weights have now."""
    now = weight_facts(serving.at.weight_format)
    for facts in WEIGHT_FORMATS.values():
        if now.dtype and facts.dtype and facts.bits < now.bits:
            yield Position(facts.name, with_weights(serving, traffic, facts.name))


def kv_formats(serving: Serving, traffic: Traffic) -> Iterator[Position]:
    """Smaller formats of the cache."""
    shape, at = serving.shape, serving.at
    now = shape.kv_bytes_per_token(at.kv_format)
    for name in KV_FORMATS:
        if kv_facts(name).bits <= 8 and shape.kv_bytes_per_token(name) < now:
            smaller = replace(at, kv_format=name)
            yield Position(name, _renewed(serving, traffic, smaller))


def drafting_flags(drafting: Drafting) -> tuple[str, ...]:
    """That turn speculation on; how many drafts it makes is left to the engine, which measures."""
    if not drafting.model:
        return (flag("spec_method", "ngram"),)
    return flag("spec_method", "draft_model"), flag("spec_model", drafting.model)


def least(good: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 to `most` that is good, if larger ones are, too; None: none is."""
    if not good(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def quantisations(serving: Serving, traffic: Traffic) -> Iterator[Position]:
    """Smaller formats that this engine makes from a checkpoint."""
    for name in made_formats(serving):
        yield Position(name, with_weights(serving, traffic, name))


def widened(serving: Serving) -> Serving:
    """With as many requests at a time as have room."""
    return replace(serving, seqs=max(serving.seqs, min(serving.room, MOST_SEQS)))


def batchings(serving: Serving) -> Iterator[Position]:
    """Smaller token budgets of a step."""
    for budget in budgets(serving)[1:]:
        yield Position(f"{budget} tokens a step", replace(serving, budget=budget))


def speculations(
    serving: Serving,
    acceptance: float,
    draft: ModelShape | None,
    batch: int,
) -> Iterator[Position]:
    """So many drafts a step, by a draft model or, without one, by looking them up for nothing."""
    seconds, model = 0.0, ""
    if draft is not None:
        model = draft.name
        at = serving.at
        context = min(at.context, draft.max_context)
        step = decode(batch, context)
        seconds = step_time(draft, replace(at, tp=1, pp=1), step).expected
    for drafts in DRAFTS:
        drafting = Drafting(drafts, acceptance, drafts * seconds, model)
        name = "1 draft a step" if drafts == 1 else f"{drafts} drafts a step"
        yield Position(name, replace(serving, drafting=drafting))


def made_formats(serving: Serving) -> tuple[str, ...]:
    """Smaller formats that this engine makes, the largest first."""
    size = {f.name: serving.shape.weight_bytes(f.name) for f in WEIGHT_FORMATS.values()}
    made = [f.name for f in WEIGHT_FORMATS.values() if f.quantization]
    smaller = [name for name in made if size[name] < size[serving.at.weight_format]]
    return tuple(sorted(smaller, key=size.__getitem__, reverse=True))


def device_counts(serving: Serving) -> Iterator[int]:
    """How many devices the model could be shared by."""
    count = 1
    while count <= MOST_DEVICES and can_share(serving.shape, count):
        if count == 1 or serving.at.device.link:
            yield count
        count *= 2


def parallelisms(serving: Serving, traffic: Traffic) -> Iterator[Position]:
    """More devices that share each layer."""
    for count in device_counts(serving):
        if count > serving.at.tp:
            more = replace(serving.at, tp=count)
            yield Position(f"{count} devices", _renewed(serving, traffic, more))


def with_weights(serving: Serving, traffic: Traffic, name: str) -> Serving:
    """In another format; the KV cache follows what is then computed in, unless it was smaller."""
    shape, at = serving.shape, serving.at
    changed = replace(at, weight_format=name)
    if at.kv_format == _kv_of(shape, at):
        changed = replace(changed, kv_format=_kv_of(shape, changed))
    return _renewed(serving, traffic, changed)


def _kv_of(shape: ModelShape, at: Setting) -> str:
    """The KV format that goes without saying."""
    return weight_format(working_dtype(shape, at.weight_format))


def _renewed(serving: Serving, traffic: Traffic, at: Setting) -> Serving:
    """With the memory counted again."""
    budget = None if serving.budget == serving.usual_budget else serving.budget
    made = set_up(serving.shape, at, traffic, serving.seqs, budget)
    return replace(made, drafting=serving.drafting, known=serving.known)

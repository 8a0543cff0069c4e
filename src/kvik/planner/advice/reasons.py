"""The predicted figures of a setting, and sentences with them on why a lever helps or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvik.config.speculative import DraftSource
from kvik.config.units import seconds, show_bytes, three
from kvik.errors import ConfigError
from kvik.options import FORMERLY, Integer, Number, Text, normalised, option
from kvik.planner.formats import arithmetic, weight_facts
from kvik.planner.memory import MemoryPlanner
from kvik.planner.roofline import StepTime, decode, step_time, verify
from kvik.planner.serving import (
    Prediction,
    Serving,
    Slo,
    SloText,
    Traffic,
    largest_load,
    mixed_seconds,
    predict,
    predict_rate,
    step_seconds,
)
from kvik.planner.shape import ModelShape
from kvik.planner.variants import attention_variants

USUAL_PROMPT, USUAL_OUTPUT, USUAL_CONCURRENCY = 512, 128, 8  # defaults of a goal


@dataclass(frozen=True, slots=True)
class Goal:
    """The question to `kvik advise`: a model, a machine, a load and latency limits."""

    model: str = option("", Text("a folder or a hub id"), "a folder, hub id or config.json")
    hardware: str = option(
        "this", Text(), "h200, a100-80g, rtx4090, ...; this: this machine; or a file"
    )
    slo: Slo | None = option(  # noqa: RUF009  # a field, which ruff cannot see
        None,
        SloText(),
        "limits on the mean request, such as ttft=300ms,tpot=50ms,e2e=5s; None: maximise "
        "throughput",
    )
    prompt_tokens: int | None = option(
        None,
        Integer(1, 1 << 24),
        f"tokens of a request's prompt; None: {USUAL_PROMPT}, or less",
        {FORMERLY: "prompt"},
    )
    output_tokens: int | None = option(
        None,
        Integer(1, 1 << 24),
        f"tokens of its output; None: {USUAL_OUTPUT}, or less",
        {FORMERLY: "output"},
    )
    shared: int = option(0, Integer(0, 1 << 24), "leading prompt tokens that all requests share")
    concurrency: int | None = option(
        None,
        Integer(1, 1 << 24),
        f"requests at a time; None: {USUAL_CONCURRENCY}, or what keeps the SLO",
    )
    rate: float | None = option(
        None, Number(0, 1e9, above=True), "random arrivals per second, in place of concurrency"
    )
    acceptance: float | None = option(
        None,
        Number(0, 1),
        "share of drafts that are accepted; None: the least with a gain is found",
    )
    draft: str | None = option(
        None, Text(), "draft model or heads; None: prompt lookup, at no cost"
    )

    @property
    def load_named(self) -> bool:
        return self.concurrency is not None or self.rate is not None


def check_goal(goal: Goal, shape: ModelShape) -> None:
    """Raise ConfigError for the first field that is invalid for this model."""
    normalised(goal, ConfigError)
    if goal.rate is not None and goal.concurrency is not None:
        raise ConfigError("rate", "cannot be given together with concurrency")
    traffic, context = traffic_of(goal, shape), shape.max_context
    if traffic.context > context:
        raise ConfigError(
            "prompt_tokens",
            f"and output must fit the model's context of {context} tokens, not "
            f"{traffic.prompt} + {traffic.output}",
        )
    if goal.shared > traffic.prompt:
        raise ConfigError(
            "shared", f"must be in [0, {traffic.prompt}], the prompt, not {goal.shared}"
        )


def traffic_of(goal: Goal, shape: ModelShape) -> Traffic:
    """Return the requests of a goal, with defaults for fields that are None."""
    context = shape.max_context
    output = goal.output_tokens or min(
        USUAL_OUTPUT, max(1, (context - (goal.prompt_tokens or 1)) // 2)
    )
    prompt = goal.prompt_tokens or max(1, min(USUAL_PROMPT, context - output))
    return Traffic(prompt, output, goal.shared)


def assumed(goal: Goal, traffic: Traffic) -> tuple[str, ...]:
    """Return flags that stand for the defaults of the goal."""
    flags = []
    if goal.prompt_tokens is None:
        flags.append(f"--prompt-tokens {traffic.prompt}")
    if goal.output_tokens is None:
        flags.append(f"--output-tokens {traffic.output}")
    if goal.slo is None and not goal.load_named:
        flags.append(f"--concurrency {USUAL_CONCURRENCY}")
    return tuple(flags)


WORTHWHILE = 0.02  # relative change of a figure; smaller changes are within the prediction error


@dataclass(frozen=True, slots=True)
class Figures:
    """Predictions of a setting."""

    # At the load of the goal; with limits and no load, at the largest load that keeps them, else of
    # a single request. None: requests arrive faster than they can be served.
    load: Prediction | None
    single: Prediction | None  # one request alone
    full: Prediction | None  # as many requests as can run, which gives the highest throughput
    # The largest load that keeps the limits; None if there is none, or no limits.
    largest: Prediction | None
    memory: int  # bytes needed on the fullest device
    memory_limit: int  # bytes usable there

    def key(self, goal: Goal) -> tuple[float, ...]:
        """Return the figures to maximise, the most important first."""
        load = (self.full.output_rate if self.full else 0.0, 0.0)
        if self.load:
            load = (self.load.output_rate, 1.0 / self.load.e2e)
        if goal.slo is None:
            return load
        closeness = 1.0 / max(1.0, self.single.excess(goal.slo)) if self.single else 0.0
        slo_figures = (self.largest.rate if self.largest else 0.0, closeness)
        # Without a load in the goal, settings are compared at different loads.
        return (*slo_figures, *load) if goal.load_named else slo_figures


def figures_of(serving: Serving, traffic: Traffic, goal: Goal) -> Figures:
    """Predict the figures of a setting.

    Raises:
        ConfigError: the machine's speed is unknown, or it has no link to siblings.
    """
    single = predict(serving, traffic, 1)
    full = predict(serving, traffic, max(1, serving.max_running))
    largest = None
    if goal.slo is not None:
        largest = largest_load(serving, traffic, goal.slo)
    if goal.rate is not None:
        load = predict_rate(serving, traffic, goal.rate)
    elif goal.concurrency is not None or goal.slo is None:
        load = predict(serving, traffic, goal.concurrency or USUAL_CONCURRENCY)
    else:
        load = largest or single
    batch = max(1, min(load.concurrency if load else serving.max_running, serving.max_running))
    return Figures(load, single, full, largest, serving.memory(batch), serving.at.memory_limit)


def improvement(before: Figures, after: Figures, goal: Goal) -> float:
    """Return the relative change of the most important figure that changes by more than
    `WORTHWHILE`; 0 if none does."""
    for old, new in zip(before.key(goal), after.key(goal), strict=True):
        change = new / old - 1.0 if old else float(new > 0)
        if abs(change) > WORTHWHILE:
            return change
    return 0.0


_BOUNDS: Mapping[str, str] = {"bandwidth": "reading", "compute": "arithmetic", "host": "calls"}


def too_large(usual: Serving, now: Serving) -> str:
    """Say that the usual format does not fit and another one does."""
    at = usual.at
    needed, smaller = (MemoryPlanner.of(s.shape, s.at).total for s in (usual, now))
    return (
        f"{at.weight_format} needs {show_bytes(needed)} of {show_bytes(at.memory_limit)}, "
        f"{now.at.weight_format} {show_bytes(smaller)}"
    )


def obstacle(usual: Serving, now: Serving, formats: tuple[str, ...]) -> str:
    """Say that nothing fits one device, so that the figures are for several."""
    needed = min(usual.shape.weight_bytes(name) for name in formats)
    return (
        f"does not fit one {usual.at.device.name}: at least {show_bytes(needed)} of weights, "
        f"{show_bytes(usual.at.memory_limit)} may be used. This version divides models among "
        f"processes of a CPU alone; the figures are for {now.at.tp} devices, in "
        f"{now.at.weight_format}"
    )


def attention(serving: Serving, batch: int) -> str:
    """Compare the cache of the model's attention with that of other kinds."""
    rows = attention_variants(serving.shape, replace(serving.at, batch=batch))
    model_row = next(row for row in rows if row.own)
    alternatives = [
        f"{row.attention} {row.kv_per_token:,} bytes"
        + (f" and {_change(model_row.ceiling, row.ceiling)} decode tokens/s" if row.ceiling else "")
        for row in rows
        if not row.own
    ]
    text = f"{model_row.attention} caches {model_row.kv_per_token:,} bytes a token"
    return f"{text}; with the same heads {', '.join(alternatives)}. It comes with the model"


def shares(serving: Serving, traffic: Traffic, batch: int) -> str:
    """Describe the share of prompts in the time of a request, and the parts of a decode step."""
    time = _decoding(serving, traffic, batch)
    weights = sum(p.expected for p in time.parts if p.name in ("weights", "head"))
    cache, states = (
        sum(p.expected for p in time.parts if p.name == name) for name in ("kv cache", "states")
    )
    host = sum(p.expected for p in time.parts if p.bound == "host")
    extra = f", {states / time.expected:.0%} to states" if states else ""
    extra += f", {host / time.expected:.0%} to calls and the host" if host else ""
    bound = _BOUNDS.get(time.bound, time.bound)
    return (
        f"{_prompted(serving, traffic, batch):.0%} of the time goes to prompts; of a decoding step "
        f"{weights / time.expected:.0%} goes to the weights, "
        f"{cache / time.expected:.0%} to the KV cache{extra}; it is bound by {bound}"
    )


def _prompted(serving: Serving, traffic: Traffic, batch: int) -> float:
    """Return the share of a request's time that is not its own decoding steps."""
    plain = replace(serving, drafting=None)
    prediction = predict(plain, traffic, batch)
    decoding = (traffic.output - 1) * step_seconds(plain, traffic, batch)
    return max(0.0, 1.0 - decoding / prediction.e2e) if prediction else 0.0


@dataclass(frozen=True, slots=True)
class _FormatRates:
    """Prompt and decode tokens per second in one weight format, and the unit that computes its
    products."""

    format: str
    unit: str
    prompts: float
    decoding: float

    @staticmethod
    def of(serving: Serving, traffic: Traffic, batch: int) -> _FormatRates:
        at = serving.at
        fresh = max(1, traffic.prompt - traffic.shared)
        # Under load, a step has the prompts of all requests that arrived during the previous step.
        tokens = min(serving.budget, max(fresh, batch * fresh // traffic.output))
        seconds = mixed_seconds(serving, traffic, 0, tokens, fresh)
        return _FormatRates(
            at.weight_format,
            at.device.unit(arithmetic(at.weight_format, at.device.kind)),
            tokens / seconds,
            batch / step_seconds(serving, traffic, batch),
        )

    def compared_with(self, now: _FormatRates) -> str:
        return (
            f"{self.format} computes prompts (in {self.unit}) at {self.prompts / now.prompts:.2f} "
            f"times the rate and decodes at {self.decoding / now.decoding:.2f} times"
        )


def formats(
    now: Serving, candidates: Sequence[Serving], best: Serving, traffic: Traffic, batch: int
) -> str:
    """Compare the weight formats by prompt and decode rates.

    Args:
        candidates: settings in other formats, including `best`, which serves the load best.
    """
    rates = _FormatRates.of(now, traffic, batch)
    every = [_FormatRates.of(other, traffic, batch) for other in candidates]
    (won,) = (other for other in every if other.format == best.at.weight_format)
    reader = max(every, key=lambda other: other.decoding)
    computer = max(every, key=lambda other: other.prompts)
    text = f"compared with {now.at.weight_format}, {won.compared_with(rates)}"
    for other in (reader, computer):
        ahead = max(other.decoding / won.decoding, other.prompts / won.prompts)
        behind = min(other.decoding / won.decoding, other.prompts / won.prompts)
        if ahead > 1.0 + WORTHWHILE and behind < 1.0 - WORTHWHILE:
            text += f", {other.compared_with(rates)}"
    return f"{text}; {shares(now, traffic, batch)}"


def processes(serving: Serving, traffic: Traffic, batch: int) -> str:
    """Compare two processes on this machine with one."""
    shape, at = serving.shape, replace(serving.at, batch=batch)
    two = replace(at, tp=2)
    try:
        more = MemoryPlanner.of(shape, two).total - MemoryPlanner.of(shape, at).total
    except ConfigError as error:
        return f"one process: {error.message}"
    step = decode(batch, traffic.halfway)
    times = [step_time(shape, setting, step).expected for setting in (two, at)]
    return (
        f"processes of one memory share its rate: with 2, a decoding step would take "
        f"{times[0] / times[1]:.2f} times as long, and {show_bytes(more)} more. "
        "--tensor-parallel-size is for cores with memories of their own (NUMA nodes), one for each"
    )


def checking(serving: Serving, traffic: Traffic, batch: int, drafts: int) -> str:
    """Describe the cost of checking drafts."""
    step = verify(batch, traffic.halfway, drafts)
    time = step_time(serving.shape, serving.at, step)
    cost = time.expected / _decoding(serving, traffic, batch).expected
    work = f"{_count(drafts, 'draft')} of {_count(batch, 'request')}"
    return f"checking {work} takes {cost:.2f} times a plain step"


def supposed(acceptance: float, source: DraftSource) -> str:
    """State the acceptance that the goal gives."""
    return (
        f"supposing that {acceptance:.0%} of the drafts are right (--acceptance), {_cost(source)}"
    )


def worthwhile(percent: int | None, source: DraftSource) -> str:
    """State the acceptance from which drafts gain, if the goal gives none."""
    return (
        f"it gains from {percent}% of right drafts on, {_cost(source)}. How many are right depends "
        "on the texts: `kvik spec-report --data` measures the share, --acceptance takes it. Not "
        "counted below"
    )


def _cost(source: DraftSource) -> str:
    if source.path:
        model = source.method == "draft_model"
        return f"made by the {'draft model' if model else 'heads'}"
    return "found by prompt lookup at no cost"


def nothing(topic: str, serving: Serving) -> str:
    """Say why a lever has no other position."""
    facts = weight_facts(serving.at.weight_format)
    if topic in ("precision", "quantisation") and serving.shape.like.built:
        return f"the engine folder is built in {facts.name}, which the engine keeps"
    if topic == "precision" and not facts.dtype:
        return f"the weights are {facts.name}; any dtype would need more"
    if topic == "quantisation" and not weight_facts(serving.shape.stored).dtype:
        return f"the checkpoint is stored as {serving.shape.stored}, which the engine keeps"
    if topic in ("precision", "quantisation"):
        return f"{facts.name} already; no smaller format of this kind is known"
    if topic == "parallelism" and not serving.at.device.link:
        return f"{serving.at.device.name} has no link to a sibling"
    return "there is no other setting"


def hopeless(usual: Serving, formats: tuple[str, ...]) -> str:
    """Say that no number of devices suffices."""
    needed = min(usual.shape.weight_bytes(name) for name in formats)
    return (
        f"does not fit {usual.at.device.name}: at least {show_bytes(needed)} of weights and a "
        f"request of {usual.at.context} tokens, {show_bytes(usual.at.memory_limit)} may be used"
    )


def batching(
    now: Serving, tuned: Serving, traffic: Traffic, after: Figures, slo: Slo | None
) -> str:
    """Describe the effect of more or fewer requests and tokens per step."""
    full = predict(now, traffic, max(1, now.max_running))
    if slo is None:
        if full is None or after.load is None:
            return f"requests arrive faster than they can be served, {most_served(after)}"
        return (
            f"requests join and leave at every step; {now.max_running} at a time, "
            f"the most that can run, would give {full.output_rate:,.0f} tokens/s at a TPOT of "
            f"{seconds(full.tpot)}"
        )
    if after.largest is None:
        return "not even a single request keeps the limits"
    text = f"{after.largest.concurrency} at a time are the most that keep the limits"
    if full is not None and full.excess(slo) > 1.0:
        text += (
            f"; with {full.concurrency}, the most that can run, they would be {_slo_met(full, slo)}"
        )
    elif tuned == now:
        text += ", and the most that can run"
    return text


def prefix(traffic: Traffic, served: Figures, without: Figures, *, has_prefix: bool) -> str:
    """Describe the effect of shared prefixes."""
    pair = (without.single, served.single)
    if pair[0] is None or pair[1] is None:
        return "on by default"
    saved = f"TTFT of one request {seconds(pair[1].ttft)} in place of {seconds(pair[0].ttft)}"
    if has_prefix:
        return f"on by default: {traffic.shared} shared prompt tokens are not computed, {saved}"
    return (
        f"on by default; it helps if prompts share a prefix (--shared): with half of the prompt "
        f"shared, {saved}"
    )


def promise(figures: Figures, slo: Slo, *, load_named: bool) -> str:
    """State whether the limits are kept, and by what margin."""
    parts = []
    if load_named:
        if figures.load is None:
            parts.append(f"the load comes faster than it can be served, {most_served(figures)}")
        else:
            parts.append(f"at the load asked for the limits are {_slo_met(figures.load, slo)}")
    if figures.largest is not None:
        parts.append(
            f"the largest load that keeps them is {figures.largest.concurrency} requests at a "
            f"time, {three(figures.largest.rate)} requests/s"
        )
    elif figures.single is not None:
        parts.append(f"even for a single request they are {_slo_met(figures.single, slo)}")
    return "; ".join(parts)


def most_served(figures: Figures) -> str:
    """State the highest throughput, for a load above it."""
    rate = figures.full.rate if figures.full else 0.0
    return f"{three(rate)} requests/s at most"


def beyond(best: Figures, slo: Slo) -> str:
    """State whether all levers that this version lacks would together keep the limits."""
    if best.largest is not None:
        count = best.largest.concurrency
        return f"with all that is not in this version they would be kept, up to {count} at a time"
    if best.single is None:
        return "no known setting keeps them"
    return f"with all that is not in this version they would be {_slo_met(best.single, slo)}"


def _count(number: int, thing: str) -> str:
    """ "1 draft", "2 drafts"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _change(base: float | None, other: float) -> str:
    return f"{other / base:.2f} times the" if base else f"{other:,.0f}"


def _slo_met(prediction: Prediction, slo: Slo) -> str:
    excess = prediction.excess(slo)
    pairs = {
        "TTFT": (prediction.ttft, slo.ttft),
        "TPOT": (prediction.tpot, slo.tpot),
        "E2E": (prediction.e2e, slo.e2e),
    }
    name, (time, limit) = max(
        ((n, (t, limit)) for n, (t, limit) in pairs.items() if limit is not None),
        key=lambda item: item[1][0] / item[1][1],
    )
    figure = f"{name} {seconds(time)} of {seconds(limit)}"
    return f"kept ({figure})" if excess <= 1.0 else f"missed {excess:.2f} times over ({figure})"


def _decoding(serving: Serving, traffic: Traffic, batch: int) -> StepTime:
    return step_time(serving.shape, serving.at, decode(batch, traffic.halfway))

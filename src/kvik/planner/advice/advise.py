"""`kvik advise`: an ordered list of changes to how a model is served, each with its effect.

The roofline and the memory plan predict every figure for this model, machine and load. A change
whose effect is below their accuracy is not advised, and the list says why.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from kvik.config.fit import MAX_NUM_SEQS
from kvik.config.hardware import Hardware
from kvik.config.speculative import NO_SOURCE, OWN_HEAD, DraftSource
from kvik.errors import CapacityError, ConfigError
from kvik.planner.advice import reasons
from kvik.planner.advice.reasons import (
    WORTHWHILE,
    Figures,
    Goal,
    assumed,
    check_goal,
    figures_of,
    improvement,
    traffic_of,
)
from kvik.planner.devices import Device, Setting, assumed_cpu
from kvik.planner.families import read_shape, with_own_head
from kvik.planner.formats import WEIGHT_FORMATS, kv_facts, weight_facts
from kvik.planner.parallel import can_share
from kvik.planner.plan import Question, draft_seconds, draft_source, find_machine, setting_of
from kvik.planner.search import smallest
from kvik.planner.serving import Drafting, Serving, Traffic, budgets, set_up
from kvik.planner.shape import ModelShape
from kvik.planner.variants import in_weight_format
from kvik.spec.kv import KV_FORMATS
from kvik.spec.model import DTYPE_BYTES

# Levers without flags on GPUs: neither groups nor stages have run there.
NOT_ON_GPUS = frozenset({"parallelism"})
DRAFTS = (1, 2, 3, 4, 5, 6, 8)
MAX_SEQS = 1024  # requests at a time
MAX_DEVICES = 32  # per layer

# One position of a lever: its name in words, to follow "with", and the setting. `_Adviser` predicts
# its effects.
Position = tuple[str, Serving]


def flag(option: str, value: object) -> str:
    """Return an option and its value as command line text."""
    return f"--{option.replace('_', '-')} {value}"


def serving_flags(serving: Serving, usual: Serving) -> tuple[str, ...]:
    """Return the flags that change the usual setting to this one."""
    at, was = serving.at, usual.at
    made, other = weight_facts(at.weight_format), at.weight_format != was.weight_format
    options: list[tuple[str, object, bool]] = [
        ("dtype", made.dtype, bool(made.dtype) and other),
        ("quantization", made.quantization, bool(made.quantization) and other),
        ("kv_cache_dtype", at.kv_format, at.kv_asked),
        ("max_num_seqs", serving.seqs, serving.seqs != usual.seqs),
        ("max_num_batched_tokens", serving.budget, serving.budget != serving.usual_budget),
    ]
    flags = [flag(option, value) for option, value, changed in options if changed]
    if serving.drafting is not None:
        flags += [*drafting_flags(at.source), flag("spec_tokens", serving.drafting.drafts)]
    return tuple(flags)


def kv_formats(serving: Serving) -> Iterator[Position]:
    """Yield the smaller formats of the KV cache."""
    shape, at = serving.shape, serving.at
    now = shape.kv_bytes_per_token(at.kv_format)
    for name in KV_FORMATS:
        if kv_facts(name).bits <= 8 and shape.kv_bytes_per_token(name) < now:
            smaller = replace(at, kv_format=name, kv_asked=True)
            with suppress(ConfigError):  # the format cannot store what this model keeps
                yield name, _renewed(serving, smaller)


def drafting_flags(source: DraftSource) -> tuple[str, ...]:
    """Return the flags that turn speculation on; the engine adapts the number of drafts."""
    named = source not in (NO_SOURCE, OWN_HEAD)
    model = (flag("spec_model", shlex.quote(source.path)),) if named else ()
    return flag("spec_method", source.method or "ngram"), *model  # without one: prompt lookup


def widened(serving: Serving) -> Serving:
    """Return the setting with as many concurrent requests as fit in memory."""
    return replace(serving, seqs=max(serving.seqs, min(serving.max_fitting, MAX_SEQS)))


def speculations(
    serving: Serving, acceptance: float, source: DraftSource, batch: int
) -> Iterator[Position]:
    """Yield numbers of drafts per step, by a model or heads, which take memory too, or else by
    prompt lookup at no cost."""
    at = replace(serving.at, source=source)
    if source == OWN_HEAD:
        serving = replace(serving, shape=with_own_head(serving.shape))
    seconds = draft_seconds(serving.shape, replace(at, batch=batch))
    if source.path:
        try:
            serving = _renewed(serving, at)
        except ConfigError:
            if at.parts > 1:  # some heads run in one process alone
                return
            raise
    for drafts in DRAFTS:
        drafting = Drafting(drafts, acceptance, drafts * seconds)
        name = "1 draft a step" if drafts == 1 else f"{drafts} drafts a step"
        yield name, replace(serving, drafting=drafting)


def smaller_dtypes(serving: Serving) -> tuple[str, ...]:
    """Return the dtypes with fewer bits than the current weights. An engine folder has one."""
    if serving.shape.like.built:
        return ()
    now = weight_facts(serving.at.weight_format).dtype
    dtypes = {f.name: f.dtype for f in WEIGHT_FORMATS.values() if f.dtype and now}
    return tuple(n for n, dtype in dtypes.items() if DTYPE_BYTES[dtype] < DTYPE_BYTES[now])


def made_formats(serving: Serving) -> tuple[str, ...]:
    """Return the smaller formats to which this engine can quantise, the largest first. Layers that
    a checkpoint stores quantised stay as they are, and so do those of an engine folder."""
    if serving.shape.like.built or not weight_facts(serving.shape.stored).dtype:
        return ()
    size = {f.name: serving.shape.weight_bytes(f.name) for f in WEIGHT_FORMATS.values()}
    made = [f.name for f in WEIGHT_FORMATS.values() if f.quantization]
    smaller = [name for name in made if size[name] < size[serving.at.weight_format]]
    return tuple(sorted(smaller, key=size.__getitem__, reverse=True))


def device_counts(serving: Serving) -> Iterator[int]:
    """Yield the numbers of devices that can share the model; on a CPU only 1, since its processes
    share one memory."""
    if serving.at.exact:
        yield 1
        return
    count = 1
    while count <= MAX_DEVICES and can_share(serving.shape, count):
        if count == 1 or serving.at.device.link:
            yield count
        count *= 2


def parallelisms(serving: Serving) -> Iterator[Position]:
    """Yield larger numbers of devices that share each layer."""
    for count in device_counts(serving):
        if count > serving.at.tp:
            more = replace(serving.at, tp=count)
            yield f"{count} devices", _renewed(serving, more)


def with_weights(serving: Serving, name: str) -> Serving:
    """Return the setting in another weight format."""
    return _renewed(serving, in_weight_format(serving.shape, serving.at, name))


def _renewed(serving: Serving, at: Setting) -> Serving:
    """Return the setting with its memory planned again."""
    budget = None if serving.budget == serving.usual_budget else serving.budget
    made = set_up(serving.shape, at, serving.seqs, budget)
    return replace(made, drafting=serving.drafting, memo=serving.memo)


ORDER = (
    "precision",
    "attention",
    "KV format",
    "batching",
    "prefix cache",
    "quantisation",
    "speculation",
    "parallelism",
)


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice on one lever."""

    topic: str
    # "do", "keep" (good as it is), "depends" (on a figure that the goal does not give; not counted
    # in what is advised), "no use" or "not in this version".
    verdict: str
    reason: str  # in words, with figures
    change: str = ""  # the advised position in words; "" for no change
    flags: tuple[str, ...] = ()  # flags that set this position
    before: Figures | None = None  # prediction; None if nothing changes
    after: Figures | None = None  # likewise


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """All advice for a goal."""

    goal: Goal
    traffic: Traffic
    assumed: tuple[str, ...]  # flags that stand for the defaults of the goal
    obstacle: str  # why no setting of this version fits, and the setting assumed instead; else ""
    usual: Serving  # the setting without flags
    advised: Serving  # the setting with all advice
    start: Figures | None  # figures of `usual`; None if it does not fit
    end: Figures  # figures of `advised`
    flags: tuple[str, ...]  # of all advice
    advice: tuple[Advice, ...]  # in order, each on top of the previous ones
    # Levers without a flag in this version, each alone on top of all advice.
    later: tuple[Advice, ...]
    promise: str  # whether the limits can be kept, and by what margin; "" without limits


def advise(goal: Goal) -> AdviceReport:
    """Return the advice for a goal.

    Raises:
        ConfigError: a field is invalid, or the speed of the GPU is unknown.
        ModelError: the model is not found or cannot be read.
        CapacityError: no setting of the model fits this machine.
    """
    shape = read_shape(goal.model)
    device, hardware = find_machine(goal.hardware)
    if hardware is not None and device.kind == "cpu" and not device.rated:
        device = assumed_cpu(hardware, device.unknown)
    return advise_shape(shape, device, goal, hardware)


def advise_shape(
    shape: ModelShape, device: Device, goal: Goal, hardware: Hardware | None = None
) -> AdviceReport:
    """Return the advice for a model and device that are already known. Raises the errors of
    `advise`.

    Args:
        hardware: of this machine; None if the device is of another one.
    """
    source = draft_source(goal.draft, shape)
    check_goal(goal, shape)
    traffic = traffic_of(goal, shape)
    question = Question(model=goal.model, hardware=goal.hardware, context=traffic.context)
    shape, at = setting_of(shape, device, question, hardware)
    usual = set_up(shape, at, MAX_NUM_SEQS)
    return _Adviser(goal, traffic, source, usual).report()


@dataclass(frozen=True, slots=True)
class _Point:
    """A setting, its figures, and the name of the lever position that led to it."""

    serving: Serving
    figures: Figures
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Adviser:
    goal: Goal
    traffic: Traffic
    source: DraftSource
    usual: Serving

    def report(self) -> AdviceReport:
        start = self._at(self.usual)
        now, obstacle = self._first_that_fits(start)
        advice: list[Advice] = []
        if now is not start and not obstacle:
            advice.append(self._room(now))
        for topic in ORDER:
            if topic == "attention":
                reason = reasons.attention(now.serving, self._batch(now))
                advice.append(Advice(topic, "keep", reason))
            elif topic == "prefix cache":
                advice.append(self._prefix_cache(now.serving))
            elif topic == "batching":
                made, now = self._batching(now)
                advice.append(made)
            elif topic == "speculation" and self.goal.acceptance is None:
                advice.append(self._speculation(now))
            elif topic == "parallelism" and now.serving.at.exact:
                reason = reasons.processes(now.serving, self.traffic, self._batch(now))
                advice.append(Advice(topic, "no use", reason))
            elif self._available(topic):
                made, now = self._pull(topic, now)
                advice.append(made)
        absent = [topic for topic in ORDER if not self._available(topic)]
        return AdviceReport(
            goal=self.goal,
            traffic=self.traffic,
            assumed=assumed(self.goal, self.traffic),
            obstacle=obstacle,
            usual=self.usual,
            advised=now.serving,
            start=start.figures if self.usual.max_fitting else None,
            end=now.figures,
            flags=serving_flags(now.serving, self.usual),
            advice=tuple(advice),
            later=tuple(self._pull(topic, now)[0] for topic in absent),
            promise=self._promise(now, absent),
        )

    def _available(self, topic: str) -> bool:
        """Return whether this engine has a lever on such a device."""
        return self.usual.at.exact or topic not in NOT_ON_GPUS

    def _at(self, serving: Serving, name: str = "") -> _Point:
        return _Point(serving, figures_of(serving, self.traffic, self.goal), name)

    def _improvement(self, before: _Point, after: _Point) -> float:
        return improvement(before.figures, after.figures, self.goal)

    def _first_that_fits(self, start: _Point) -> tuple[_Point, str]:
        """Return the first setting that fits, and the obstacle: the usual one, else in a smaller
        format, else on more devices.

        Raises:
            CapacityError: nothing fits.
        """
        usual = self.usual
        if usual.max_fitting:
            return start, ""
        formats = (usual.at.weight_format, *made_formats(usual))
        for count in device_counts(usual):
            for name in formats:
                shared = replace(usual, at=replace(usual.at, tp=count))
                candidate = with_weights(shared, name)
                if candidate.max_fitting:
                    is_available = count == 1 or self._available("parallelism")
                    reason = "" if is_available else reasons.obstacle(usual, candidate, formats)
                    return self._at(candidate), reason
        raise CapacityError("model", reasons.hopeless(usual, formats))

    def _room(self, now: _Point) -> Advice:
        serving = now.serving
        reason = reasons.too_large(self.usual, serving)
        flags = serving_flags(serving, self.usual)
        return Advice("room", "do", reason, serving.at.weight_format, flags, after=now.figures)

    def _prefix_cache(self, now: Serving) -> Advice:
        """Compare with the prefix cache off; it is on by default."""
        shared = self.traffic.shared
        supposed = replace(self.traffic, shared=shared or self.traffic.prompt // 2)
        without = figures_of(now, replace(self.traffic, shared=0), self.goal)
        served = figures_of(now, supposed, self.goal)
        reason = reasons.prefix(supposed, served, without, has_prefix=bool(shared))
        if not shared:
            return Advice("prefix cache", "keep", reason)
        return Advice("prefix cache", "keep", reason, before=without, after=served)

    def _speculation(self, now: _Point) -> Advice:
        """Find the acceptance from which speculation gains, if the goal gives none."""
        topic = "speculation"

        def gains(percent: int) -> _Point | None:
            trial = replace(self, goal=replace(self.goal, acceptance=percent / 100))
            best = trial._best(topic, now)
            return best if self._improvement(now, best) > 0.0 else None

        needed = smallest(lambda percent: gains(percent) is not None, 100)
        best = gains(needed) if needed is not None else None
        batch = self._batch(now)
        reason = reasons.checking(now.serving, self.traffic, batch, 1)
        if best is None or best.serving.drafting is None:
            return Advice(topic, "no use", f"not even if all drafts were right: {reason}")
        reason += f"; {reasons.worthwhile(needed, self.source)}"
        return Advice(topic, "depends", reason, flags=drafting_flags(self.source))

    def _batching(self, now: _Point) -> tuple[Advice, _Point]:
        then = self._tuned(now.serving)
        slo = self.goal.slo
        reason = reasons.batching(now.serving, then.serving, self.traffic, then.figures, slo)
        if then.serving == now.serving:
            return Advice("batching", "keep", reason), now
        change = f"{then.serving.seqs} at a time, {then.serving.budget} tokens a step"
        made, _ = self._changes(now, then)
        return Advice("batching", "do", reason, change, made, now.figures, then.figures), then

    def _pull(self, topic: str, now: _Point) -> tuple[Advice, _Point]:
        """Try a lever's positions. Return the advice, and the setting that follows it."""
        # Levers after batching change what batching is best.
        later = ORDER.index(topic) > ORDER.index("batching") or not self._available(topic)
        best = self._best(topic, now)
        then = best
        if best.name and later:
            then = self._tuned(best.serving, best.name)
        elif best.name:
            then = self._at(replace(best.serving, seqs=now.serving.seqs), best.name)
        change = self._improvement(now, then)
        reason = self._reason(topic, now, then, change)
        if change <= 0.0:
            return Advice(topic, "no use", reason), now
        if not self._available(topic):
            advice = Advice(topic, "not in this version", reason, then.name)
            return replace(advice, before=now.figures, after=then.figures), now
        if topic in ("KV format", "quantisation"):
            reason += "; answers change a little, so compare them"
        made, undone = self._changes(now, then)
        if undone:
            reason += f"; no longer needed: {' and '.join(undone)}"
        return Advice(topic, "do", reason, then.name, made, now.figures, then.figures), then

    def _best(self, topic: str, now: _Point) -> _Point:
        """Return the best position with as many requests as fit in memory, the first among equals;
        for parallelism, the fewest devices that keep the limits."""
        best: _Point | None = None
        for name, serving in self._positions(topic, now):
            point = self._at(widened(serving), name)
            if best is None or self._improvement(best, point) > 0.0:
                best = point
            if topic == "parallelism" and self._keeps_slo(best):
                break
        return best or replace(now, name="")

    def _positions(self, topic: str, now: _Point) -> Iterator[Position]:
        serving = now.serving
        if topic == "KV format":
            return kv_formats(serving)
        if topic in ("precision", "quantisation"):
            names = (smaller_dtypes if topic == "precision" else made_formats)(serving)
            return ((name, with_weights(serving, name)) for name in names)
        if topic == "speculation":
            acceptance, batch = self.goal.acceptance or 0.0, self._batch(now)
            return speculations(serving, acceptance, self.source, batch)
        return parallelisms(serving)

    def _tuned(self, serving: Serving, name: str = "") -> _Point:
        """Return the setting with the best token budget, and only as many concurrent requests as
        keep the limits or as the load needs."""
        usual, slo = self.usual, self.goal.slo
        base = self._at(replace(serving, seqs=usual.seqs, budget=serving.usual_budget), name)
        best = base
        for budget in budgets(base.serving)[1:]:
            point = self._at(replace(base.serving, budget=budget), name)
            # Compared with `base` too, because small losses of several rounds would add up.
            if self._improvement(best, point) > 0.0 <= self._improvement(base, point):
                best = point
        wide = self._at(widened(best.serving), name)
        if self._improvement(best, wide) > 0.0:
            best = wide
        load = best.figures.load if slo is None else best.figures.largest
        if load is None:
            return best
        needed = min(load.concurrency, best.serving.max_running)
        if needed > usual.seqs or (slo is not None and needed < best.serving.max_running):
            return self._at(replace(best.serving, seqs=needed), name)
        return self._at(replace(best.serving, seqs=usual.seqs), name)

    def _changes(self, now: _Point, then: _Point) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the new flags, and the options dropped without replacement."""
        old = serving_flags(now.serving, self.usual)
        new = serving_flags(then.serving, self.usual)
        options = {flag.split()[0] for flag in new}
        gone = (flag.split()[0] for flag in old)
        return tuple(f for f in new if f not in old), tuple(o for o in gone if o not in options)

    def _keeps_slo(self, point: _Point) -> bool:
        return self.goal.slo is None or point.figures.largest is not None

    def _batch(self, now: _Point) -> int:
        """Return the number of requests that run at a time under the load of the figures."""
        load, limit = now.figures.load, now.serving.max_running
        return max(1, min(load.concurrency if load else limit, limit))

    def _reason(self, topic: str, now: _Point, then: _Point, change: float) -> str:
        if not then.name:
            return reasons.nothing(topic, now.serving)
        batch, drafting = self._batch(now), then.serving.drafting
        if topic in ("precision", "quantisation"):
            candidates = [serving for _, serving in self._positions(topic, now)]
            reason = reasons.formats(now.serving, candidates, then.serving, self.traffic, batch)
        elif drafting is None:
            reason = reasons.shares(now.serving, self.traffic, batch)
        else:
            reason = reasons.checking(now.serving, self.traffic, batch, drafting.drafts)
            reason += f"; {reasons.supposed(drafting.acceptance, self.source)}"
        if change > 0.0:
            return reason
        effect = (
            f"make it {-change:.0%} worse" if change else f"change no figure by {WORTHWHILE:.0%}"
        )
        return f"{then.name} would {effect}: {reason}"

    def _promise(self, now: _Point, absent: list[str]) -> str:
        slo = self.goal.slo
        if slo is None:
            return ""
        text = reasons.promise(now.figures, slo, load_named=self.goal.load_named)
        if self._keeps_slo(now) or not absent:
            return text
        for topic in absent:  # on top of each other
            best = self._best(topic, now)
            if self._improvement(now, best) > 0.0:
                now = best
        return f"{text}; {reasons.beyond(now.figures, slo)}"

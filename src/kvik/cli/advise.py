"""`kvik advise [MODEL]`: what to change about serving a model on a machine, and the predicted
gain."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap

from kvik.cli.flags import Parser, add_model, add_option_flags, given_options
from kvik.cli.terminal import say_answer
from kvik.config.units import seconds, show_bytes
from kvik.planner.advice.advise import Advice, AdviceReport, advise
from kvik.planner.advice.reasons import Figures, Goal, most_served
from kvik.planner.families import is_short_name
from kvik.planner.serving import Prediction

WIDTH, MARGIN = 100, 24


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "advise",
        "[MODEL]",
        "List what to change about serving a model, each with its flag and its predicted effect on "
        "this load and machine. Loads nothing.",
    )
    add_model(parser, "a folder, hub id or config.json")

    add_option_flags(parser, "the question", Goal, left_out=("model",))
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    return parser


def run(arguments: argparse.Namespace) -> int:
    report = advise(Goal(**given_options(Goal, arguments)))
    say_answer(as_json(report), as_text(report), as_json=arguments.json)
    return 0


def as_json(report: AdviceReport) -> dict[str, object]:
    """Return the report without the fields of the question."""
    device = report.usual.at.device
    return {
        "model": report.usual.shape.name,
        "hardware": device.name,
        "measured": device.measured,
        "doubt": device.doubt or None,
        "traffic": asdict(report.traffic),
        "slo": asdict(report.goal.slo) if report.goal.slo else None,
        "assumed": report.assumed,
        "obstacle": report.obstacle or None,
        "promise": report.promise or None,
        "flags": report.flags,
        "start": asdict(report.start) if report.start else None,
        "end": asdict(report.end),
        "advice": [asdict(advice) for advice in report.advice],
        "later": [asdict(advice) for advice in report.later],
    }


def as_text(report: AdviceReport) -> str:
    lines = [*_header(report), ""]
    for place, advice in enumerate(report.advice, 1):
        lines += _advice(f"{place}. {advice.topic}", advice)
    if report.later:
        lines += ["", "Not in this version, each alone on top of the above:"]
        for advice in report.later:
            lines += _advice(f"   {advice.topic}", advice)
    lines += ["", *_item("with all advised", _figures(report.end))]
    if not report.obstacle and report.usual.shape.spec is not None:
        lines.append(" ".join(["kvik serve", *_served(report.goal.model), *report.flags]))
    return "\n".join(lines)


def _served(model: str) -> list[str]:
    """Return the model as `kvik serve` takes it; MODEL if it is only described here, by a
    config.json or the short name of a public model."""
    path = Path(model).expanduser()
    described = path.suffix == ".json" if path.exists() else is_short_name(model)
    return ["MODEL" if described else shlex.quote(model)] if model else []


def _header(report: AdviceReport) -> list[str]:
    device, shape, traffic = report.usual.at.device, report.usual.shape, report.traffic
    basis = "measured here" if device.measured else "ceilings of its data sheet; kernels reach less"
    basis = device.source if device.assumed else basis
    requests = f"{traffic.prompt} prompt + {traffic.output} output tokens"
    if traffic.shared:
        requests += f", {traffic.shared} of them shared"
    if report.goal.concurrency or report.goal.rate:
        load = (
            f"{report.goal.concurrency} at a time"
            if report.goal.concurrency
            else (f"{report.goal.rate:g} a second")
        )
        requests += f", {load}"
    lines = [
        *_item("model", f"{shape.name} on {device.name} ({basis})"),
        *_item("requests", requests),
    ]
    if report.assumed:
        lines += _item("assumed", " ".join(report.assumed))
    if report.obstacle:
        lines += _item("obstacle", f"{shape.name} {report.obstacle}")
    if shape.spec is None:
        lines += _item("note", f"this version does not run {shape.name}")
    for note in filter(None, [device.doubt, *shape.notes]):
        lines += _item("note", note)
    if report.start:
        lines += _item("without flags", _figures(report.start))
    if report.promise:
        lines += _item("promise", report.promise)
    return lines


def _advice(title: str, advice: Advice) -> list[str]:
    verdict = advice.verdict
    if advice.flags:
        verdict = " ".join(advice.flags)
        if advice.verdict == "depends":
            verdict = f"depends: {verdict}"
    elif advice.change:
        verdict = advice.change
    lines = [*_item(title, verdict), *_item("", advice.reason)]
    if advice.before and advice.after:
        lines += _item("", _change(advice.before, advice.after))
    elif advice.after:
        lines += _item("", _figures(advice.after))
    return lines


def _figures(figures: Figures) -> str:
    parts = [f"{show_bytes(figures.memory)} of {show_bytes(figures.memory_limit)}"]
    if figures.load is None:
        return f"comes faster than it can be served, {most_served(figures)}; {parts[0]}"
    load = figures.load
    parts = [
        f"{load.concurrency} at a time",
        f"{load.output_rate:,.0f} tokens/s",
        f"TTFT {seconds(load.ttft)}",
        f"TPOT {seconds(load.tpot)}",
        *parts,
    ]
    return ", ".join(parts)


def _change(before: Figures, after: Figures) -> str:
    parts = []
    if before.load and after.load:
        old, new = before.load, after.load
        pairs: tuple[tuple[str, Callable[[Prediction], str]], ...] = (
            ("", lambda p: f"{p.concurrency} at a time"),
            ("tokens/s ", lambda p: f"{p.output_rate:,.0f}"),
            ("TTFT ", lambda p: seconds(p.ttft)),
            ("TPOT ", lambda p: seconds(p.tpot)),
        )
        for name, show in pairs:
            was, now = show(old), show(new)
            if was != now:
                parts.append(f"{name}{was} -> {now}")
    elif after.load:
        parts.append(f"{most_served(before)} -> {_figures(after)}")
    else:
        parts.append(f"{most_served(before)} -> {most_served(after)}")
    if before.memory != after.memory:
        parts.append(f"memory {show_bytes(before.memory)} -> {show_bytes(after.memory)}")
    return ", ".join(parts) or "the same figures"


def _item(name: str, text: str) -> list[str]:
    """Return lines with a name in the margin and its text wrapped to the right."""
    first, *rest = wrap(text, WIDTH - MARGIN, break_on_hyphens=False)
    return [f"{name:{MARGIN}}{first}", *(" " * MARGIN + line for line in rest)]

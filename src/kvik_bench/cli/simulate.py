"""`kvik simulate [MODEL]`: simulates a load on replicas, without computing a model.

The scheduler, the prefix cache and the router are the real ones; the time of a step comes from the
planner's roofline of the model on the hardware.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial

from kvik.cli.flags import Parser, add_model, add_option_flags, given_options
from kvik.cli.terminal import say, say_report, share_bar
from kvik.config.config import EngineConfig, Notes, Tiers, check_config, read_tiers
from kvik.config.resolve import tier_sizes
from kvik.config.step_memory import StepSize
from kvik.config.units import columns, count, seconds
from kvik.errors import ConfigError
from kvik.options import Integer, Number, normalised, option, options_of
from kvik.planner.families import read_shape
from kvik.planner.memory import MemoryPlanner
from kvik.planner.plan import Question, check_question, find_machine, setting_of
from kvik.planner.roofline import decode, prefill, step_time
from kvik_bench.simulation import Outcome, SimulatedEngine, Traffic, quantile, simulate

POLICIES = ("prefix", "round-robin")
# Options of the load that do not count with a trace.
DRAWN = ("rate", "turns", "think", "systems", "system_tokens", "user_tokens", "output_tokens")
# Options of `kvik plan` that describe an engine.
PLANNED = ("hardware", "dtype", "kv_cache_dtype", "tp", "memory_utilization")


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of `kvik simulate`."""

    replicas: int = option(8, Integer(1, 4096), "engines, each with the whole model")
    num_blocks: int | None = option(
        None, Integer(1, 1 << 31), "KV blocks of each engine; None: as kvik serve decides"
    )
    block_size: int = option(16, Integer(1, 1024), "tokens per KV block")
    max_num_seqs: int = option(
        64, Integer(1, 65_536), "requests that each engine runs at the same time"
    )
    max_num_batched_tokens: int = option(2048, Integer(1, 1 << 20), "token budget of a step")
    kv_tiers: str | None = option(
        None, Tiers(), "tiers of each engine, as for kvik serve; folders are not touched"
    )
    memory_rate: float = option(
        20.0, Number(0, 1e6, above=True), "GB/s of copies to and from the memory tier"
    )
    disk_rate: float = option(
        3.0, Number(0, 1e6, above=True), "GB/s of the disk tier, in each direction"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "simulate",
        "[MODEL]",
        "Run a load of conversations on simulated replicas, and compare routing by prefixes with "
        "round-robin routing. Loads no model.",
    )
    add_model(parser, "a folder, hub id or config.json")
    unused_names = [option.name for option in options_of(Question) if option.name not in PLANNED]
    add_option_flags(parser, "each engine, as for kvik plan", Question, left_out=unused_names)
    add_option_flags(parser, "the engines", Replicas)
    add_option_flags(parser, "the load", Traffic)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    return parser


def run(arguments: argparse.Namespace) -> int:
    options = Replicas(**given_options(Replicas, arguments))
    options = replace(options, **normalised(options, ConfigError))
    load = given_options(Traffic, arguments)
    for name in DRAWN if "trace" in load else ():
        if name in load:
            raise ConfigError(name, "cannot be combined with --trace")
    if "speed" in load and "trace" not in load:
        raise ConfigError("speed", "needs --trace")
    traffic = Traffic(**load)
    traffic = replace(traffic, **normalised(traffic, ConfigError))
    question = given_options(Question, arguments)
    question.pop("output_tokens", None)  # of the load
    engine = simulated(Question(**question), options)
    outcomes: list[tuple[Outcome, float]] = []
    with share_bar(redraws=False) as progress:
        for policy in POLICIES:
            start, tell = time.perf_counter(), partial(progress, policy)
            outcome = simulate(
                traffic, engine, options.replicas, policy, time.perf_counter, tell=tell
            )
            outcomes.append((outcome, time.perf_counter() - start))
    if arguments.json:
        say(json.dumps([{**_figures(outcome), "simulated_in": took} for outcome, took in outcomes]))
    else:
        say_report(as_text(options, traffic, engine, outcomes))
    return 0


def simulated(question: Question, options: Replicas) -> SimulatedEngine:
    """Return a simulated engine of a model on some hardware, with the planner's step times.

    Args:
        question: only its model and the options `PLANNED` count.

    Raises:
        ConfigError: the speed of the hardware is not known, the model does not fit, a tier is
            smaller than a page, or an engine would refuse the limits of its steps.
    """
    seqs, tokens = options.max_num_seqs, options.max_num_batched_tokens
    check_config(EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens))
    shape = read_shape(question.model)
    device, hardware = find_machine(question.hardware)
    question = check_question(question, shape, exact=device.kind == "cpu")
    shape, at = setting_of(shape, device, question, hardware)
    size = StepSize(shape.max_context, seqs, tokens)
    cache = MemoryPlanner.of(shape, at).cache(size, options.block_size)
    blocks = options.num_blocks or cache.num_blocks
    if blocks < 1:
        raise ConfigError("hardware", f"{device.name} has no memory left for a KV block")
    tiers = None if options.kv_tiers is None else read_tiers(options.kv_tiers)
    sizes = [group.bytes_per_token for group in cache.groups]
    return SimulatedEngine(
        blocks=blocks,
        block_size=options.block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        cost=lambda step: step_time(shape, at, step).expected,
        context=shape.max_context,
        groups=cache.groups,
        checkpoints=cache.checkpoints,
        tiers=tier_sizes(tiers, sizes, options.block_size, Notes(), state_bytes=shape.state_bytes),
        memory_rate=options.memory_rate * 1e9,
        disk_rate=options.disk_rate * 1e9,
    )


def _figures(outcome: Outcome) -> dict[str, object]:
    figures = asdict(outcome)
    chosen = figures.pop("chosen")
    del figures["first_tokens"]
    return {
        **figures,
        "imbalance": outcome.imbalance,
        "ttft_p50": outcome.ttft(0.5),
        "ttft_p99": outcome.ttft(0.99),
        "choice_p50": quantile(chosen, 0.5) if chosen else None,
        "choice_p99": quantile(chosen, 0.99) if chosen else None,
    }


def as_text(
    options: Replicas,
    traffic: Traffic,
    engine: SimulatedEngine,
    outcomes: list[tuple[Outcome, float]],
) -> str:
    """Return the outcomes as text."""
    rate = f"at {traffic.rate:g}/s" if traffic.trace is None else f"of {traffic.trace}"
    context, chunk = engine.context // 2, min(engine.context, engine.max_num_batched_tokens)
    head = (
        f"{options.replicas} replicas of {count(engine.blocks)} blocks, "
        f"{count(outcomes[0][0].requests)} turns {rate}; a step takes "
        f"{seconds(engine.cost(prefill(chunk)))} for a prompt of {chunk:,}, "
        f"{seconds(engine.cost(decode(1, context)))} for a token behind {context:,}"
    )
    tiered = engine.tiers is not None
    ideal = outcomes[0][0].ideal_tokens / max(1, outcomes[0][0].prompt_tokens)
    rest = ["of one cache", "busiest", "busy", "TTFT p50", "p99", "preempted", "in"]
    loaded = ["loaded"] * tiered
    rows = [["", "prefix hits", *loaded, *rest]]
    for outcome, took in outcomes:
        rows.append(
            [
                outcome.policy,
                f"{outcome.hit_rate:.1%}",
                *([f"{outcome.loaded_tokens / outcome.prompt_tokens:.1%}"] if tiered else []),
                f"{outcome.hit_tokens / max(1, outcome.ideal_tokens):.2f}",
                f"{outcome.imbalance:.2f} x mean",
                f"{sum(outcome.busy) / len(outcome.busy) / max(outcome.seconds, 1e-9):.0%}",
                seconds(outcome.ttft(0.5)),
                seconds(outcome.ttft(0.99)),
                str(outcome.preemptions),
                f"{took:.1f} s",
            ]
        )
    rows.append(["one cache", f"{ideal:.1%}", *[""] * tiered, "1.00", *[""] * (len(rest) - 1)])
    lines = [head, *columns(rows, "<" + ">" * (len(rows[0]) - 1))]
    if chosen := outcomes[0][0].chosen:
        p50, p99 = quantile(chosen, 0.5), quantile(chosen, 0.99)
        lines.append(f"a choice took {seconds(p50)} (p50), {seconds(p99)} (p99)")
    return "\n".join(lines)

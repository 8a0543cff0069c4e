"""`kvik plan [MODEL]`: memory, speed and cost of a model on some hardware. Loads nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import fill

import msgspec

from kvik.cli.flags import Parser, add_model, add_option_flags, given_options
from kvik.cli.terminal import say_answer
from kvik.config.units import columns, count, dollars, seconds, show_bytes, three
from kvik.planner.cost import Cost
from kvik.planner.parallel import ACTIVATION_BYTES
from kvik.planner.plan import Division, Plan, PlannedSpeed, Question, plan
from kvik.planner.speculation import SpeculationCurve

WIDTH = 100
SHOWN_DRAFTS = (1, 2, 3, 4, 6, 8)  # columns of the table of speculation


def as_text(plan: Plan) -> str:
    """Return a plan for people: rounded, in tables, at most 100 columns wide."""
    sections = [_header(plan), _memory(plan)]
    sections += [] if plan.division is None else [_division(plan, plan.division)]
    if plan.speed is not None:
        sections += [_prefill(plan, plan.speed), _decode(plan, plan.speed)]
    else:
        sections.append(f"no speeds are known ({plan.at.device.unknown})")
    sections += [_matrices(plan), _attention(plan), _weights(plan), _kv(plan)]
    sections += [_context(plan)] if plan.context_parts else []
    if plan.speed is not None:
        sections += [_speculation(plan, curve) for curve in plan.speed.speculation]
    sections.append(_cost(plan, plan.cost))
    notes = [*filter(None, [plan.at.device.doubt]), *plan.shape.notes]
    sections += [fill(f"note: {note}", WIDTH, subsequent_indent="      ") for note in notes]
    return "\n\n".join(sections)


def _header(plan: Plan) -> str:
    model, at, device = plan.shape, plan.at, plan.at.device
    parameters = f"{count(model.parameters)} parameters"
    if 2 * model.active_parameters < model.parameters:
        parameters += f", {count(model.active_parameters)} active"
    heads = f"{model.num_heads} heads"
    if model.attention != "MLA":
        heads = f"{model.num_heads} query and {model.num_kv_heads} key/value heads"
    devices = f"{at.devices} x {device.name}" if at.devices > 1 else device.name
    facts = [show_bytes(device.memory)]
    if device.bandwidth is not None:
        facts.append(f"{three(device.bandwidth / 1e9)} GB/s")
        facts.append(_operations(device.rate(plan.arithmetic), plan.arithmetic))
    suffix = " each" if at.devices > 1 else ""
    shared = [f"{name} {size}" for name, size in (("tp", at.tp), ("pp", at.pp)) if size > 1]
    shared += ["whole experts"] if at.expert_parallel else []
    shared += [f"in {at.parts} processes"] if at.exact and shared else []
    setting = [
        f"batch {at.batch:,} at context {at.context:,}",
        f"weights {at.weight_format}",
        f"KV cache {at.kv_format}",
        *shared,
    ]
    work = count(plan.flops_per_token)
    rows = [
        ["model", f"{model.name} ({model.architecture})"],
        ["", parameters],
        [
            "",
            f"{model.num_layers} layers of width {model.hidden_size:,}, {heads} of "
            f"{model.head_dim} ({model.attention}), context {model.max_context:,}",
        ],
        ["hardware", f"{devices}: {', '.join(facts)}{suffix}"],
        *([["", plan.source]] if plan.source else []),
        ["asked", ", ".join(setting)],
        ["work", f"{work} operations for a token behind a full context"],
    ]
    return "\n".join(f"{name:10}{value}" for name, value in rows)


def _memory(plan: Plan) -> str:
    memory, is_divided = plan.memory, plan.at.devices > 1
    total = f"{show_bytes(plan.weight_bytes)} in all, " if is_divided else ""
    kv = f"{plan.kv_bytes_per_token:,} bytes per token"
    if memory.kv_per_token != plan.kv_bytes_per_token:
        kv += f" in all, {memory.kv_per_token:,} here"
    drafter = f", {show_bytes(memory.draft_weights)} of the drafter" if memory.draft_weights else ""
    if memory.fits:
        verdict = f"fits, {show_bytes(memory.limit - memory.total)} left"
    else:
        verdict = f"DOES NOT FIT: {show_bytes(memory.missing)} too much"
    rows = [
        [
            "weights",
            show_bytes(memory.weights),
            f"{total}{8 * plan.weight_bytes / plan.shape.parameters:.3g} bits a parameter{drafter}",
        ],
        [
            "KV cache",
            show_bytes(memory.kv_cache),
            f"{kv}; {show_bytes(memory.kv_per_request)} for each request",
        ],
        *(
            [["", show_bytes(memory.states), "of it states, with copies for prefix hits"]]
            if plan.shape.state_bytes
            else []
        ),
        ["activations", show_bytes(memory.activations), f"steps of {memory.step_tokens:,} tokens"],
        ["runtime", show_bytes(memory.runtime), "libraries, graphs, tables, buffers of loading"],
        ["total", show_bytes(memory.total), verdict],
    ]
    where = "memory of the fullest device" if is_divided else "memory"
    where += " of all processes" if plan.at.exact and plan.at.parts > 1 else ""
    lines = [f"{where}, of {show_bytes(memory.limit)} that may be used", *columns(rows, "<><")]
    if 10 * memory.kv_padding > memory.kv_cache:
        lines.append(
            f"  {show_bytes(memory.kv_padding)} of the KV cache stay empty: blocks are whole, as "
            "wide as the most layers need,\n  and layers with a window keep what a step adds"
        )
    return "\n".join([*lines, *_what_fits(plan), *_waste(plan), *_parts(plan)])


def _what_fits(plan: Plan) -> list[str]:
    memory = plan.memory
    if memory.fits:
        longest = f"{plan.longest_context:,}"
        if plan.longest_context == plan.shape.max_context:
            longest += ", all that the model takes"
        return [
            f"  largest batch at context {plan.at.context:,}: {memory.largest_batch:,}",
            f"  longest context at batch {plan.at.batch:,}: {longest}",
        ]
    if not plan.remedies:
        return ["  no setting makes it fit this hardware"]
    rows = [[remedy.flags, show_bytes(remedy.total)] for remedy in plan.remedies]
    return ["  would fit", *columns(rows, "<>", indent=4)]


def _parts(plan: Plan) -> list[str]:
    """Return the memory of each process, or of a GPU of each stage; equal ones share a row."""
    at, parts = plan.at, plan.parts
    if len(parts) <= 1:
        return []
    shown: dict[tuple[int, ...], list[str]] = {}
    for part in parts:
        sizes = (part.layers, part.weights, part.kv_cache, part.activations, part.runtime)
        name = f"{part.rank}" if at.pp == 1 else f"{part.stage}"
        name += f".{part.rank}" if at.exact and at.tp > 1 and at.pp > 1 else ""
        shown.setdefault((part.stage, *sizes), []).append(name)
    rows = []
    for (_, layers, *figures), names in shown.items():
        several = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
        rows.append([several, f"{layers}", *map(show_bytes, figures), show_bytes(sum(figures))])
    of = "process" if at.exact else "stage"
    header = [of, "layers", "weights", "KV cache", "activations", "runtime", "total"]
    title = f"  {'each process' if at.exact else 'a device of each stage'}"
    if at.exact and at.pp > 1:
        title += ", by stage" + (" and rank" if at.tp > 1 else "")
    return [title, *columns([header, *rows], "<>>>>>>", indent=4)]


def _waste(plan: Plan) -> list[str]:
    waste, max_context = plan.kv_waste, plan.shape.max_context
    lines = [
        f"  blocks of {waste.block_size} tokens leave {show_bytes(waste.paged)} empty on average, "
        "half a block of each request"
    ]
    if waste.empty > 0:
        lines.append(
            f"  reserving all {max_context:,} tokens of context for each would take "
            f"{show_bytes(waste.reserved)} a request,\n  {waste.empty:.0%} of it empty: "
            f"{waste.batch:,} would fit in place of {plan.memory.largest_batch:,}"
        )
    return lines


def _division(plan: Plan, division: Division) -> str:
    at, ops = plan.at, division.collectives
    units = "processes" if at.exact else "GPUs"
    lines = [f"divided among {at.parts} {units}, tp {at.tp} x pp {at.pp}: the {division.cut} cut"]
    if ops is not None:
        lines.append(
            f"  {ops.layer} {ops.kind}s in a layer, {division.layer_bytes:,} bytes of a token; "
            f"{ops.count:,} in a step" + _per_request(division.exchange)
        )
    if (exact := division.exact) is not None:
        lines.append(
            f"  the exact cut: {exact.layer} {exact.kind}s in a layer, "
            f"{exact.numbers * ACTIVATION_BYTES:,} bytes of a token; {exact.count:,} in a step"
        )
    if division.hop_bytes:
        lines.append(
            f"  hops between stages: {at.pp - 1}, {division.hop_bytes:,} bytes of a token"
            + _per_request(division.hop)
        )
    if division.step:
        lines.append(f"  these take {seconds(division.step)} of a step that decodes {at.group:,}")
    elif at.exact and at.device.rated:
        lines.append("  what this takes is not known: kvik calibrate measures it")
    if division.rate is not None and division.rate_of_one is not None:
        lines.append(
            f"  stages share one memory, and each step in flight reads all weights: "
            f"{three(division.rate)} tokens/s,\n  with --pp 1 {three(division.rate_of_one)} "
            f"(decode at batch {at.batch:,}). Stages help where each has a memory of its own"
        )
    return "\n".join(lines)


def _per_request(seconds_of_one: float | None) -> str:
    return "" if seconds_of_one is None else f", {seconds(seconds_of_one)} each"


def _matrices(plan: Plan) -> str:
    rows = []
    for row in plan.attention_matrices:
        cells = [f"{row.prompt:,}", show_bytes(row.matrix)]
        cells += [show_bytes(row.moved), show_bytes(row.tiled)]
        if row.seconds is not None and row.tiled_seconds is not None:
            cells += [seconds(row.seconds), seconds(row.tiled_seconds)]
        rows.append(cells)
    header = ["prompt", "a layer's matrix", "moved with it", "in tiles"]
    if plan.speed is not None:
        header += ["takes", "in tiles"]
    title = "attention of one prompt, with the matrix of all scores and in tiles (FlashAttention)"
    return _table(plan, title, header, rows, ">" * len(header))


def _prefill(plan: Plan, speed: PlannedSpeed) -> str:
    measured = plan.at.device.measured
    header = ["prompt", "at least", "tokens/s", "bound by"]
    rows = []
    for row in speed.prefill:
        cells = [f"{row.tokens:,}", seconds(row.floor), three(row.tokens / row.floor)]
        if measured:
            cells += [seconds(row.expected), three(row.tokens / row.expected)]
        rows.append([*cells, row.bound])
    if measured:
        header[3:3] = ["expected", "tokens/s"]
    return _table(plan, "prefill, one prompt", header, rows, ">" * (len(header) - 1) + "<")


def _decode(plan: Plan, speed: PlannedSpeed) -> str:
    measured = plan.at.device.measured
    header = [
        "batch",
        "ceiling tokens/s",
        "by reading",
        "by arithmetic",
        "step",
        "bound by",
        "fits",
    ]
    rows = []
    for row in speed.decode:
        cells = [
            f"{row.batch:,}",
            three(row.ceiling),
            three(row.reading),
            three(row.computing),
            seconds(row.floor),
        ]
        if measured:
            cells.append(three(row.expected))
        rows.append([*cells, row.bound, _fits(row.fits)])
    if measured:
        header.insert(5, "expected tokens/s")
    title = f"decode at context {plan.at.context:,}"
    align = ">" * (len(header) - 2) + "<<"
    if speed.compute_bound_batch is None:
        turn = "never compute-bound: each request reads more than it computes"
    else:
        turn = f"compute-bound from batch {speed.compute_bound_batch:,} on, at peak rates"
    return "\n".join([_table(plan, title, header, rows, align), f"  {turn}", *_served(plan)])


def _served(plan: Plan) -> list[str]:
    """Return the rates of whole requests."""
    rates, (prompt, output) = plan.rates, plan.request
    if rates is None or rates.prefill is None or not output:
        return []
    batch = min(plan.at.batch, plan.memory.largest_batch)
    return [
        f"  requests of {prompt:,} + {output:,}, {batch:,} at a time: "
        f"{three(rates.prefill)} prompt tokens/s or {three(rates.decode)} output tokens/s,\n"
        f"  so {three(rates.output_rate(prompt, output))} output tokens/s of a copy that does both"
    ]


def _attention(plan: Plan) -> str:
    rows = [
        [
            f"{row.attention}{_star(row.own)}",
            f"{row.kv_heads}" if row.kv_heads else "latent",
            f"{row.kv_per_token:,}",
            show_bytes(row.kv_total),
            _or_dash(row.ceiling),
        ]
        for row in plan.attention_variants
    ]
    header = ["", "KV heads", "bytes per token", _total(plan), "ceiling tokens/s"]
    title = f"attention variants, {plan.at.kv_format} cache (* the model's own)"
    table = _table(plan, title, header, rows, "<>>>>")
    unit = "process" if plan.at.exact else "device"
    return f"{table}\n  each {unit} holds the whole latent" if plan.at.tp > 1 else table


def _weights(plan: Plan) -> str:
    rows = []
    for row in plan.weight_formats:
        ceilings = [_or_dash(row.single)]
        if plan.at.batch > 1:
            ceilings.append(_or_dash(row.ceiling))
        rows.append(
            [
                f"{row.format}{_star(row.format == plan.at.weight_format)}",
                show_bytes(row.bytes),
                f"{row.bits:.2f}",
                *ceilings,
                f"{row.largest_batch:,}",
                _fits(row.fits),
            ]
        )
    header = ["", "weights", "bits", "tokens/s at batch 1"]
    if plan.at.batch > 1:
        header.append(f"at batch {plan.at.batch:,}")
    title = "weight formats (* asked; speeds are ceilings of decode)"
    align = "<" + ">" * len(header) + "<"
    return _table(plan, title, [*header, "largest batch", "fits"], rows, align)


def _kv(plan: Plan) -> str:
    rows = [
        [
            f"{row.format}{_star(row.format == plan.at.kv_format)}",
            f"{row.per_token:,}",
            show_bytes(row.total),
            _or_dash(row.ceiling),
            f"{row.largest_batch:,}",
            _fits(row.fits),
        ]
        for row in plan.kv_formats
    ]
    header = ["", "bytes per token", _total(plan), "ceiling tokens/s", "largest batch", "fits"]
    return _table(plan, "KV cache formats (* asked)", header, rows, "<>>>><")


def _context(plan: Plan) -> str:
    at = plan.at
    rows = []
    for row in plan.context_parts:
        wider = (row.wider_prefill, row.wider_decode)
        rows.append(
            [
                f"{row.parts} x {at.tp}{_star(row.parts == 1)}",
                show_bytes(row.kv_cache),
                _fits(row.fits),
                seconds(row.prefill),
                seconds(row.sending) if row.sending else "-",
                seconds(row.decode),
                *("-" if time is None else seconds(time) for time in wider),
            ]
        )
    times = ["prompt", "of it sent", "step", "all in tp: prompt", "step"]
    title = (
        f"context parallelism (kvik does not run it): {at.context:,} tokens of each request in "
        f"parts, each\n  on {at.tp} GPUs of its own (* the plan's own); least times"
    )
    table = [["GPUs", "KV cache each", "fits", *times], *rows]
    return "\n".join([title, *columns(table, "<><>>>>>")])


def _speculation(plan: Plan, curve: SpeculationCurve) -> str:
    shown = [curve.drafts.index(drafts) for drafts in SHOWN_DRAFTS]
    rows = []
    for row in curve.rows:
        best = f"{row.best:.2f} with {row.best_drafts}" if row.best_drafts else "none"
        gains = [f"{row.speed_ups[i]:.2f}" for i in shown]
        rows.append([f"{row.acceptance:.0%} accepted", *gains, best])
    cost = "drafts cost nothing (such as n-grams of the prompt)"
    if curve.draft_cost:
        cost = f"a draft costs {three(curve.draft_cost)} of a step"
    checks = [f"{curve.verify_costs[i]:.2f}" for i in shown]
    return _table(
        plan,
        f"speculative decoding, speed-up at batch {curve.batch:,}: {cost}",
        ["drafts", *(str(curve.drafts[i]) for i in shown), "best"],
        [*rows, ["time of a check", *checks, ""]],
        "<" + ">" * (len(shown) + 1),
    )


def _cost(plan: Plan, cost: Cost | None) -> str:
    if cost is None:
        if not plan.memory.largest_batch:
            return "cost: it does not fit"
        return "cost: give --price" + ("" if plan.speed else " and --tokens-per-second")
    batch = min(plan.at.batch, plan.memory.largest_batch)
    rate = "as expected here" if plan.at.device.measured else "at the ceiling, so at least"
    rate = f"batch {batch:,}, {rate}"
    if plan.measured_rate is not None:
        rate = f"measured at {three(plan.measured_rate)} output tokens/s"
    requests = f"requests of {cost.prompt_tokens:,} + {cost.output_tokens:,}"
    lines = [
        f"cost at ${cost.price:,.2f} an hour, {rate}",
        f"  {dollars(cost.mixed)} per 1,000 tokens of {requests}, prompt and output",
    ]
    if cost.input is not None and cost.output is not None:
        lines.append(
            f"  {dollars(cost.input)} per million input tokens, "
            f"{dollars(cost.output)} per million output tokens"
        )
    lines.append(
        f"  {dollars(cost.per_hour)} an hour, {dollars(cost.per_day)} a day, "
        f"{dollars(cost.per_month)} a month"
    )
    if cost.load is not None and cost.busy is not None:
        copies = f"{cost.copies} {'copy' if cost.copies == 1 else 'copies'} of the model"
        lines += [
            f"  that is {copies}, busy {cost.busy:.0%} of the time",
            f"  a day has {count(cost.load.tokens)} tokens, {count(cost.load.requests)} {requests}",
        ]
    return "\n".join(lines)


def _total(plan: Plan) -> str:
    return f"{plan.at.batch:,} x {plan.at.context:,} tokens"


def _star(mark: bool) -> str:
    return " *" if mark else ""


def _fits(fits: bool) -> str:
    return "yes" if fits else "no"


def _operations(rate: float, arithmetic: str) -> str:
    size, prefix = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    unit = "OP/s" if arithmetic.startswith("int") else "FLOP/s"
    return f"{three(rate / size)} {prefix}{unit} ({arithmetic})"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else three(value)


def _table(
    plan: Plan, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], align: str
) -> str:
    """Return a table, without the speed columns if speeds are unknown."""
    indices = [
        i
        for i, name in enumerate(header)
        if plan.speed is not None or not ("tokens/s" in name or name.startswith("at batch"))
    ]
    lines = [[row[i] for i in indices] for row in (header, *rows)]
    return "\n".join([title, *columns(lines, [align[i] for i in indices])])


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "plan",
        "[MODEL]",
        "Predict memory, speed and cost of a model on some hardware. Loads nothing.",
    )
    add_model(parser, "a folder, hub id or config.json")

    add_option_flags(parser, "the question", Question, left_out=("model",))
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    return parser


def run(arguments: argparse.Namespace) -> int:
    answer = plan(question_of(arguments))
    say_answer(as_object(answer), as_text(answer), as_json=arguments.json)
    return 0


def question_of(arguments: argparse.Namespace) -> Question:
    """Return the question that the arguments ask."""
    return Question(**given_options(Question, arguments))


# Fields of a model's shape, of a setting and of a plan that are shown as they are.
OF_SHAPE = (
    *("name", "architecture", "attention", "parameters", "active_parameters", "hidden_size"),
    *("head_dim", "max_context", "notes"),
)
OF_SETTING = ("context", "batch", "weight_format", "kv_format", "tp", "pp", "expert_parallel")
OF_PLAN = (
    *("parts", "division", "kv_waste", "remedies", "speed", "attention_matrices"),
    *("attention_variants", "weight_formats", "kv_formats", "context_parts", "rates"),
    *("measured_rate", "cost"),
)


def as_object(answer: Plan) -> dict[str, object]:
    """Return a plan in plain types with exact numbers."""
    shape, at, device, memory = answer.shape, answer.at, answer.at.device, answer.memory
    sums = {"total": memory.total, "missing": memory.missing, "fits": memory.fits}
    facts = {
        "model": {
            **{name: getattr(shape, name) for name in OF_SHAPE},
            "layers": shape.num_layers,
            "heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads,
            "weight_bytes": answer.weight_bytes,
            "kv_bytes_per_token": answer.kv_bytes_per_token,
            "flops_per_token": answer.flops_per_token,
            "runs": shape.spec is not None,
        },
        "device": {
            "name": device.name,
            "count": at.devices,
            "memory": int(device.memory),
            "bandwidth": device.bandwidth,
            "rate": device.rate(answer.arithmetic) if device.rated else None,
            "arithmetic": answer.arithmetic,
            "measured": device.measured,
            "source": answer.source,
            "unknown": device.unknown,
            "doubt": device.doubt,
        },
        **{name: getattr(at, name) for name in OF_SETTING},
        "memory": {**asdict(memory), "longest_context": answer.longest_context, **sums},
        "request": {"prompt": answer.request[0], "output": answer.request[1]},
        **{name: getattr(answer, name) for name in OF_PLAN},
    }
    plain: dict[str, object] = msgspec.to_builtins(facts)
    return plain

"""A short table of all results, for a reader who sees only the end of the output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from notes import Record

NAMED = 3  # listed parts of one job that were not measured
WIDTH, HEAD = 160, 22  # characters
LISTED, SHOWN = 5, 2  # failures, and wrong results; lines of a traceback before its last
CEILINGS = {"copy": (1e12, "TB/s"), "bf16": (1e12, "TFLOP/s")}
CEILINGS |= {"fp8": (1e12, "TFLOP/s"), "int8": (1e12, "TOP/s")}
UNMEASURED = "not measured"
PREFILLED = {"shape": "8b", "format": "bf16"}
PREFILLS = ("prefill 8k", "prefill 8k, torch's attention")


class Found:
    """Records by kind and name."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def of(self, kind: str, section: str | None = None) -> list[Record]:
        return [
            r for r in self.records if r["kind"] == kind and section in (None, r.get("section"))
        ]

    def fact(self, name: str, **about: object) -> Record | None:
        return self._named("fact", name, about)

    def value(self, name: str, **about: object) -> float | None:
        record = self.fact(name, **about)
        return None if record is None else float(str(record["value"]))

    def rate(self, name: str, **about: object) -> Record | None:
        return self._named("rate", name, about)

    def share(self, rate: Record | None) -> float | None:
        """Return the share of the ceiling that was measured in the same call."""
        ceiling = self.value(str(rate["ceiling"])) if rate else None
        return done(rate) / ceiling if rate and ceiling else None

    def _named(self, kind: str, name: str, about: dict[str, object]) -> Record | None:
        for record in reversed(self.records):
            alike = all(record.get(key) == value for key, value in about.items())
            if record["kind"] == kind and record["name"] == name and alike:
                return record
        return None


def done(rate: Record) -> float:
    """Return bytes or operations per second."""
    return number(rate, "moved", "operations") / number(rate, "seconds")


def number(record: Record, *names: str) -> float:
    return sum(float(str(record[name])) for name in names)


def render(records: Sequence[Record], seconds: float) -> str:
    """Return all sections; what did not run is left out, or listed as not measured."""
    found = Found(records)
    lines = [
        *_machine(found),
        *_checks(found),
        *_kernels(found),
        *_advice(found),
        *_models(found),
        *_peers(found),
        *_start(found),
        *_tiers(found),
        *_served(found),
        *_trouble(found),
        *_bars(found),
        f"{seconds:.0f} s; * not captured; shares are of the ceilings above",
    ]
    return "\n".join(line[:WIDTH] for line in lines)


def _machine(found: Found) -> list[str]:
    def said(name: str) -> str:
        record = found.fact(name)
        return "?" if record is None else str(record["value"])

    names = ("torch", "triton", "python", "transformers", "driver", "date")
    lines = [f"{said('gpu')}: " + ", ".join(f"{name} {said(name)}" for name in names)]
    rates = []
    for name in ("copy", "read", "bf16", "fp8", "int8"):
        unit, word = CEILINGS["copy" if name == "read" else name]
        value = found.value(name)
        rates.append(f"{name} " + ("?" if value is None else f"{value / unit:.2f} {word}"))
    launch = found.value("launch")
    rates.append("launch " + ("?" if launch is None else f"{launch * 1e6:.1f} us"))
    return [*lines, "ceilings: " + ", ".join(rates)]


def _checks(found: Found) -> list[str]:
    checks = found.of("check")
    if not checks:
        return []
    by_op: dict[str, Counter[bool]] = {}
    for check in checks:
        by_op.setdefault(str(check.get("op", check["name"])), Counter())[bool(check["passed"])] += 1
    cells = [
        f"{op} {counts[True]}/{counts.total()}" + ("" if counts[True] == counts.total() else " !")
        for op, counts in sorted(by_op.items())
    ]
    lines = ["correct: " + "; ".join(cells[i : i + 9]) for i in range(0, len(cells), 9)]
    wrong = [c for c in checks if not c["passed"]]
    lines += [f"  WRONG {c['name']}: {c['detail']}" for c in wrong[:LISTED]]
    return [*lines, *_more(wrong)]


def _kernels(found: Found) -> list[str]:
    """Return a line or two for each group: microseconds, and the share of the ceiling."""
    rows: dict[str, list[str]] = {}
    for rate in found.of("rate", "kernels"):
        name, job = str(rate["name"]), str(rate["job"])
        head, cell = job, name
        if name.startswith("layer "):
            head, _, cell = name.rpartition(", ")
        rows.setdefault(head, []).append(f"{cell} {_time(rate)}{_share(found, rate)}")
    return [line for head, cells in rows.items() for line in _packed(head, cells)]


def _packed(head: str, cells: Sequence[str]) -> list[str]:
    """Return the cells in lines, as many in each as fit."""
    lines, line = [], f"{head:<{HEAD}}"
    for cell in cells:
        if len(line) + len(cell) > WIDTH and line.strip():
            lines.append(line.rstrip("; "))
            line = " " * HEAD
        line += f"{cell}; "
    return [*lines, line.rstrip("; ")]


def _time(rate: Record) -> str:
    seconds = number(rate, "seconds")
    eager = "" if rate.get("captured", True) else "*"
    return (f"{seconds * 1e6:.1f}us" if seconds < 1e-3 else f"{seconds * 1e3:.2f}ms") + eager


def _share(found: Found, rate: Record) -> str:
    share = found.share(rate)
    return "" if share is None else f" {share:.0%}"


def _advice(found: Found) -> list[str]:
    """Say whether torch's attention is faster on prompts: `kvik calibrate --only gpu` chooses."""
    ours, theirs = found.rate("prefill 8k bf16"), found.rate("prefill 8k sdpa")
    if ours is None or theirs is None:
        return []
    ratio = number(ours, "seconds") / number(theirs, "seconds")
    line = f"attention of an 8k prompt: torch's SDPA is {ratio:.2f} x as fast as Triton's"
    whole, by_torch = (found.rate(name, **PREFILLED) for name in PREFILLS)
    if whole is not None and by_torch is not None:
        gain = number(whole, "seconds") / number(by_torch, "seconds")
        line += f"; prefills of 8B are {gain:.3f} x as fast with it"
    return [line]


def _start(found: Found) -> list[str]:
    seconds, reading = found.fact("first answer"), found.value("first answer: reading")
    if seconds is None or reading is None:
        return []
    text = f"first answer of 8B {number(seconds, 'value'):.1f} s after its process began, "
    return [text + f"{reading:.0%} of it reading {number(seconds, 'bytes') / 1e9:.1f} GB"]


def _tiers(found: Found) -> list[str]:
    """Return what the tiers of the KV cache gain and cost, and the speed of the bus."""
    names = [f"computed over loaded from {tier}" for tier in ("memory", "disk")]
    names.append("throughput with the memory tier over without")
    values = {name: found.value(name) for name in names}
    cells = [f"{name} {value:.3g}" for name, value in values.items() if value is not None]
    for way in ("to", "from"):
        rate = found.value(f"bytes per second {way} the GPU")
        cells += [] if rate is None else [f"{way} the GPU {rate / 1e9:.1f} GB/s"]
    return _packed("tiers", cells) if cells else []


def _served(found: Found) -> list[str]:
    """Return the server's times at each rate, p50 / p99, and its highest throughput."""

    def times(name: str, label: str) -> str:
        values = (found.value(f"{name} {part} at {label}") for part in ("p50", "p99"))
        return " / ".join("?" if value is None else f"{value * 1e3:.1f}" for value in values)

    cells = []
    for rate in found.of("fact"):
        head, _, label = str(rate["name"]).partition("tokens at ")
        if label and not head:
            what = f"first {times('ttft', label)} ms, next {times('token', label)} ms"
            cells.append(f"{label}: {what}, {number(rate, 'value'):.0f} tok/s")
    return _packed("server, 8b bf16", cells) if cells else []


def _models(found: Found) -> list[str]:
    """Return each model's step times and their shares of the ceiling, for a prefill of the GEMM
    rate."""
    lines = []
    for shape, format in dict.fromkeys(
        (str(r["shape"]), str(r["format"])) for r in found.records if "shape" in r
    ):
        about = {"shape": shape, "format": format}
        cells = [
            str(rate["name"]).removeprefix("decode ").replace(" x ", "x")
            + f" {_time(rate)}{_share(found, rate)}"
            for rate in found.of("rate")
            if (rate.get("shape"), rate.get("format")) == (shape, format)
        ]
        shown = [(f"busy {batch}", "{:.1%}") for batch in (256, 64, 32, 1)]
        for name, form in (*shown, ("load", "{:.0f} tok/s")):
            value = found.value(name, **about)
            cells += [] if value is None else [f"{name} {form.format(value)}"]
        graphs = found.fact("graph bytes", **about)
        if graphs is not None:
            taken, planned = (number(graphs, key) / 2**20 for key in ("value", "planned"))
            cells.append(f"{graphs['of']} graphs {taken:.0f} of {planned:.0f} MiB")
        memory = found.fact("memory", **about)
        if memory is not None:
            used, planned = (number(memory, key) / 2**30 for key in ("value", "planned"))
            cells.append(f"memory without KV {used:.2f} of {planned:.2f} GiB planned")
        ready = found.value("ready", **about)
        lines += _packed(f"{shape} {format}" + (f", {ready:.0f} s" if ready else ""), cells)
    return lines


def _peers(found: Found) -> list[str]:
    cells = [f"{r['name']} {_time(r)}{_share(found, r)}" for r in found.of("rate", "peers")]
    theirs = found.value("transformers load")
    cells += [] if theirs is None else [f"its continuous batching, same load {theirs:.0f} tok/s"]
    return _packed("peers", cells) if cells else []


def _trouble(found: Found) -> list[str]:
    failures, missed = found.of("failure"), found.of("missed")
    lines = []
    for failure in failures[:LISTED]:
        said = failure["error"]
        *before, last = said if isinstance(said, list) and said else [said]
        lines.append(f"FAILED {failure['job']}: {failure['name']}: {last}")
        lines += [f"    {line.strip()}" for line in before[-SHOWN:]]
    lines += _more(failures)
    for why in dict.fromkeys(str(record["why"]) for record in missed):
        alike = [record for record in missed if record["why"] == why]
        lines.append(f"LEFT OUT ({len(alike)}), {why}: {', '.join(_by_job(alike))}")
    return lines


def _by_job(missed: Sequence[Record]) -> list[str]:
    """Return the names of the parts of each job, or their number if there are many."""
    jobs: dict[str, list[str]] = {}
    for record in missed:
        jobs.setdefault(str(record["job"]), []).append(str(record["name"]))
    return [
        name
        for job, names in jobs.items()
        for name in ([f"{job} ({len(names)})"] if len(names) > NAMED else names)
    ]


def _more(some: Sequence[Record]) -> list[str]:
    return [f"  and {len(some) - LISTED} more"] if len(some) > LISTED else []


@dataclass(frozen=True, slots=True)
class Bar:
    """least: the smallest value of `measure` that passes. `measure` returns None if unmeasured."""

    name: str
    least: float
    measure: Callable[[Found], float | None]
    form: str = "{:.0%}"


def _decode(format: str) -> Callable[[Found], float | None]:
    return lambda f: f.share(f.rate("decode 1 x 1k", shape="8b", format=format))


def _busy(batch: int) -> Callable[[Found], float | None]:
    return lambda f: f.value(f"busy {batch}", shape="8b", format="bf16")


def _best_prefill(found: Found) -> float | None:
    """Return the share with the faster attention, which an engine uses on a calibrated machine."""
    shares = (found.share(found.rate(name, **PREFILLED)) for name in PREFILLS)
    return max((share for share in shares if share is not None), default=None)


def _over_peer(found: Found) -> float | None:
    ours, theirs = found.value("load", shape="8b", format="bf16"), found.value("transformers load")
    return ours / theirs if ours and theirs else None


def _passed(*ops: str) -> Callable[[Found], float | None]:
    """Return the share of the checks of some operations that passed; none named: all kernels."""

    def measure(found: Found) -> float | None:
        others = ("soak", "pytest", "greedy tokens", "invariance")
        chosen = [
            c for c in found.of("check") if (c["op"] in ops if ops else c["op"] not in others)
        ]
        return sum(bool(c["passed"]) for c in chosen) / len(chosen) if chosen else None

    return measure


BARS = (
    Bar("decode 8B bf16, batch 1, 1k: of bandwidth", 0.85, _decode("bf16")),
    Bar("decode 8B int4, batch 1, 1k: of bandwidth", 0.70, _decode("int4")),
    Bar("batch 256: tokens/s over transformers'", 3.0, _over_peer, "{:.2f} x"),
    Bar(
        "prefill 8B bf16, 8k: of the GEMM rate",
        0.65,
        _best_prefill,
    ),
    Bar(
        "prefill 8B bf16, 2k: of the GEMM rate",
        0.65,
        lambda f: f.share(f.rate("prefill 2k", **PREFILLED)),
    ),
    Bar(
        "attention prefill 8k: of the GEMM rate",
        0.55,
        lambda f: f.share(f.rate("prefill 8k bf16")),
    ),
    Bar(
        "attention decode 64 x 8k: of bandwidth",
        0.80,
        lambda f: f.share(f.rate("decode 64 x 8k bf16")),
    ),
    Bar("GPU busy at batch 256, 8B bf16", 0.97, _busy(256), "{:.1%}"),
    Bar("GPU busy at batch 64, 8B bf16", 0.97, _busy(64), "{:.1%}"),
    Bar("GPU busy at batch 32, 8B bf16", 0.97, _busy(32), "{:.1%}"),
    Bar(
        "first answer of 8B: time reading weights",
        0.5,
        lambda f: f.value("first answer: reading"),
    ),
    Bar("kernels within tolerance", 1.0, _passed(), "{:.1%}"),
    Bar("greedy tokens equal the CPU's", 1.0, _passed("greedy tokens")),
    Bar("memory does not grow", 1.0, _passed("soak")),
)


def _bars(found: Found) -> list[str]:
    lines = ["bar                                            wanted   found"]
    for bar in BARS:
        value = bar.measure(found)
        text = UNMEASURED if value is None else bar.form.format(value)
        verdict = "" if value is None else "  met" if value >= bar.least else "  MISSED"
        lines.append(f"{bar.name:<46}{bar.form.format(bar.least):>8}   {text}{verdict}")
    return lines

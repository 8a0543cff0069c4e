"""What the runs of a comparison say: rates, ratios within rounds, and whether answers are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import median

from kvik_bench.peers.compare import Comparison, Found
from kvik_bench.peers.engine_entries import OWN
from kvik_bench.peers.engines.protocol import Workload
from kvik_bench.report.result import Chart, Figure, Result, Row
from kvik_bench.report.table import show_figure

Tokens = Sequence[Sequence[int]]  # [rows, output]

START = "from the start of the process to the first token of a prompt of one token"
PEAK = "of the largest process of a run, mapped pages of weight files included"
RATIO = "rate of kvik in the same format over the rate of this engine, within a round"
EQUAL = "output tokens that are those of kvik in the same format, place by place"
REASON = 80  # characters of a failure that are shown in the table
EXACT = "fp32"  # the format in which engines should agree


def to_result(comparison: Comparison, found: Found, facts: Mapping[str, str]) -> Result:
    """A row for each engine, by format, kvik first; and one for each that could not be run."""
    entries, absent = comparison.engines.entries, comparison.engines.absent
    readings = _Readings(comparison, found)
    rows: list[Row] = []
    remarks: list[str] = []
    for form in dict.fromkeys(entry.format for entry in entries.values()):
        alike = [name for name, entry in entries.items() if entry.format == form]
        own = [name for name in alike if entries[name].adapter == OWN]
        peers = [name for name in alike if entries[name].adapter != OWN]
        rows += [readings.own_row(name) for name in own]
        rows += [readings.peer_row(name, own[0]) for name in peers]
        remarks += readings.best_remarks(form, peers, own[0])
        remarks += readings.equality_remark(form, peers, own[0])
    rows += [Row(name, (), {"failed": reason}) for name, reason in absent.items()]
    remarks += [f"{name} failed: {why}" for name, why in readings.long_reasons()]
    if comparison.engines.left_out:
        names = ", ".join(comparison.engines.left_out)
        remarks.append(f"Not here, or in need of a converted model (--config): {names}.")
    charts = [
        Chart("bars", f"kvik beside others, {work.name}", work.name)
        for work in comparison.workloads
        if any(row.figure(work.name) for row in rows)
    ]
    return Result("compare", facts, tuple(rows), tuple(remarks), tuple(charts))


def equal_places(ours: Tokens, theirs: Tokens) -> tuple[int, int]:
    """(tokens that are equal at the same place, all tokens)."""
    pairs = [p for a, b in zip(ours, theirs, strict=True) for p in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs), len(pairs)


def first_differences(ours: Tokens, theirs: Tokens) -> list[int]:
    """For each row, how many tokens are equal before the first that is not."""
    rows = zip(ours, theirs, strict=True)
    return [
        sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(a, b, strict=True))) for a, b in rows
    ]


class _Readings:
    """Takes figures out of what was found."""

    def __init__(self, comparison: Comparison, found: Found) -> None:
        self._comparison = comparison
        self._found = found
        self._rounds = range(comparison.rounds)

    def own_row(self, name: str) -> Row:
        return Row(name, tuple(self._measured(name)), self._facts(name))

    def peer_row(self, name: str, own: str) -> Row:
        figures, facts = self._measured(name), self._facts(name)
        for work in self._comparison.workloads:
            figures += self._ratio(work, own, name)
        figures += self._equality(name, own)
        places = self._differences(name, own)
        if places:
            facts["first difference"] = self._where(places)
        series = {
            f"tokens before the first difference, {work}": tuple(map(float, found))
            for work, found in places.items()
        }
        return Row(name, tuple(figures), facts, series)

    def best_remarks(self, form: str, peers: Sequence[str], own: str) -> list[str]:
        if not peers:
            return [f"{form}: no other engine to compare with."]
        remarks = []
        for work in self._comparison.workloads:
            best = self._best(peers, work)
            for ratio in self._ratio(work, own, best) if best is not None else ():
                remarks.append(
                    f"{work.name}: {own} is {show_figure(ratio)} times as fast as {best}, the best "
                    f"other {form}."
                )
        return remarks

    def equality_remark(self, form: str, peers: Sequence[str], own: str) -> list[str]:
        shares = [f.median for name in peers for f in self._equality(name, own)]
        if not shares or min(shares) == 100:
            return []
        if form == EXACT:
            return [f"{form}: engines should agree but for ties of two tokens; look where not."]
        return [
            f"{form}: each engine rounds and quantises in its own way, so greedy texts part where "
            f"two tokens are nearly as likely, with random weights soon; {EXACT} should agree."
        ]

    def long_reasons(self) -> list[tuple[str, str]]:
        """(engine, reason) of failures that the table cuts short."""
        found = [(name, reason) for (name, _), reason in self._found.failures.items()]
        found += self._comparison.engines.absent.items()
        return [pair for pair in dict.fromkeys(found) if len(pair[1]) > REASON]

    def _rate(self, name: str, work: Workload, number: int) -> float | None:
        for answer in self._found.answers.get((name, number), ()):
            if work.name in answer.rates:
                return median(answer.rates[work.name])
        return None

    def _tokens(self, name: str, work: Workload, number: int) -> Tokens | None:
        for answer in self._found.answers.get((name, number), ()):
            if work.name in answer.tokens:
                return answer.tokens[work.name]
        return None

    def _best(self, peers: Sequence[str], work: Workload) -> str | None:
        """The peer with the best median."""
        medians = {}
        for name in peers:
            rates = [r for n in self._rounds if (r := self._rate(name, work, n)) is not None]
            if rates:
                medians[name] = median(rates)
        return max(medians, key=medians.__getitem__) if medians else None

    def _measured(self, name: str) -> list[Figure]:
        figures = []
        for work in self._comparison.workloads:
            rates = [r for n in self._rounds if (r := self._rate(name, work, n)) is not None]
            if rates:
                figures.append(Figure(work.name, "tokens/s", tuple(rates), "more", _means(work)))
        answers, peaks = self._found.answers, self._found.peaks
        done = [n for n in self._rounds if answers.get((name, n))]
        if done:
            starts = tuple(median(a.start for a in answers[name, n]) for n in done)
            highs = tuple(max(peaks[name, n]) / 2**20 for n in done)
            figures.append(Figure("start", "s", starts, "less", START))
            figures.append(Figure("peak memory", "MiB", highs, "less", PEAK))
        return figures

    def _ratio(self, work: Workload, own: str, peer: str) -> list[Figure]:
        rates = [(self._rate(own, work, n), self._rate(peer, work, n)) for n in self._rounds]
        ratios = tuple(a / b for a, b in rates if a is not None and b is not None)
        return [Figure(f"kvik / this, {work.name}", "x", ratios, "more", RATIO)] if ratios else []

    def _both(self, name: str, own: str, number: int) -> list[tuple[Workload, Tokens, Tokens]]:
        """Of a round, what both told the tokens of: (workload, ours, theirs)."""
        found = []
        for work in self._comparison.workloads:
            ours, theirs = self._tokens(own, work, number), self._tokens(name, work, number)
            if ours is not None and theirs is not None:
                found.append((work, ours, theirs))
        return found

    def _equality(self, name: str, own: str) -> list[Figure]:
        shares = []
        for number in self._rounds:
            counts = [equal_places(a, b) for _, a, b in self._both(name, own, number)]
            if counts:
                equal, total = map(sum, zip(*counts, strict=True))
                shares.append(100 * equal / total)
        return [Figure("equal tokens", "%", tuple(shares), "more", EQUAL)] if shares else []

    def _differences(self, name: str, own: str) -> dict[str, list[int]]:
        """Workload -> the first difference of each row, in the first round that tells."""
        found: dict[str, list[int]] = {}
        for number in self._rounds:
            for work, ours, theirs in self._both(name, own, number):
                found.setdefault(work.name, first_differences(ours, theirs))
        return found

    def _where(self, places: Mapping[str, Sequence[int]]) -> str:
        """ "b8 after 3 of 64 tokens", the earliest row of each workload; "none"."""
        words = []
        for work in self._comparison.workloads:
            earliest = min(places.get(work.name, [work.output]))
            if earliest < work.output:
                words.append(f"{work.name} after {earliest} of {work.output}")
        return ", ".join(words) or "none"

    def _facts(self, name: str) -> dict[str, str]:
        entry = self._comparison.engines.entries[name]
        facts = {"format": entry.format}
        for number in self._rounds:
            for answer in self._found.answers.get((name, number), ()):
                facts["engine"] = answer.engine
        reasons: dict[str, list[str]] = {}
        for work in self._comparison.workloads:
            reason = self._found.failures.get((name, work.name))
            if reason is not None:
                reasons.setdefault(_short(reason), []).append(work.name)
        if reasons:
            facts["failed"] = "; ".join(f"{', '.join(w)}: {why}" for why, w in reasons.items())
        return facts


def _means(work: Workload) -> str:
    if work.output == 1:
        return f"prompt tokens ({work.prompt}) a second, until the first token"
    return (
        f"output tokens a second after every row has its first: {work.batch} together, prompts of "
        f"{work.prompt}, {work.output} tokens each"
    )


def _short(reason: str) -> str:
    return reason if len(reason) <= REASON else reason[: REASON - 3] + "..."

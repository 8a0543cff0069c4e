"""Whole models with random weights, through the engine itself: scheduler, overlap, sampling.

A decode is timed after a long context. That context is not computed, which would take most of the
budget: the KV cache is filled with random numbers first, and the forward pass does nothing while
the engine prefills the prompts. After that everything is real. A step must move at least the bytes
of all matrices and of the keys and values of all sequences; a prefill must do the operations of its
products and of causal attention.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from engine import Engine, Skipped, answers, captured_sizes
from notes import Notes
from place import DEVICE, REHEARSED, sized, synchronize
from shapes import LOAD

from kvik.attention.fresh_prompts import FreshPrompts
from kvik.attention.triton import TritonAttention
from kvik.spec.weights import matrix_kind
from kvik.worker.graphs import Eager
from kvik.worker.replays import DecodeGraphs

QUANTIZATION = {"bf16": "none", "int4": "int4", "fp8": "fp8"}
LOADED = {"shape": "8b", "format": "bf16"}  # gets the same load as the peers
# Batch and context, most important first.
CELLS = sized(
    (
        *((1, 1024), (64, 1024), (256, 1024), (1, 8192), (8, 1024)),
        *((64, 8192), (1, 32768), (8, 8192), (8, 32768), (256, 8192)),
        *((64, 32768), (256, 32768)),
    ),
    ((1, 5), (2, 5), (1, 6), (2, 6), (1, 7)),
)
USUAL = sized((64, 1024), (2, 8))  # batch and context at which Python may be the bottleneck
# Batch sizes, most important first; Python's time grows more slowly than they do.
BUSY = sized((64, 32, 256, 1), (2, 1, 3, 4))
LONGEST, SEQS = sized((36_000, 256), (96, 4))
PREFILL, SHORTER, TIMES = sized((8192, (2048, 1024), 5), (8, (5,), 1))
BUDGET = sized(8192, 16)  # tokens per step
# Fewest and most steps, and the seconds, for which a decode is timed.
STEPS, MEASURED = sized((24, 200), (1, 1)), 0.7
IDLE = sized(10.0, 60.0)  # most idle seconds for captures before anything is measured
# Most seconds to wait until the batch size is captured; seconds between polls.
WARM_UP, PAUSE = sized((6.0, 0.1), (0.0, 0.0))
BEFORE, BETWEEN = sized((12, 4), (1, 1))  # untimed steps: at first, and between polls
MARGIN = sized(700, 60)  # tokens of each answer: more than all steps of a cell
PROFILED = sized(24, 2)  # steps
LISTED, NAME = 14, 80  # kernels that are listed, and the letters of their names
# Seconds that timing a decode takes, and that each step with skipped prompts adds.
NEEDED, SKIPPING = 3.0, 0.01


def measure(notes: Notes, shape: str, format: str) -> None:
    started = time.monotonic()
    engine = loaded(shape, format, LONGEST, SEQS, **sized({}, {"kv_cache_memory": 4 << 20}))
    model = Measured(notes, engine, shape, format)
    runner = engine.resolved.runner
    notes.fact("ready", time.monotonic() - started, **model.about)
    kernels = f"{runner.kernels}, attention {runner.attention_backend}"
    notes.fact("kernels", kernels, **model.about)
    ends = time.monotonic() + IDLE
    while engine.loop.idle_step() and time.monotonic() < ends:
        pass  # as an idle server does before its first request: nearly all sizes are captured
    answers(engine, [[1, 2, 3]], 2)  # its steps report the memory that graphs took
    if (graphs := engine.loop.stats().graphs) is not None:
        counts = {"planned": graphs.planned, "of": graphs.captured, "each": model.graph_bytes}
        notes.fact("graph bytes", graphs.taken, **counts, **model.about)
    # Each needs a few seconds; the last ones are left out when time is short.
    for name, call, needs in model.parts():
        notes.attempt(name, call, needs)
    model.memory()


def loaded(shape: str, format: str, longest: int, seqs: int, **options) -> Engine:
    """Return an engine that has answered once. options: further engine options."""
    engine = Engine.random(
        shape,
        quantization=QUANTIZATION[format],
        max_model_len=longest,
        max_num_seqs=seqs,
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False,
        **options,
    )
    answers(engine, [[1, 2, 3]], 2)
    with torch.inference_mode():
        for kv in engine.runner.network.kv.layers:
            kv.k.normal_()
            kv.v.normal_()
    return engine


class Measured:
    """One model under measurement."""

    def __init__(self, notes: Notes, engine: Engine, shape: str, format: str) -> None:
        self.notes = notes
        self.engine = engine
        self.about = {"shape": shape, "format": format}
        self.real = engine.runner.graph
        self.eager = Eager(engine.runner.network)
        spec, seqs = engine.resolved.model, engine.resolved.scheduler.max_num_seqs
        self.skipped = Skipped(seqs, spec.hidden_size, spec.vocab_size, DEVICE)

    def parts(self) -> list[tuple[str, Callable[[], None], float]]:
        """Return the parts, those of bars first: name, function, and the seconds it needs."""
        (first, *others) = (
            (
                f"decode {batch} x {context}",
                partial(self.decode, batch, context),
                NEEDED + SKIPPING * (batch * context // BUDGET),
            )
            for batch, context in CELLS
        )
        often, *seldom = ((f"busy {batch}", partial(self.busy, batch), 6) for batch in BUSY)
        parts = [first, ("prefill", self.prefill, 3), often]
        if self.about == LOADED:
            parts.append(("load", self.load, 8))
            parts.append(("prefill by torch", partial(self.prefill, by_torch=True), 3))
        return [
            *parts,
            *others[:2],
            *seldom,
            *((f"prefill {tokens}", partial(self.prefill, tokens), 3) for tokens in SHORTER),
            ("busy prefill", self.busy_prefill, 6),
            ("without graphs", partial(self.decode, *USUAL, eager=True), 3),
            ("without overlap", partial(self.decode, *USUAL, depth=1), 3),
            *others[2:],
        ]

    @property
    def graph_bytes(self) -> float:
        """Return the bytes of a captured graph, without what all of them share; 0: unknown."""
        memory = self.engine.graph_memory
        if memory is None or memory.graphs < 2:
            return 0.0
        return (memory.used - memory.shared) / (memory.graphs - 1)

    def memory(self) -> None:
        """Note the most memory that was in use outside of the KV cache, and what was planned."""
        if REHEARSED:
            return
        free, total = torch.cuda.mem_get_info()
        plan = self.engine.resolved.memory
        used, planned = total - free - plan.kv_cache, plan.total - plan.kv_cache
        self.notes.fact("memory", used, planned=planned, kv_cache=plan.kv_cache, **self.about)

    def decode(self, batch: int, context: int, *, eager: bool = False, depth: int = 2) -> None:
        """Measure a step of `batch` requests with `context` tokens each."""
        name = f"decode {batch} x {context // 1024}k"
        name += ", no graphs" if eager else ", no overlap" if depth == 1 else ""
        # The first requests decode while others are prefilled, and warm-up also makes tokens.
        filling = batch * context // BUDGET + 2
        tokens = 2 * filling + MARGIN
        cache = self.engine.resolved.cache
        if batch * (-(-(context + tokens) // cache.block_size) + 1) > cache.num_blocks:
            self.notes.missed(f"{name} {self._title}", "its keys and values do not fit")
            return
        names = self.fill(batch, context, tokens)
        self.engine.runner.graph = self.eager if eager else self.real
        usual = self.engine.executor.depth
        self.engine.executor.depth = min(depth, usual)
        try:
            captured = self.warm_up(batch, wait=not eager)
            seconds, seen = self._steps(names, context)
        finally:
            self.engine.executor.depth = usual
            self.engine.runner.graph = self.real
            self.engine.drop(names)
        self.notes.rate(
            name,
            seconds,
            "read",
            moved=self.weight_bytes + self._key_bytes * batch * seen,
            batch=batch,
            context=context,
            tokens_per_second=batch / seconds,
            captured=captured,
            **self.about,
        )

    def prefill(self, tokens: int = PREFILL, *, by_torch: bool = False) -> None:
        """Measure a prompt in one step, up to its first token, by Triton's or torch's attention."""
        times, attention = [], self.engine.runner.network.backend
        assert isinstance(attention, TritonAttention)
        usual, attention.prompts = attention.prompts, FreshPrompts(tokens) if by_torch else None
        try:
            for i in range(TIMES):
                synchronize()
                started = time.perf_counter()
                answers(self.engine, [[(7 * j + i) % 100 for j in range(tokens)]], 1)
                times.append(time.perf_counter() - started)
        finally:
            attention.prompts = usual
        spec = self.engine.resolved.model
        scores = 2.0 * spec.num_layers * spec.num_heads * spec.head_dim * tokens**2
        layers = spec.linear_layers
        products = sum(2.0 * m.count * m.inputs * m.outputs for m in layers if not m.head) * tokens
        head = sum(2.0 * m.count * m.inputs * m.outputs for m in layers if m.head)
        self.notes.rate(
            f"prefill {tokens // 1024}k" + (", torch's attention" if by_torch else ""),
            median(times),
            "bf16",
            operations=products + scores + head,
            tokens_per_second=tokens / median(times),
            spread=(min(times), max(times)),
            **self.about,
        )

    def load(self) -> None:
        """Measure requests that arrive at once, prompts included."""
        requests, prompt, tokens = LOAD
        prompts = [[(13 * i + 7 * j) % 100 for j in range(prompt)] for i in range(requests)]
        for _ in range(2):  # the first run captures sizes
            started = time.perf_counter()
            found = answers(self.engine, prompts, tokens)
            seconds = time.perf_counter() - started
        if any(len(answer) != tokens for answer in found):
            raise RuntimeError("an answer has another length than was asked for")
        self.notes.fact("load", requests * tokens / seconds, **self.about)

    def busy(self, batch: int) -> None:
        """Measure the share of the time in which a kernel or a copy runs, with the profiler."""
        names = self.fill(batch, USUAL[1], 2 * batch + MARGIN)
        self.engine.runner.graph = self.real

        def steps() -> None:
            for _ in range(PROFILED):
                self.engine.step()

        try:
            self.warm_up(batch, wait=True)
            spans = profiled(steps)
        finally:
            self.engine.drop(names)
        share, longest = busy_share([(start, end) for start, end, _ in spans])
        self.notes.fact(
            f"busy {batch}",
            share,
            kernels=len(spans),
            longest_gap_us=longest,
            longest_kernels_us=longest_kernels(spans, PROFILED),
            **self.about,
        )

    def busy_prefill(self) -> None:
        """Note which kernels of a prompt take most time."""
        prompt = [j % 100 for j in range(PREFILL)]
        spans = profiled(lambda: answers(self.engine, [prompt], 1))
        share, _ = busy_share([(start, end) for start, end, _ in spans])
        kernels = longest_kernels(spans, 1)
        self.notes.fact("busy prefill", share, longest_kernels_us=kernels, **self.about)

    def fill(self, batch: int, context: int, tokens: int) -> list[str]:
        """Return the names of new requests that have their first token, and so will decode."""
        self.engine.runner.graph = self.skipped
        prompt = [7] * context
        names = [self.engine.add(prompt, tokens) for _ in range(batch)]
        begun: set[str] = set()
        try:
            while len(begun) < batch:
                begun.update(d.request_id for d in self.engine.step() if d.token_ids)
        except BaseException:
            self.engine.runner.graph = self.real
            self.engine.drop(names)
            raise
        return names

    def warm_up(self, batch: int, *, wait: bool) -> bool:
        """Step until steps of this size are replays, or time is up; return whether they are."""
        captured = captured_sizes(self.real)
        ends = time.monotonic() + (WARM_UP if wait and isinstance(self.real, DecodeGraphs) else 0)
        for _ in range(BEFORE):
            self.engine.step()
        while batch not in captured and time.monotonic() < ends:
            time.sleep(PAUSE)  # capturing takes time, not steps, and steps would use up the answers
            for _ in range(BETWEEN):
                self.engine.step()
            captured = captured_sizes(self.real)
        for _ in range(BETWEEN):
            self.engine.step()
        return wait and batch in captured

    def _steps(self, names: Sequence[str], context: int) -> tuple[float, float]:
        """Return the seconds of a step, and the mean number of keys of a sequence."""
        scheduler = self.engine.loop.core.scheduler
        before = sum(r.num_computed_tokens for r in scheduler.running) / len(names)
        synchronize()
        started, steps = time.perf_counter(), 0
        while steps < STEPS[0] or (steps < STEPS[1] and time.perf_counter() - started < MEASURED):
            self.engine.step()
            steps += 1
        synchronize()
        seconds = (time.perf_counter() - started) / steps
        return seconds, max(before, context) + steps / 2

    @property
    def _title(self) -> str:
        return f"{self.about['shape']} {self.about['format']}"

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of all matrices, without the embedding, of which few rows are read."""
        total = 0.0
        quantization = self.engine.resolved.runner.quantization
        for m in self.engine.resolved.model.linear_layers:
            scheme = matrix_kind(quantization, m.inputs, m.stored, head=m.head)
            size = 2 * m.inputs * m.outputs
            if scheme is not None:  # without the padding of tiles
                kept = "native" if scheme.group else "torch"  # scales of groups count 16 bits
                size = scheme.weight_bytes(m.inputs, m.outputs, kept)
            total += m.count * size
        return total

    @property
    def _key_bytes(self) -> float:
        """Return the bytes of K and V per token in all layers."""
        return float(sum(group.bytes_per_token for group in self.engine.resolved.cache.groups))


def profiled(call: Callable[[], object]) -> list[tuple[float, float, str]]:
    """Return when each kernel or copy of a call started and ended, in microseconds, and its name,
    sorted."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[sized(ProfilerActivity.CUDA, ProfilerActivity.CPU)]) as found:
        call()
        synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type == sized(DeviceType.CUDA, DeviceType.CPU)
    )


def longest_kernels(spans: Sequence[tuple[float, float, str]], calls: int) -> dict[str, float]:
    """Return the microseconds that each kernel takes per call, the longest first."""
    totals = Counter[str]()
    for start, end, name in spans:
        totals[name[:NAME]] += (end - start) / calls
    return {name: round(total, 1) for name, total in totals.most_common(LISTED)}


def busy_share(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the covered share of sorted (start, end) spans, and the longest gap between them."""
    if not spans:
        raise RuntimeError("the profiler saw no kernels")
    covered, longest, until = 0.0, 0.0, spans[0][0]
    for start, end in spans:
        longest = max(longest, start - until)
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / (until - spans[0][0]), longest

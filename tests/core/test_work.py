"""The work of planned steps: counted by hand on small schedules, and key by key."""

from __future__ import annotations

import random

import pytest
from helpers.simulation import Setup, Simulation
from helpers.windows import Seen, chunks, seen, sinks

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import Request
from kvik.core.work import Work

NO_STOP: frozenset[int] = frozenset()
BYTES = 16  # per token and layer of the simulation


def read(sim: Simulation) -> Work:
    return sim.scheduler.meter.read(sim.scheduler.running)


def row_of(sim: Simulation, request: Request, *tokens: int) -> None:
    """Deliver the result of a step with one row."""
    plan, _ = sim.in_flight.popleft()
    sim.scheduler.update(ModelRunnerOutput(plan.step, [list(tokens)]), sim.now)


def test_a_prompt_in_chunks_then_decodes() -> None:
    sim = Simulation(Setup(budget=6))
    sim.add([0] * 8, max_tokens=4, stop_ids=NO_STOP)
    sim.step()
    assert read(sim) == Work(
        mixed_steps=1,
        prefill_tokens=6,
        prefill_pairs=1 + 2 + 3 + 4 + 5 + 6,
        prefill_kv_bytes=6 * BYTES,
    )
    sim.step()
    sim.step()
    sim.step()
    assert read(sim) == Work(
        mixed_steps=2,
        decode_steps=2,
        decode_step_tokens=2,
        prefill_tokens=8,
        decode_tokens=2,
        logit_rows=3,
        prefill_pairs=sum(range(1, 9)),
        decode_pairs=9 + 10,
        prefill_kv_bytes=(6 + 8) * BYTES,
        decode_kv_bytes=(9 + 10) * BYTES,
    )
    before = read(sim)
    sim.drain()
    assert read(sim).since(before) == Work(
        decode_steps=1,
        decode_step_tokens=1,
        decode_tokens=1,
        logit_rows=1,
        decode_pairs=11,
        decode_kv_bytes=11 * BYTES,
    )


def test_cached_prefixes_are_read_but_not_computed() -> None:
    sim = Simulation(Setup(block_size=4))
    sim.add([0] * 8, max_tokens=1)
    sim.drain()
    before = read(sim)
    sim.add([0] * 9 + [1] * 2, max_tokens=1)
    sim.drain()
    work = read(sim).since(before)
    assert (work.prefill_tokens, work.prefill_pairs) == (3, 9 + 10 + 11)
    assert work.prefill_kv_bytes == 11 * BYTES


def test_layers_count_that_read_what_others_store() -> None:
    sim = Simulation(Setup(readers=3))
    sim.add([0] * 5, max_tokens=2, stop_ids=NO_STOP)
    sim.drain()
    work = read(sim)
    assert (work.prefill_pairs, work.prefill_kv_bytes) == (3 * 15, 3 * 5 * BYTES)
    assert (work.decode_pairs, work.decode_kv_bytes) == (3 * 6, 3 * 6 * BYTES)


def test_a_last_prompt_token_alone_is_still_prefill() -> None:
    sim = Simulation(Setup(budget=4))
    sim.add([0] * 5, max_tokens=1)
    sim.drain()
    work = read(sim)
    assert (work.prefill_tokens, work.decode_tokens, work.prefill_pairs) == (5, 0, 15)


def test_work_lost_by_a_preemption_counts_again() -> None:
    sim = Simulation(Setup(block_size=2, num_blocks=6, budget=8, caching=False))
    sim.add([0] * 4, max_tokens=6, stop_ids=NO_STOP)
    late = sim.add([1] * 4, max_tokens=6, stop_ids=NO_STOP)[0]
    sim.step()  # both prompts
    sim.step()  # both decode once; six blocks are full at 5 + 5 tokens
    sim.step()
    before = read(sim)
    sim.step()  # the seventh token of the first needs a block: the second loses its six
    assert late.num_preemptions == 1 and late.num_lost_tokens == 6
    assert read(sim).since(before).block_short_steps == 1
    sim.drain()
    work = read(sim)
    assert work.recomputed_tokens == 6
    assert work.prefill_tokens == 4 + 4 + 7  # seven are known, six were lost
    # 4 prompt + 5 decoded tokens of each; one of the second's is in the chunk that restores it
    assert work.decode_tokens == 5 + 5 - 1


def test_siblings_compute_the_prompt_once_and_each_reads_it() -> None:
    sim = Simulation(Setup(block_size=4))
    sim.add([0] * 6, max_tokens=2, n=3, stop_ids=NO_STOP)
    sim.drain()
    work = read(sim)
    assert work.prefill_tokens == 6 + 1 + 1  # the others compute the prompt's last token
    assert work.prefill_pairs == 21 + 6 + 6
    assert (work.decode_tokens, work.decode_kv_bytes) == (3, 3 * 7 * BYTES)


def test_rejected_drafts_were_work() -> None:
    sim = Simulation(Setup())
    request = sim.add([0, 0], max_tokens=9, stop_ids=NO_STOP)[0]
    sim.plan()
    row_of(sim, request, 1)
    request.num_draft_tokens = 3
    sim.worker.rows[request.slot].drafts = [1] * 3
    before = read(sim)
    sim.plan()
    row_of(sim, request, 1, 1)  # one accepted, two rejected
    work = read(sim).since(before)
    assert (work.decode_tokens, work.logit_rows) == (4, 4)
    assert work.decode_pairs == 3 + 4 + 5 + 6
    assert work.decode_kv_bytes == 6 * BYTES  # one row reads its keys once
    before = read(sim)
    sim.plan()  # continues at position 4
    assert read(sim).since(before).decode_pairs == 5


def test_logits_of_a_scored_prompt_count() -> None:
    sim = Simulation(Setup(budget=4))
    params = SamplingParams(prompt_logprobs=0)
    sim.add([0] * 6, max_tokens=1, params=params)
    sim.plan()
    assert read(sim).logit_rows == 4
    row_of(sim, next(iter(sim.requests.values())))
    sim.plan()
    assert read(sim).logit_rows == 4 + 1 + 1  # the sixth predicts an output token


@pytest.mark.parametrize(
    ("setup", "short"),
    [
        (Setup(max_num_seqs=1), "slot_short_steps"),
        (Setup(num_blocks=3), "block_short_steps"),
        (Setup(budget=6), ""),
    ],
)
def test_queued_steps_are_counted_by_the_missing_resource(setup: Setup, short: str) -> None:
    sim = Simulation(setup)
    sim.add([0] * 6, max_tokens=3, stop_ids=NO_STOP)
    sim.add([1] * 6, max_tokens=3, stop_ids=NO_STOP)
    sim.plan()
    work = read(sim)
    assert work.queued_steps == 1
    for name in ("slot_short_steps", "block_short_steps"):
        assert getattr(work, name) == (name == short)


class Counted(Simulation):
    """Counts each step again, key by key."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.tokens = self.pairs = self.kv_bytes = self.prompt_tokens = 0

    def plan(self) -> SchedulerOutput | None:
        plan = super().plan()
        if plan is None:
            return None
        by_slot = {r.slot: r for r in self.scheduler.running}
        for slot, tokens in zip(plan.slots, plan.num_scheduled_tokens, strict=True):
            end = by_slot[slot].num_computed_tokens
            queries = range(end - tokens, end)
            self.tokens += tokens
            self.prompt_tokens += sum(q < by_slot[slot].num_prompt_tokens for q in queries)
            for window in self.setup.windows:
                keys = [seen(q, window) for q in queries]
                self.pairs += sum(map(len, keys))
                self.kv_bytes += BYTES * len(set().union(*keys))
        return plan


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "windows", [(None,), (5,), (None, 6, 6), (chunks(7), None), (sinks(5, 6),)]
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_closed_forms_equal_counting(windows: tuple[Seen, ...], depth: int, drafts: int) -> None:
    rng = random.Random(depth + 1)
    blocks = sum(12 if window is None else 5 for window in windows)
    sim = Counted(Setup(windows=windows, depth=depth, num_blocks=blocks, budget=7))
    for step in range(120):
        sim.worker.num_drafts = rng.choice([0, drafts])
        if rng.random() < 0.4:
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 20))]
            sim.add(prompt, max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 2]))
        if rng.random() < 0.05:
            sim.end(rng.choice(list(sim.requests.values())))
        sim.step()
        work = read(sim)
        assert work.prefill_tokens + work.decode_tokens == sim.tokens, step
        assert work.prefill_pairs + work.decode_pairs == sim.pairs
        assert work.prefill_kv_bytes + work.decode_kv_bytes == sim.kv_bytes
        if not sim.scheduler.counters.preemptions:
            assert work.prefill_tokens == sim.prompt_tokens
    assert sim.scheduler.counters.preemptions and work.recomputed_tokens
    assert sim.tokens == sim.scheduler.counters.scheduled_tokens

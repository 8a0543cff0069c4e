"""Advice never makes a setting worse nor needs what this version lacks, and has reasons."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from helpers.configs import PUBLIC
from helpers.public_configs import public_shape

from kvik.cli.flags import Parser, add_engine_flags, engine_options
from kvik.config.config import EngineConfig
from kvik.config.resolve import resolve
from kvik.config.units import seconds
from kvik.errors import CapacityError, ConfigError
from kvik.planner.advice import advise
from kvik.planner.advice.advise import ORDER, Advice, AdviceReport, advise_shape
from kvik.planner.advice.reasons import Goal, improvement
from kvik.planner.devices import DEVICES, Device, Setting
from kvik.planner.families import shape_from_config
from kvik.planner.formats import weight_format
from kvik.planner.memory import hardware_of
from kvik.planner.roofline import decode, prefill, step_time
from kvik.planner.serving import Slo

H100 = DEVICES["h100"]
CPU = Device("cpu", "cpu", 64 << 30, 50e9, {"fp32": 0.4e12, "bf16": 0.8e12, "int8": 1.6e12})
PROMISE = Slo(ttft=0.3, tpot=0.05)


FOUND: dict[str, AdviceReport] = {}  # by the question, as many tests share one


def report(model: str, device: Device, goal: Goal) -> AdviceReport:
    question = repr((model, device, goal))
    if question not in FOUND:
        FOUND[question] = advise_shape(public_shape(model), device, goal)
    return FOUND[question]


def advice(found: AdviceReport, topic: str) -> Advice:
    return next(a for a in (*found.advice, *found.later) if a.topic == topic)


def parsed(flags: tuple[str, ...]) -> EngineConfig:
    """Parse flags as `kvik generate` does."""
    parser = Parser("generate", "", "")
    add_engine_flags(parser)
    return EngineConfig(**engine_options(parser.parse_args(" ".join(flags).split()), ""))


CASES = [
    (model, device, goal)
    for model in ("llama-2-7b", "llama-3-8b", "mistral-7b-v0.1")
    for device in (H100, CPU)
    for goal in (
        Goal(),
        Goal(concurrency=64, prompt_tokens=1000, output_tokens=200),
        Goal(slo=PROMISE),
        Goal(slo=PROMISE, rate=2.0, shared=100),
    )
]


@pytest.mark.full
@pytest.mark.parametrize(("model", "device", "goal"), CASES)
def test_no_advice_makes_it_worse_or_needs_missing_features(
    model: str, device: Device, goal: Goal
) -> None:
    found = report(model, device, goal)
    for step in (*found.advice, *found.later):
        if step.verdict != "keep" and step.before and step.after:
            assert improvement(step.before, step.after, goal) >= 0.0, step.topic
        assert (step.verdict == "no use") == (not step.change) or step.verdict in (
            "keep",
            "depends",
        )
    if found.start is not None:
        assert improvement(found.start, found.end, goal) >= 0.0
    assert found.end.memory <= found.end.memory_limit

    for step in found.advice:
        parsed(step.flags)
    config, advised = parsed(found.flags), found.advised
    assert config.max_num_seqs in (None, advised.seqs)
    assert config.max_num_batched_tokens in (None, advised.budget)
    formats = {"none": found.usual.at.weight_format}
    assert formats.get(config.quantization, config.quantization) == advised.at.weight_format
    kept = {"auto": weight_format(advised.shape.working_dtype(advised.at.weight_format))}
    assert kept.get(config.kv_cache_dtype, config.kv_cache_dtype) == advised.at.kv_format
    assert advised.at.tp == 1
    drafts = advised.drafting.drafts if advised.drafting else None
    assert config.spec_tokens == drafts
    assert config.spec_method == (None if drafts is None else "ngram")


@pytest.mark.parametrize("goal", [Goal(), Goal(slo=PROMISE)])
@pytest.mark.parametrize("device", [H100, DEVICES["rtx4090"], DEVICES["l4"], CPU])
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b", "deepseek-v2-lite"])
def test_the_engine_takes_what_is_advised(model: str, device: Device, goal: Goal) -> None:
    """On a machine with that device, and decides as foretold."""
    found = report(model, device, goal)
    if found.obstacle:
        return
    shape, at = found.advised.shape, found.advised.at
    config = replace(parsed(found.flags), max_model_len=found.traffic.context)
    resolved = resolve(config, shape.spec, hardware_of(at.device), "")
    assert weight_format(resolved.runner.dtype, resolved.runner.quantization) == at.weight_format
    if config.max_num_seqs is not None:
        assert resolved.scheduler.max_num_seqs == found.advised.seqs
    assert resolved.scheduler.max_num_batched_tokens >= found.advised.budget / 2


def test_what_this_version_lacks_stands_apart() -> None:
    found = report("llama-3-8b", H100, Goal())
    assert [a.topic for a in found.later] == ["parallelism"]
    assert not any(a.flags for a in found.later)
    assert [a.topic for a in found.advice] == [topic for topic in ORDER if topic != "parallelism"]


def test_quantisation_helps_what_reads_and_not_what_computes() -> None:
    reading = advice(report("llama-3-8b", H100, Goal(concurrency=4)), "quantisation")
    assert reading.verdict == "do" and reading.flags[0].startswith("--quantization")
    narrow = replace(H100, bandwidth=1e15, rates=dict.fromkeys(H100.rates, 1e14))
    computing = advice(report("llama-3-8b", narrow, Goal(concurrency=64)), "quantisation")
    assert computing.verdict == "no use" and "bound by arithmetic" in computing.reason


@pytest.mark.parametrize(
    ("load", "int8_rate", "best"),
    [
        (Goal(prompt_tokens=4000, output_tokens=16, concurrency=64), 1.979e15, "int8"),
        (Goal(prompt_tokens=4000, output_tokens=16, concurrency=64), 1.4e15, "int8"),
        (Goal(prompt_tokens=128, output_tokens=512, concurrency=4), 1.979e15, "int4"),
    ],
)
def test_the_rates_of_prompts_and_of_decoding_choose_the_format(
    load: Goal, int8_rate: float, best: str
) -> None:
    """int4 reads the least, but computes in bf16: with long prompts int8 serves more."""
    device = replace(H100, rates={"fp32": 67e12, "bf16": 989e12, "int8": int8_rate})
    found = advice(report("llama-3-8b", device, load), "quantisation")
    assert found.change == best
    clauses = re.findall(r"(int\d) computes prompts \(in (\w+)\) at ([\d.]+) times", found.reason)
    units = {name: unit for name, unit, _ in clauses}
    if best == "int4":
        assert units == {"int4": "bf16"}  # no unit computes prompts of this load faster
        return
    assert units == {"int8": "int8", "int4": "bf16"}
    at, shape = Setting(device, "int8", "bf16"), public_shape("llama-3-8b")
    seconds = {
        name: step_time(shape, replace(at, weight_format=name), prefill(4000)).floor
        for name in ("bf16", "int8", "int4")
    }
    for name, _, times in clauses:
        assert float(times) == pytest.approx(seconds["bf16"] / seconds[name], rel=0.03)
    share = re.search(r"(\d+)% of the time goes to prompts", found.reason)
    assert share and int(share[1]) > 90


def test_a_unit_that_a_device_lacks_is_not_named() -> None:
    """Without bfloat16 and small integers, all weights are multiplied in fp16."""
    plain = replace(H100, rates={name: H100.rates[name] for name in ("fp32", "fp16")})
    load = Goal(prompt_tokens=500, output_tokens=200, concurrency=16)
    reason = advice(report("llama-3-8b", plain, load), "quantisation").reason
    assert set(re.findall(r"\(in (\w+)\)", reason)) == {"fp16"}


def test_a_smaller_kv_format_helps_long_contexts_only() -> None:
    short = Goal(prompt_tokens=16, output_tokens=16, concurrency=1)
    found = advice(report("llama-3-8b", H100, short), "KV format")
    assert found.verdict == "no use" and "0% to the KV cache" in found.reason
    long = Goal(prompt_tokens=3500, output_tokens=500, concurrency=40)
    found = advice(report("llama-2-7b", H100, long), "KV format")
    assert found.verdict == "do" and found.flags[0].startswith("--kv-cache-dtype")
    assert found.before and found.after
    assert found.before.load and found.after.load
    assert found.after.load.output_rate > 1.5 * found.before.load.output_rate


def test_speculation_does_not_help_a_machine_that_computes() -> None:
    narrow = replace(H100, bandwidth=1e15)
    for acceptance in (None, 1.0):
        goal = Goal(concurrency=64, acceptance=acceptance)
        found = advice(report("llama-3-8b", narrow, goal), "speculation")
        assert found.verdict == "no use" and "checking 1 draft " in found.reason
    found = advice(report("llama-3-8b", H100, Goal(concurrency=1, acceptance=0.7)), "speculation")
    assert found.verdict == "do" and found.flags[0] == "--spec-method ngram"
    assert "supposing that 70% of the drafts are right (--acceptance)" in found.reason
    useless = advice(report("llama-3-8b", H100, Goal(acceptance=0.0)), "speculation")
    assert useless.verdict == "no use"


def test_without_an_acceptance_the_needed_one_is_named() -> None:
    """At that share the prediction gains, below it does not; and no figure counts on it."""
    found = report("llama-3-8b", H100, Goal(concurrency=32))
    lever = advice(found, "speculation")
    assert (lever.verdict, lever.before, lever.after) == ("depends", None, None)
    assert lever.flags == ("--spec-method ngram",)
    assert not any("spec" in flag for flag in found.flags) and found.advised.drafting is None
    matched = re.search(r"it gains from (\d+)% of right drafts on", lever.reason)
    assert 2 < int(matched[1]) < 30

    def verdict(percent: int) -> str:
        goal = Goal(concurrency=32, acceptance=percent / 100)
        return advice(report("llama-3-8b", H100, goal), "speculation").verdict

    assert (verdict(int(matched[1]) - 1), verdict(int(matched[1]))) == ("no use", "do")


def test_an_expensive_draft_model_needs_higher_acceptance() -> None:
    def needed(draft: str | None) -> int:
        found = report("llama-3-8b", H100, Goal(concurrency=1, draft=draft))
        told = re.search(r"from (\d+)% of right", advice(found, "speculation").reason)
        return int(told[1])

    assert needed(None) < needed("qwen2.5-0.5b") < needed("llama-3.2-1b")


def test_heads_that_one_process_computes_are_for_one_device() -> None:
    goal = Goal(concurrency=1, acceptance=0.8, draft="mtp")
    found = report("glm-4.5-air", replace(H100, memory=400 << 30), goal)
    assert "--spec-method mtp" in found.flags
    assert not any("spec-model" in flag or "parallel" in flag for flag in found.flags)


def test_a_draft_model_takes_its_time() -> None:
    goal = Goal(concurrency=1, acceptance=0.7)
    free = report("llama-3-8b", H100, goal)
    paid = report("llama-3-8b", H100, replace(goal, draft="qwen2.5-0.5b"))
    asked = advice(paid, "speculation").flags
    assert asked[:2] == ("--spec-method draft_model", "--spec-model qwen2.5-0.5b")
    pair = [advice(found, "speculation").after for found in (free, paid)]
    assert pair[0] and pair[1] and pair[0].load and pair[1].load
    assert pair[1].load.tpot > pair[0].load.tpot


def test_a_draft_model_takes_its_memory() -> None:
    """As in `kvik plan`; where there is no room for it, it is not advised."""
    goal = Goal(concurrency=1, acceptance=0.9, draft="llama-3.2-1b")
    draft, taken = public_shape("llama-3.2-1b"), []
    for device in (H100, replace(H100, memory=7 << 30)):
        found = report("llama-3-8b", device, goal)
        lever, drafting = advice(found, "speculation"), found.advised.drafting
        assert (lever.verdict == "do") == (drafting is not None)
        assert found.end.memory <= found.end.memory_limit
        taken.append(drafting is not None)
        if lever.before and lever.after:
            assert lever.after.memory > lever.before.memory + draft.weight_bytes("int8")
    assert taken == [True, False]


def test_models_with_states_speculate() -> None:
    shape = shape_from_config(PUBLIC["Qwen3.5-9B"], "m")
    found = advise_shape(shape, H100, Goal(acceptance=0.9))
    assert advice(found, "speculation").verdict == "do"
    assert parsed(found.flags).spec_method == "ngram"


def test_parallelism_needs_a_link() -> None:
    found = advice(report("llama-3-8b", replace(H100, link=0.0), Goal()), "parallelism")
    assert found.verdict == "no use" and "no link" in found.reason


def test_processes_of_one_memory_are_never_advised() -> None:
    """They would all wait for it; and nothing of theirs stands among what a version lacks."""
    found = report("llama-3-8b", CPU, Goal())
    parallel = advice(found, "parallelism")
    assert parallel in found.advice and not found.later
    assert parallel.verdict == "no use" and not parallel.flags
    assert "would take 1.00 times as long" in parallel.reason
    assert not any("parallel" in flag for flag in found.flags)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cores": 1}, "must be at most 1, as there are 1 threads"),
        ({"native": False}, "must be 1: kvik was installed without"),
    ],
)
def test_settings_that_the_engine_refuses_are_not_compared(
    change: dict[str, object], why: str
) -> None:
    hardware = replace(hardware_of(CPU), **{"cores": 4, **change})
    found = advise_shape(public_shape("llama-3-8b"), CPU, Goal(), hardware)
    parallel = advice(found, "parallelism")
    assert (parallel.verdict, parallel.flags) == ("no use", ())
    assert parallel.reason.startswith(f"one process: {why}")


def test_half_the_dtype_is_the_first_advice() -> None:
    shape = replace(public_shape("qwen2.5-0.5b"), dtype="float32", stored="fp32", runs=False)
    found = advise_shape(shape, H100, Goal())
    first = found.advice[0]
    assert (first.topic, first.flags) == ("precision", ("--dtype bfloat16",))
    halved = advise.with_weights(found.usual, "bf16")
    assert (found.usual.at.kv_format, halved.at.kv_format) == ("fp32", "bf16")


def test_an_output_of_one_token_keeps_any_limit_between_tokens() -> None:
    found = report("llama-3-8b", H100, Goal(slo=Slo(tpot=1.0), output_tokens=1))
    assert found.end.largest is not None and found.end.largest.tpot == 0.0


def test_what_is_stored_so_needs_no_flag() -> None:
    shape = replace(public_shape("llama-3-8b"), stored="int4")
    found = advise_shape(shape, H100, Goal(slo=PROMISE))
    assert not any("--quantization" in flag for flag in found.flags)


def test_what_is_stored_quantised_stays_so() -> None:
    shape = replace(public_shape("llama-3-8b"), stored="int8-weight-only")
    found = advise_shape(shape, H100, Goal())
    quantised = advice(found, "quantisation")
    assert (quantised.verdict, quantised.flags) == ("no use", ())
    assert "stored as int8-weight-only" in quantised.reason


def test_the_default_step_size_needs_no_flag() -> None:
    """It follows the memory that a format leaves: 64 tokens where weights leave next to none."""
    found = report("llama-3-70b", H100, Goal(concurrency=1, prompt_tokens=512))
    assert found.usual.budget < 256 and not found.usual.max_fitting
    assert found.advised.at.weight_format == "int4" and found.advised.usual_budget == 8192
    assert not any("--max-num-batched-tokens" in flag for flag in found.flags)
    # All 512 tokens in one step: 2 * 69.5e9 * 512 operations, in int8 and, for int4, in bf16.
    room = found.advice[0]
    assert (room.topic, room.change) == ("room", "int8")
    for figures, rate in ((room.after, 1978.9e12), (found.end, 989.4e12)):
        assert figures.single.ttft == pytest.approx(2 * 69.5e9 * 512 / rate, rel=0.05)


def test_reasons_quote_the_roofline() -> None:
    found = report("llama-3-8b", H100, Goal(concurrency=4, prompt_tokens=512, output_tokens=128))
    setting = Setting(H100, "bf16", "bf16")
    time = step_time(public_shape("llama-3-8b"), setting, decode(4, 512 + 64 + 1))
    share = sum(p.expected for p in time.parts if p.name in ("weights", "head")) / time.expected
    assert f"{share:.0%} goes to the weights" in advice(found, "quantisation").reason


def test_it_starts_with_what_fits() -> None:
    found = report("llama-3-8b", replace(H100, memory=12 << 30), Goal(concurrency=1))
    first = found.advice[0]
    assert found.start is None and not found.obstacle
    assert (first.topic, first.flags) == ("room", ("--quantization int8",))
    assert "bf16 needs" in first.reason
    assert found.flags and found.flags[0].startswith("--quantization int")


def test_what_fits_no_single_device_is_planned_for_several() -> None:
    found = report("llama-3-70b", DEVICES["rtx4090"], Goal())
    assert found.obstacle.startswith("does not fit one rtx4090")
    assert parsed(found.flags).quantization == "int4"  # nothing of the devices
    assert found.advised.at.tp == 2 and found.advised.at.weight_format == "int4"
    with pytest.raises(CapacityError, match="does not fit cpu"):
        report("llama-3-70b", replace(CPU, memory=16 << 30), Goal())


def test_a_promise_that_nothing_keeps() -> None:
    found = report("llama-3-8b", CPU, Goal(slo=Slo(tpot=1e-3)))
    assert found.end.largest is None
    excess = found.end.single.tpot / 1e-3
    assert f"missed {excess:.2f} times over (TPOT {seconds(found.end.single.tpot)} of 1.00 ms)" in (
        found.promise
    )
    assert "not in this version" not in found.promise  # on a CPU nothing is missing


def test_a_promise_that_only_later_versions_keep() -> None:
    found = report("llama-2-70b", DEVICES["h200"], Goal(slo=Slo(tpot=5e-3), acceptance=0.0))
    assert found.end.largest is None
    assert "with all that is not in this version they would be kept" in found.promise


def test_a_promise_at_the_load_asked_for() -> None:
    kept = report("llama-3-8b", H100, Goal(slo=PROMISE, concurrency=16))
    assert "at the load asked for the limits are kept" in kept.promise
    assert kept.end.largest.concurrency > 16
    missed = report("llama-3-8b", CPU, Goal(slo=Slo(0.5, 0.3), concurrency=200, prompt_tokens=16))
    assert "at the load asked for the limits are missed" in missed.promise
    flag = f"--max-num-seqs {missed.end.largest.concurrency}"
    assert flag in missed.flags  # who keeps the promise must not be dragged along
    fast = report("llama-3-8b", CPU, Goal(slo=PROMISE, rate=1e6))
    assert "comes faster than it can be served" in fast.promise


def test_steps_towards_a_load_that_no_single_one_can_serve() -> None:
    found = report(
        "llama-3-8b", DEVICES["rtx4090"], Goal(rate=100.0, prompt_tokens=2000, output_tokens=300)
    )
    assert found.start.load is None and found.end.load is None
    assert found.end.full.rate > 3 * found.start.full.rate
    assert any(flag.startswith("--quantization") for flag in found.flags)


def test_a_faster_memory_never_lowers_the_rate() -> None:
    rates = []
    for bandwidth in (0.5e12, 1e12, 2e12, 4e12):
        end = report("llama-3-8b", replace(H100, bandwidth=bandwidth), Goal(concurrency=16)).end
        rates.append(end.load.output_rate)
    assert rates == sorted(rates)


def test_a_known_prefix_is_listed_with_its_effect() -> None:
    found = advice(report("llama-3-8b", H100, Goal(shared=400)), "prefix cache")
    assert found.before and found.after and found.before.single and found.after.single
    assert found.after.single.ttft < 0.6 * found.before.single.ttft
    unknown = advice(report("llama-3-8b", H100, Goal()), "prefix cache")
    assert unknown.before is None and "--shared" in unknown.reason


@pytest.mark.parametrize(
    ("goal", "field"),
    [
        (Goal(prompt_tokens=0), "prompt_tokens"),
        (Goal(output_tokens=-1), "output_tokens"),
        (Goal(concurrency=0), "concurrency"),
        (Goal(rate=0.0), "rate"),
        (Goal(rate=float("nan")), "rate"),
        (Goal(rate=1.0, concurrency=1), "rate"),
        (Goal(acceptance=1.5), "acceptance"),
        (Goal(shared=600), "shared"),
        (Goal(prompt_tokens=4000, output_tokens=200), "prompt_tokens"),
    ],
)
def test_invalid_questions(goal: Goal, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        report("llama-2-7b", H100, goal)


def test_the_usual_request_is_cut_to_the_context() -> None:
    tiny = replace(public_shape("llama-3-8b"), max_context=20)
    found = advise_shape(tiny, H100, Goal())
    assert found.traffic.context <= 20 and found.traffic.prompt >= 1
    assert found.assumed[0].startswith("--prompt")

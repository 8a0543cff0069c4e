"""What is offered for a plan that does not fit does fit, and less would not."""

from __future__ import annotations

from dataclasses import replace

from helpers.public_configs import config

from kvik.cli.plan import build_parser, question_of
from kvik.planner.devices import find_device
from kvik.planner.families import shape_from_config
from kvik.planner.plan import plan_shape
from kvik.planner.question import Question


def offers(name: str, hardware: str, question: Question) -> dict[str, int]:
    """Flags -> bytes. Each is asked for as a user would, and must fit with just these bytes."""
    shape, device = shape_from_config(config(name), name), find_device(hardware)
    answer = plan_shape(shape, device, question)
    assert not answer.memory.fits
    asked = [
        *("--context", str(answer.context), "--batch", str(answer.batch)),
        *("--dtype", answer.weight_format, "--kv-dtype", answer.kv_format),
    ]
    for remedy in answer.remedies:
        words = build_parser().parse_args([*asked, *remedy.flags.split()])
        again = plan_shape(shape, device, question_of(words))
        assert again.memory.fits, remedy
        assert again.memory.total == remedy.total
    return {remedy.flags: remedy.total for remedy in answer.remedies}


def test_each_kind_of_change_is_offered() -> None:
    found = offers("llama-3-8b", "a100-80g", Question(context=8192, batch=64))
    kinds = [flags.split()[0] for flags in found]
    assert kinds == ["--batch", "--context", "--kv-dtype", "--tp"]  # the weights alone are small
    assert "--tp 2" in found
    assert "--kv-dtype int8" in found  # half the bytes do; a quarter is not needed


def test_weights_that_are_too_large_alone() -> None:
    found = offers("llama-3-70b", "rtx4090", Question(context=8192))
    assert list(found) == ["--dtype int4 --tp 2", "--tp 8"]


def test_a_smaller_format_alone() -> None:
    found = offers("llama-3-70b", "h200", Question(context=8192))
    assert list(found) == ["--dtype int8", "--tp 2"]


def test_beyond_one_machine_stages_come() -> None:
    found = offers("deepseek-v3", "a100-80g", Question(context=4096, weight_format="bf16"))
    assert list(found) == ["--dtype int4 --tp 8", "--tp 8 --pp 4"]


def test_nothing_helps_a_device_without_siblings() -> None:
    shape = shape_from_config(config("deepseek-v3"), "deepseek-v3")
    alone = replace(find_device("t4"), link=0.0)
    assert plan_shape(shape, alone, Question()).remedies == ()

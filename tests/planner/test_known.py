"""What is remembered is that of the model, the machine and the setting that are asked for."""

from __future__ import annotations

from dataclasses import replace

from helpers.configs import PUBLIC

from kvik.planner.devices import DEVICES
from kvik.planner.families import shape_from_config
from kvik.planner.known import Known
from kvik.planner.memory import bytes_of
from kvik.planner.roofline import decode, step_time
from kvik.planner.setting import Setting

SHAPES = [shape_from_config(PUBLIC[name], name) for name in ("Llama-3-8B", "Mistral-7B-v0.1")]
AT = Setting(DEVICES["h100"], "bf16", "bf16", context=1000)


def test_every_question_has_its_own_answer() -> None:
    settings = [
        AT,
        replace(AT, kv_format="fp8"),
        replace(AT, weight_format="int4"),
        replace(AT, tp=2),
        replace(AT, pp=2),
        replace(AT, context=2000),
        replace(AT, batch=4),
        replace(AT, utilization=0.5),
        replace(AT, device=DEVICES["a100-80g"]),
    ]
    known = Known()
    for _ in range(2):
        for shape in SHAPES:
            for at in settings:
                for step in (decode(1, 100), decode(2, 100)):
                    expected = step_time(shape, at, step).expected
                    assert known.step_seconds(shape, at, step) == expected
                assert known.bytes(shape, at) == bytes_of(shape, at)

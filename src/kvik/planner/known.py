"""What was worked out of a model on a device already: advice asks for the same again and again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from kvik.planner.memory import bytes_of
from kvik.planner.roofline import Step, step_time
from kvik.planner.setting import Setting
from kvik.planner.shape import ModelShape

Value = TypeVar("Value")


class Known:
    """Remembers values of the last model and machine that were asked for."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._values: dict[Hashable, Any] = {}

    def step_seconds(self, shape: ModelShape, at: Setting, step: Step) -> float:
        """Expected, of a step. Raises ConfigError as `step_time`."""
        # All of the setting that a step depends on, beside the machine.
        key = (at.weight_format, at.kv_format, at.tp, at.pp, step)
        return self._once(shape, at, key, lambda: step_time(shape, at, step).expected)

    def bytes(self, shape: ModelShape, at: Setting) -> tuple[int, int]:
        """As `bytes_of`."""
        # All of the setting that memory depends on, beside the machine.
        key = (at.weight_format, at.kv_format, at.tp, at.pp, at.context, at.batch, at.utilization)
        return self._once(shape, at, key, lambda: bytes_of(shape, at))

    def _once(
        self, shape: ModelShape, at: Setting, key: Hashable, compute: Callable[[], Value]
    ) -> Value:
        of = (shape, at.device, at.hardware)
        if len(self._of) != len(of) or any(a is not b for a, b in zip(self._of, of, strict=True)):
            self._of = of
            self._values.clear()
        if key not in self._values:
            self._values[key] = compute()
        value: Value = self._values[key]
        return value

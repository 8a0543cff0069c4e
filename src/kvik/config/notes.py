"""What was decided and why, in the order it was."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from kvik.config.config import Decision

ASKED = "as asked"

_T = TypeVar("_T")


class Notes:
    """Collects decisions in the order they are made; of what is settled the reason is known."""

    def __init__(self, settled: Mapping[str, str] = MappingProxyType({})) -> None:
        self.decisions: list[Decision] = []
        self._settled = settled

    def add(self, name: str, value: _T, reason: str) -> _T:
        self.decisions.append(Decision(name, str(value), self._settled.get(name, reason)))
        return value

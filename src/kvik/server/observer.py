"""Observers of generations, such as metrics and traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvik.core.sampling_params import SamplingParams
from kvik.engine.output import RequestOutput
from kvik.server.errors import escaped_traceback

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class GenerationRecord:
    """What observers see of one generation; times in seconds of `time.monotonic`."""

    request_id: str
    tenant: str
    params: SamplingParams
    num_prompt_tokens: int
    streaming: bool
    arrived: float  # before its text was tokenised
    first_token: float | None = None  # when its first tokens came to the server's process
    last_tokens: dict[int, float] = field(default_factory=dict)  # by completion, as they come
    num_output_tokens: int = 0  # of all n completions
    trace_parent: str | None = None  # the caller's trace, as the header `traceparent` names it


class Observer(Protocol):
    """Sees what happens to generations. Its methods are called in the event loop: be quick."""

    def arrived(self, record: GenerationRecord) -> None:
        """A request was admitted and sent to the engine."""
        ...

    def delivered(self, record: GenerationRecord, index: int, num_tokens: int, now: float) -> None:
        """Tokens of one completion came; `record` does not count them yet."""
        ...

    def finished(self, record: GenerationRecord, output: RequestOutput | None, reason: str) -> None:
        """A request ended. Without output it failed or was aborted.

        Args:
            reason: "stop" or "length" of its first completion; else "abort", "deadline" or "error".
        """
        ...

    def refused(self, tenant: str, reason: str) -> None:
        """A request was not admitted.

        Args:
            reason: "queue" or "share" (full), "deadline" (too near), "unavailable" or "invalid".
        """
        ...


class Observers:
    """Several observers as one. What one of them raises is logged and goes no further."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def arrived(self, record: GenerationRecord) -> None:
        for observer in self._observers:
            _call(observer.arrived, record)

    def delivered(self, record: GenerationRecord, index: int, num_tokens: int, now: float) -> None:
        for observer in self._observers:
            _call(observer.delivered, record, index, num_tokens, now)

    def finished(self, record: GenerationRecord, output: RequestOutput | None, reason: str) -> None:
        for observer in self._observers:
            _call(observer.finished, record, output, reason)

    def refused(self, tenant: str, reason: str) -> None:
        for observer in self._observers:
            _call(observer.refused, tenant, reason)


def _call(method: Callable[..., None], *arguments: object) -> None:
    try:
        method(*arguments)
    except Exception as error:
        _log.error("an observer failed:\n%s", escaped_traceback(error))

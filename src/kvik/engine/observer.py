"""Who looks on while the step loop works: the recorder, the live view."""

from __future__ import annotations

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.types import EngineRequest, FinishReason


class LoopObserver:
    """Is told of everything that reaches the core, in order, with the time that the core was told.

    That and what the executor computes is all that decides what the engine does. Calls come from
    the loop's thread; they must be quick and must not raise. Whoever looks on says what he does
    when he is told; else that is nothing.
    """

    def added(self, request: EngineRequest, seed: int, now: float) -> None:
        """The core took a request.

        Args:
            seed: of its first completion, the request's own or the one it was given.
        """

    def ended(
        self,
        request_id: str,
        index: int | None,
        reason: FinishReason,
        error: str | None,
        now: float,
    ) -> None:
        """Somebody outside ended a request, or one of its siblings."""

    def cache_reset(self, now: float) -> None:
        """The prefix cache was emptied."""

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        """The core was asked for a plan; None: it had none."""

    def finished(self, output: ModelRunnerOutput, now: float) -> None:
        """The oldest plan in flight was computed; the core has not heard of it yet."""

    def failed(self, error: str, now: float) -> None:
        """The oldest plan in flight could not be computed."""

    def idle(self) -> None:
        """There is nothing to do until something happens outside."""

    def close(self) -> None:
        """The loop takes no further step."""

"""What was measured of one request. All times are seconds of one monotonic clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

# The error of a request that the client itself ended early, when the run was stopped.
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class RequestRecord:
    """Filled while the answer comes. A chunk costs 12 bytes here, so that long runs fit in memory.

    A request is completed when it has `finished` and no `error`.
    """

    prompt_tokens: int  # as planned, then as the engine counts them
    due: float  # when the load wanted it sent
    sent: float
    times: array[float] = field(default_factory=lambda: array("d"))  # arrival of each chunk
    tokens: array[int] = field(default_factory=lambda: array("I"))  # how many each chunk brought
    finished: float | None = None  # the end of the answer: its finish reason, or its last chunk
    output_tokens: int | None = None  # as the engine counts them; None: the sum over the chunks
    cached_tokens: int | None = None  # of the prompt, found in a prefix cache; None: not reported
    assumed: bool = False  # no token counts: one was assumed for each chunk
    asked_tokens: int | None = None  # of output; None: no number of tokens was asked for
    held: float = 0.0  # seconds it waited since due because too many requests were in flight
    error: str | None = None  # its kind, in a few words: errors are counted by it
    detail: str = ""  # what else is known of the error

    def chunk(self, time: float, tokens: int) -> None:
        """Output arrived: `tokens` of it, at least one."""
        self.times.append(time)
        self.tokens.append(tokens)

    @property
    def completed(self) -> bool:
        return self.finished is not None and self.error is None

    @property
    def num_output_tokens(self) -> int:
        return sum(self.tokens) if self.output_tokens is None else self.output_tokens

    @property
    def even(self) -> bool:
        """Whether it is known how many tokens each chunk brought."""
        return self.output_tokens is None or sum(self.tokens) == self.output_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first output; None if there was none."""
        return self.times[0] - self.sent if self.times else None

    @property
    def e2e(self) -> float | None:
        return None if self.finished is None else self.finished - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        if self.finished is None or not self.times or self.num_output_tokens < 2:
            return None
        return (self.finished - self.times[0]) / (self.num_output_tokens - 1)

    @property
    def lag(self) -> float:
        """Seconds that the client sent it too late, beyond the time it was held."""
        return self.sent - self.due - self.held

    def fail(self, kind: str, detail: str = "") -> None:
        self.error, self.detail = kind, detail

"""Errors that a user can cause. Each is one line that names the field and what is allowed."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

MAX_SHOWN = 60  # characters of a bad value that an error repeats
MAX_BRIEF = 300  # characters of a message that an error quotes
MODEL_NOT_FOUND = "model_not_found"  # code of errors about a model or adapter that is not loaded


def shown(value: object) -> str:
    """Return a value for an error message: one line, cut if long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print very long integers
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def brief(text: object) -> str:
    """Return a message of a library or of a model's file for an error: one line, cut if long."""
    line = " ".join(str(text).split())
    return line if len(line) <= MAX_BRIEF else line[: MAX_BRIEF - 3] + "..."


# Logger of the messages that a user sees while an engine starts.
START_LOG = "kvik.start"
# Messages that an engine process logs, too: where the processes of a model run, what is not loaded.
NOTES_LOG = f"{START_LOG}.notes"


class KvikError(ValueError):
    """Base of all errors that a caller can fix; `field` names what to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # both: pickling needs them
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class Overflow(NamedTuple):  # a dataclass would make `kvik --help` slower
    """The counts of a request that does not fit into the context."""

    limit: int  # largest number of tokens of prompt and output together
    num_prompt: int  # tokens of the prompt
    # Requested output tokens; 0 if none are generated, or the number is not known.
    num_output: int = 0
    # Whether `num_prompt` is the whole prompt. If not, the prompt has more tokens.
    counted: bool = True
    prompt: str = "prompt"  # the field of the request that holds the prompt


class ParamError(KvikError):
    """A sampling parameter or prompt that the engine refuses."""

    def __init__(
        self, field: str, message: str, *, overflow: Overflow | None = None, code: str = ""
    ) -> None:
        super().__init__(field, message)
        # The counts, if the prompt, or prompt and requested output together, do not fit into the
        # context.
        self.overflow = overflow
        self.code = code  # one word for programs; "": none


def describe(error: Exception) -> str:
    """Return the error text of one request: "field: why" if the caller can fix it."""
    return str(error) if isinstance(error, ParamError) else f"{type(error).__name__}: {error}"


class ConfigError(KvikError):
    """An engine option that is out of range or contradicts another."""


class ModelError(KvikError):
    """A model folder, config.json, tokenizer or checkpoint that cannot be used."""


class CapacityError(KvikError):
    """Something that can never fit in memory, the KV cache or the queue."""


class GroupLost(KvikError):
    """One of the processes that compute a model together has ended. Only a new engine helps.

    Clients of a server see the message: it says which process ended and how, and nothing else about
    the machine.
    """

    def __str__(self) -> str:
        return self.message  # there is no field to change


class OverloadError(KvikError):
    """There is too much work now. After `retry_after` seconds there may be room."""

    def __init__(self, field: str, message: str, retry_after: float, *, of_caller: bool) -> None:
        super().__init__(field, message)
        self.retry_after = retry_after
        self.of_caller = (
            of_caller  # the caller's own requests exceed a limit, not the total of all callers
        )

    def __reduce__(self) -> tuple[object, ...]:  # pickling needs all arguments
        make = partial(type(self), of_caller=self.of_caller)
        return make, (self.field, self.message, self.retry_after)


class UnavailableError(KvikError):
    """The engine cannot take requests now: it starts, restarts, drains or has failed."""

"""Checks constraints in a process with limits: `python -m kvik.text.grammar_check`.

Building a grammar may take hours or all memory, and may crash the process. So a child first builds
each new one, computes its forced text and a mask, with the model's own tokens and on a smaller
stack than the engine has. If that succeeds, the engine can build it too.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import msgspec

from kvik.child_process import python_command
from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import CHECKED, MAX_SOURCE_BYTES, Constraint
from kvik.errors import ParamError
from kvik.text.grammar import GrammarVocabulary, TokenBytes, library, translate
from kvik.text.limited_process import LimitedProcess, framed, serve
from kvik.text.tokenizer import Tokenizer

SECONDS = 2.0  # limit for one constraint
MAX_MEMORY = 1 << 30
STACK_BYTES = 8 << 20  # of the building thread
MAX_ANSWER = 4 * MAX_SOURCE_BYTES
MAX_CACHED_BYTES = 16 << 20
# How long a constraint is refused whose process was late or died: also a machine without time or
# memory is a reason for that.
BLAMED_SECONDS = 30.0
TOO_COMPLEX = "schema_too_complex"
COMMAND = python_command("kvik.text.grammar_check")


class Checked(msgspec.Struct, frozen=True, array_like=True):
    """The answer of the process."""

    grammar: str = ""  # of llguidance; "": the constraint cannot be used
    unenforced: tuple[str, ...] = ()  # parts of a schema that it leaves out
    error: str = ""  # why the constraint cannot be used
    code: str = ""  # see `ParamError`


class GrammarCheck:
    """Checks and translates the constraints of one model's requests; threads may share it.

    Args:
        seconds: limit for one constraint.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, seconds: float = SECONDS, command: Sequence[str] = COMMAND
    ) -> None:
        self._seconds = seconds
        self.process = LimitedProcess(
            command,
            lambda: TokenBytes.of(tokenizer, tokenizer.vocab_size),
            seconds=seconds,
            max_answer=MAX_ANSWER,
        )
        self._lock = threading.Lock()
        # With the time until which they hold; the oldest first.
        self._checked: OrderedDict[Constraint, tuple[Checked, float]] = OrderedDict()
        self._known_bytes = 0

    def knows(self, params: SamplingParams) -> bool:
        """Return whether `checked` can answer without the process."""
        constraint = params.structured
        if constraint is None or constraint.kind == CHECKED:
            return True
        return self._look_up(constraint) is not None

    def checked(self, params: SamplingParams) -> tuple[SamplingParams, tuple[str, ...]]:
        """Return the parameters with the constraint in the engine's form, and the parts of a schema
        that are not enforced: each a keyword and its JSON pointer.

        Raises:
            ParamError: the constraint cannot be used; the message says why.
        """
        constraint = params.structured
        if constraint is None or constraint.kind == CHECKED:
            return params, ()
        result = self._look_up(constraint)
        if result is None:
            library()  # its error says how to install it
            result, until = self._ask(constraint)
            self._keep(constraint, result, until)
        if result.error:
            raise ParamError(constraint.name, result.error, code=result.code)
        grammar = Constraint(CHECKED, result.grammar, name=constraint.name)
        # A text ends where its grammar does.
        return (
            params.with_changes(structured=grammar, min_tokens=0, ignore_eos=False),
            result.unenforced,
        )

    def close(self) -> None:
        """End the process; all later checks fail."""
        self.process.close()

    def _ask(self, constraint: Constraint) -> tuple[Checked, float]:
        """Return the answer of the process, and the time until which it holds."""
        try:
            answer = self.process.ask(framed(constraint))
            return msgspec.msgpack.decode(answer, type=Checked), math.inf
        except TimeoutError:
            reason = f"more than {self._seconds:g} seconds"
        except (EOFError, OSError, msgspec.DecodeError):
            reason = "too much memory or stack"
        return _too_complex(reason), time.monotonic() + BLAMED_SECONDS

    def _look_up(self, constraint: Constraint) -> Checked | None:
        with self._lock:
            result, until = self._checked.get(constraint, (None, math.inf))
            if result is None or until < time.monotonic():
                return None
            self._checked.move_to_end(constraint)
            return result

    def _keep(self, constraint: Constraint, checked: Checked, until: float) -> None:
        with self._lock:
            if constraint in self._checked:
                self._known_bytes -= _size(constraint, self._checked.pop(constraint)[0])
            self._checked[constraint] = checked, until
            self._known_bytes += _size(constraint, checked)
            while self._known_bytes > MAX_CACHED_BYTES:
                oldest, (dropped, _) = self._checked.popitem(last=False)
                self._known_bytes -= _size(oldest, dropped)


def _too_complex(reason: str) -> Checked:
    return Checked(error=f"is too complex: building its grammar takes {reason}", code=TOO_COMPLEX)


def _size(constraint: Constraint, checked: Checked) -> int:
    return 512 + 4 * (len(constraint.source) + len(checked.grammar))


# The child.


def begin(first: bytes) -> Callable[[bytes], Checked]:
    """Take the tokens in the first frame. Each later frame is a constraint."""
    vocabulary = GrammarVocabulary(msgspec.msgpack.decode(first, type=TokenBytes))
    requests: SimpleQueue[bytes] = SimpleQueue()
    answers: SimpleQueue[Checked] = SimpleQueue()

    def work() -> None:
        while True:
            answers.put(_checked(requests.get(), vocabulary))

    threading.stack_size(STACK_BYTES)
    threading.Thread(target=work, daemon=True).start()

    def answer(body: bytes) -> Checked:
        requests.put(body)
        return answers.get()

    return answer


def _checked(body: bytes, vocabulary: GrammarVocabulary) -> Checked:
    try:
        grammar, unenforced = translate(msgspec.msgpack.decode(body, type=Constraint), vocabulary)
    except ParamError as error:
        return Checked(error=error.message)
    except MemoryError:
        return _too_complex("too much memory")
    except Exception as error:  # the library may raise any error
        return Checked(error=f"cannot be used: {type(error).__name__}: {error}"[:300])
    return Checked(grammar, tuple(unenforced))


if __name__ == "__main__":
    sys.exit(serve(begin, max_memory=MAX_MEMORY))

"""The state that a program extends, the scoring of choices, and running programs."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from kvik.core.sampling_params import by_own_names
from kvik.core.structured import JsonSchema
from kvik.errors import ParamError
from kvik.lang.models import Listener, ProgramModel, model_of
from kvik.llm import LLM

Method = Literal["mean", "sum", "greedy", "unconditional"]
METHODS: tuple[str, ...] = get_args(Method)


def scores_of(
    model: ProgramModel, prefix: Sequence[int], rows: Sequence[Sequence[int]], method: Method
) -> list[float]:
    """Return the score of each choice; larger is better.

    Only tokens that differ from the prefix's count. All rows are scored in one batch, and their
    common prefix is taken from the prefix cache.

    Args:
        prefix: tokens before the choices.
        rows: the prefix followed by each choice.
        method: "mean" or "sum" of a choice's log probabilities; "greedy" follows the likeliest
            token, position by position, where a choice that has ended counts with its mean;
            "unconditional" is the mean increase of the tokens' log probabilities by the prefix.
    """
    start = min(_num_shared(prefix, row) for row in rows)
    logprobs = [row[start:] for row in model.score(rows, start)]
    if method == "sum":
        return [sum(row) for row in logprobs]
    means = [sum(row) / len(row) for row in logprobs]
    if method == "mean":
        return means
    if method == "greedy":
        return _greedy(logprobs, means)
    baseline = model.score([row[start:] for row in rows], 0)
    return [
        sum(with_it - without for with_it, without in zip(row, other, strict=True)) / len(row)
        for row, other in zip(logprobs, baseline, strict=True)
    ]


def _num_shared(prefix: Sequence[int], row: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    pairs = zip(prefix, row, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _greedy(logprobs: Sequence[Sequence[float]], means: Sequence[float]) -> list[float]:
    """Return, for each choice, the number of positions at which it stays in the selection, plus a
    fraction by its log probability where it drops out."""
    scores = [0.0] * len(logprobs)
    choices = set(range(len(logprobs)))
    for place in range(max(map(len, logprobs))):
        column = {i: logprobs[i][place] if place < len(logprobs[i]) else means[i] for i in choices}
        best = max(column.values())
        for i in choices:
            scores[i] = place + 1 / (1 - column[i])
        choices = {i for i in choices if column[i] == best}
        if len(choices) == 1:
            break
    return scores


P = ParamSpec("P")
MAX_THREADS = 64  # programs that run at once
# Numbers of last tokens that are tokenised again with new text: their tokens may merge.
TAILS = (8, 4, 2, 1)


class State:
    """A text that grows, and what was generated in it, by name: `state["answer"]`.

    It holds token ids, and almost always only appends, so that computed tokens stay in the prefix
    cache; only if a text continues the last token, the last ids are replaced. In a conversation
    (`system`, `user`, `assistant`) the chat template writes the text between turns.
    """

    def __init__(
        self,
        model: ProgramModel,
        stops: Sequence[threading.Event] = (),
        listener: Listener | None = None,
    ) -> None:
        self.text = ""  # the whole text so far
        self.scores: dict[str, dict[str, float]] = {}  # name -> scores of the choices of `select`
        # The exception that ended the program in `run_batch`; None: none.
        self.error: Exception | None = None
        self._model, self._stops, self._listener = model, stops, listener
        self._ids: list[int] = []
        self._read = 0  # characters of `text` covered by `_ids`
        self._messages: list[dict[str, str]] = []
        self._turn: int | None = None  # start of the open turn's text
        self._values: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def values(self) -> Mapping[str, str]:
        """Generated and selected texts, by name."""
        return dict(self._values)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation: roles and contents."""
        return [dict(message) for message in self._messages]

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the text."""
        self._take_in()
        return list(self._ids)

    # -- text and turns --------------------------------------------------------------------------

    def __iadd__(self, text: str) -> State:
        if not isinstance(text, str):
            raise ParamError("text", f"must be a string, not {type(text).__name__}")
        if self._messages and self._turn is None:
            raise ParamError("text", "must be in a turn of the conversation: user or assistant")
        self.text += text
        self._emit(text)
        return self

    def system(self, text: str) -> None:
        """Add a system turn."""
        self._say("system", text)

    def user(self, text: str) -> None:
        """Add a user turn."""
        self._say("user", text)

    def _say(self, role: str, text: str) -> None:
        if self._turn is not None:
            raise ParamError(role, "cannot come within the assistant's turn")
        if self.text and not self._messages:
            raise ParamError(role, "cannot follow text without turns")
        self._messages.append({"role": role, "content": text})

    @contextmanager
    def assistant(self) -> Iterator[State]:
        """Open the assistant's turn: text added and generated within `with` belongs to it. An
        exception ends the turn: its text stays, and without text there is no turn."""
        if self._turn is not None:
            raise ParamError("assistant", "has a turn already")
        rendered = self._model.render(self._messages)
        if rendered.startswith(self.text):
            self.text = rendered
        else:  # the template renders earlier turns differently
            self.text, self._ids, self._read = rendered, [], 0
        self._turn, success = len(self.text), False
        try:
            yield self
            success = True
        finally:
            if (content := self.text[self._turn :]) or success:
                self._messages.append({"role": "assistant", "content": content})
            self._turn = None

    def _answering(self) -> AbstractContextManager[object]:
        """Return the assistant's turn: a new one, unless one is open or there are no turns."""
        opens = self._messages and self._turn is None
        return self.assistant() if opens else nullcontext()

    # -- the model -------------------------------------------------------------------------------

    def gen(
        self,
        name: str | None = None,
        *,
        schema: Any = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        grammar: str | None = None,
        **params: Any,
    ) -> str:
        """Generate text, add it to the state, and return it.

        After a user's turn, the text is the assistant's whole turn.

        Args:
            name: key of the text in the state.
            schema: a JSON Schema or pydantic model. At most one of this, `regex`, `choices` and
                `grammar` constrains the text.
            params: fields of `SamplingParams`; n must be 1.

        Raises:
            KvikError: a parameter is impossible.
            RuntimeError: the engine failed.
        """
        params = by_own_names(params)
        if schema is not None:
            schema = _json_schema(schema)
        kinds = {"json": schema, "regex": regex, "choice": choices, "grammar": grammar}
        structured = {kind: value for kind, value in kinds.items() if value is not None}
        if structured:
            params["structured"] = structured
        if params.get("n", 1) != 1:
            raise ParamError("n", "must be 1, as a state has one text: fork it for several")
        with self._answering():
            continuation = self._model.generate(self.token_ids, params, self._emit)
            self.text += continuation.text
            if not continuation.cut:
                self._append(continuation.token_ids, continuation.text)
        if name is not None:
            self._values[name] = continuation.text
        return continuation.text

    def select(self, name: str | None, choices: Sequence[str], method: Method = "mean") -> str:
        """Add the choice that is likeliest by the model, and return it.

        Whole choices are scored, so none is favoured by its beginning. For many similar choices
        `gen(choices=...)` is cheaper: it generates one, token by token.

        Args:
            name: key of the choice in the state, and of all scores in `scores`.
            method: how a choice's score is computed from log probabilities, see `scores_of`.

        Raises:
            ParamError: there are no choices, one is empty or comes twice, or the text before them
                is too short.
        """
        if method not in METHODS:
            raise ParamError("method", f"must be one of {', '.join(METHODS)}, not {method!r}")
        listed = isinstance(choices, Sequence) and not isinstance(choices, str)
        texts = listed and all(isinstance(option, str) for option in choices)
        if not texts or not choices or not all(choices) or len(set(choices)) < len(choices):
            raise ParamError("choices", "must be a list of texts, all different and none empty")
        with self._answering():
            prefix = self.token_ids
            if not prefix:
                raise ParamError("choices", "need a text before them")
            rows = [self._extended(prefix, choice) for choice in choices]
            if not all(_num_shared(prefix, row) for row in rows):  # it would count as certain
                reason = "change the text's first token, which has no log probability"
                raise ParamError("choices", reason)
            scores = scores_of(self._model, prefix, rows, method)
            best = max(range(len(rows)), key=lambda i: scores[i])
            self.text += choices[best]
            self._ids, self._read = rows[best], len(self.text)
        self._emit(choices[best])
        if name is not None:
            self._values[name] = choices[best]
            self.scores[name] = dict(zip(choices, scores, strict=True))
        return choices[best]

    # -- copies ----------------------------------------------------------------------------------

    def fork(self, n: int, each: Callable[[State, int], object] | None = None) -> list[State]:
        """Return independent copies. Their common text is computed once. A `stream` does not show
        them.

        Args:
            each: called for each copy with its number, in separate threads. If one fails, the
                others end at their next text.

        Raises:
            ParamError: the number is negative.
        """
        if n < 0:
            raise ParamError("n", f"must not be negative, as {n} is")
        self._take_in()
        stop = threading.Event()
        copies = [self._copy(stop) for _ in range(n)]
        if each is not None and copies:
            _in_threads(stop, min(n, MAX_THREADS), each, copies, range(n))
        return copies

    def _copy(self, stop: threading.Event) -> State:
        made = State(self._model, (*self._stops, stop))
        made.text, made._ids, made._read = self.text, list(self._ids), self._read
        made._messages, made._turn = self.messages, self._turn
        made._values, made.scores = dict(self._values), dict(self.scores)
        return made

    # -- tokens ----------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Tokenise the text that has no tokens yet."""
        if self._read < len(self.text):
            self._ids = self._extended(self._ids, self.text[self._read :])
            self._read = len(self.text)

    def _extended(self, ids: list[int], text: str) -> list[int]:
        """Return the tokens followed by the tokens of a text."""
        model = self._model
        if not ids:
            return model.encode(text, special=not self._messages)
        for size in TAILS:
            tail = ids[-size:]
            spelled = model.decode(tail)
            before = model.encode(spelled, special=False)
            if before == tail:
                after = model.encode(spelled + text, special=False)
                num_shared = _num_shared(before, after)
                return ids[: len(ids) - len(tail) + num_shared] + after[num_shared:]
        return ids + model.encode(text, special=False)

    def _append(self, ids: list[int], text: str) -> None:
        """Add generated tokens, if they match the text, without the one that ended it."""
        before = self._ids[-1:]  # some tokenizers decode a first token differently
        start = self._model.decode(before)
        for tokens in (ids, ids[:-1]):
            if self._model.decode(before + tokens) == start + text:
                self._ids, self._read = self._ids + tokens, len(self.text)
                return

    def _emit(self, text: str) -> None:
        if any(stop.is_set() for stop in self._stops):
            raise _Stopped
        if self._listener is not None:
            self._listener(text)


class _Stopped(Exception):
    """Ends a program whose caller has left."""


T = TypeVar("T")


def _in_threads(
    stop: threading.Event, threads: int, work: Callable[..., T], *arguments: Iterable[Any]
) -> list[T]:
    """Map `work` over its arguments. If a call fails or the wait is interrupted, `stop` is set."""
    with ThreadPoolExecutor(threads) as pool:
        calls = [pool.submit(work, *row) for row in zip(*arguments, strict=True)]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
            return [call.result() for call in calls if call.done()]  # if not all are, one raises
        except BaseException:
            stop.set()
            for call in calls:
                call.cancel()
            raise


def _json_schema(schema: object) -> str:
    try:
        return JsonSchema(schema).source
    except ValueError as error:
        raise ParamError("schema", str(error)) from None


Program = Callable[Concatenate[State, P], object]


def run(program: Program[P], model: LLM | str, *args: P.args, **kwargs: P.kwargs) -> State:
    """Run a program and return its state.

    Args:
        model: an `LLM`, or the URL of a `kvik serve`.
        args, kwargs: for the program, after the state.
    """
    state = State(model_of(model))
    _check_executed(program(state, *args, **kwargs))
    return state


def _check_executed(result: object) -> None:
    """Raise `ParamError` if calling a program has only made a coroutine or a generator."""
    if isinstance(result, Coroutine | Generator):
        result.close()
        raise ParamError("program", "must be a plain function, neither async nor a generator")


def run_batch(
    program: Callable[..., object],
    model: LLM | str,
    inputs: Sequence[Mapping[str, Any]],
    threads: int | None = None,
) -> list[State]:
    """Run a program for many inputs at once, and return the states in the same order.

    If a program fails, the others continue: its state has the `error`.

    Args:
        inputs: keyword arguments for the program, for each run.
        threads: programs that run at once; None: 16 for each core, at most 64.

    Raises:
        ParamError: there are no threads.
    """
    if threads is not None and threads < 1:
        raise ParamError("threads", f"must be at least 1, not {threads}")
    called, stop = model_of(model), threading.Event()

    def run_program(arguments: Mapping[str, Any]) -> State:
        state = State(called, (stop,))
        try:
            _check_executed(program(state, **arguments))
        except Exception as error:
            state.error = error
        return state

    num_threads = min(MAX_THREADS, 16 * (os.cpu_count() or 1)) if threads is None else threads
    return _in_threads(stop, num_threads, run_program, inputs)


def stream(
    program: Program[P], model: LLM | str, *args: P.args, **kwargs: P.kwargs
) -> Iterator[str]:
    """Run a program and iterate over the text as it grows: added by the program, or generated. Text
    of the chat template between turns is not included.

    Raises:
        Exception: the program failed; raised after the text before the failure.
    """
    outputs: queue.Queue[str | BaseException | None] = queue.Queue()
    stop = threading.Event()

    def work() -> None:
        try:
            state = State(model_of(model), (stop,), outputs.put)
            _check_executed(program(state, *args, **kwargs))
        except BaseException as error:  # SystemExit, too
            outputs.put(error)
        else:
            outputs.put(None)

    worker = threading.Thread(target=work, name="kvik-program", daemon=True)
    worker.start()
    try:
        while (piece := outputs.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        stop.set()
        worker.join()

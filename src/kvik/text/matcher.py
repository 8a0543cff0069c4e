"""Tracks answers in their grammars, and computes which tokens may come next.

The grammars of an engine are built in a thread; a `GrammarMatcher` is the state of one answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvik.core.structured import Constraint, Grammars, TextMatcher
from kvik.errors import ParamError
from kvik.text.grammar import FIELD, GrammarVocabulary, TokenBytes, library, problem

if TYPE_CHECKING:
    from kvik.text.tokenizer import Tokenizer

STACK_BYTES = 64 << 20  # of the building thread: references are followed recursively
MAX_BUILT_BYTES = 64 << 20  # of cached grammars, estimated
BYTES_OF_EACH, BYTES_OF_CHARACTER = 100 << 10, 40  # measured: per grammar, and per character of it
COUNTS = "[max_tokens="  # in grammars that count tokens, which callers' grammars may not
ANYTHING = -1  # a word of a mask with all bits set


class GrammarMatcher(TextMatcher):
    """See `TextMatcher`.

    If the grammar forces a text, its usual tokenisation is a run, and only the next token of the
    run is allowed. A run begins only when the previous one is used up, so runs depend on the answer
    alone, not on drafts or on a preemption in the middle.

    Args:
        start: llguidance's matcher at the start, which is not changed.
        stop: its token for all tokens that end an answer; see `GrammarVocabulary`.
        stop_ids: tokens that end the answer.
        output: tokens of the answer so far.
        counts: the grammar counts tokens, so the library cannot roll back.

    Raises:
        ParamError: as `append`.
    """

    def __init__(
        self,
        start: Any,
        stop: int,
        stop_ids: Sequence[int],
        output: Sequence[int] = (),
        *,
        counts: bool = False,
    ) -> None:
        self._counts = counts
        self._matcher = start.deep_copy()
        self._words = np.empty(stop // 32 + 1, np.int32)
        # For speed: Python integers, and an address computed once. A mask takes a microsecond.
        self._view, self._address = memoryview(self._words.data), self._words.ctypes.data
        self._stop, self._stop_bit = stop // 32, _bit(stop)
        self._stop_bits = [(i // 32, _bit(i)) for i in stop_ids]
        self._ends = frozenset(stop_ids)
        self.ended = bool(self._matcher.is_stopped())
        self.num_surplus = 0
        self._run = self._new_run()  # rest of the current run, the next token last
        for token in output:
            self.append(token)

    def append(self, token: int) -> None:
        """See `TextMatcher.append`."""
        if self.ended:
            self.num_surplus += 1
        elif token in self._ends:
            self.ended = True
        elif not self._matcher.consume_token(token):
            raise ParamError(FIELD, _cannot_continue(self._matcher))
        else:
            self.ended = bool(self._matcher.is_stopped())
            self._run = self._run[:-1] or self._new_run()

    def valid(self, tokens: Sequence[int]) -> int:
        """See `TextMatcher.valid`."""
        if self.ended:
            return 0
        if self._counts:
            return int(self._matcher.deep_copy().try_consume_tokens(list(tokens)))
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self) -> list[int]:
        """See `TextMatcher.forced`."""
        return [] if self.ended else self._run[::-1]

    def mask(self, supposed: Sequence[int] = ()) -> NDArray[np.int32]:
        """See `TextMatcher.mask`."""
        matcher, run, words, num_tokens = self._matcher, self._run, self._words, 0
        if supposed and self._counts:
            matcher = matcher.deep_copy()
        for token in supposed:
            if self.ended or not matcher.try_consume_tokens([token]):
                break
            num_tokens += 1
            run = run[:-1] or matcher.compute_ff_tokens()[::-1]
        if self.ended or num_tokens < len(supposed) or matcher.is_stopped():
            words.fill(ANYTHING)
        elif run:
            words.fill(0)
            if run[-1] not in self._ends:
                self._view[run[-1] // 32] = _bit(run[-1])
        else:
            matcher.unsafe_compute_mask_ptr(self._address, words.nbytes)
            view = self._view
            may_end = view[self._stop] & self._stop_bit
            for word, bit in self._stop_bits:
                view[word] = view[word] | bit if may_end else view[word] & ~bit
        if matcher.is_error():
            raise ParamError(FIELD, _cannot_continue(matcher))
        if num_tokens and not self._counts:
            matcher.rollback(num_tokens)
        return words

    def _new_run(self) -> list[int]:
        """Return the tokens of the text that is forced here, in reverse order."""
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced[::-1]


def _cannot_continue(matcher: Any) -> str:
    return f"the grammar cannot continue: {problem(matcher)}"


def _bit(token: int) -> int:
    """Return the bit of a token in its word of a mask, as an int32."""
    return (1 << token % 32) - ((token % 32 == 31) << 32)


class BuiltGrammars(Grammars):
    """Builds the grammars of an engine, and caches recently used ones; thread-safe.

    Args:
        load: loads the model's tokenizer, None if it has none; called for the first grammar.
        vocab_size: rows of the model's head.
    """

    def __init__(self, load: Callable[[], Tokenizer | None], vocab_size: int) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._loading = threading.Lock()  # of the next
        self._vocabulary: GrammarVocabulary | None = None
        self._lock = threading.Lock()  # of the fields below; held only briefly
        self._built: OrderedDict[str, Any] = OrderedDict()  # by grammar, the oldest first
        self._built_bytes = 0
        self._builder: ThreadPoolExecutor | None = None

    def prepare(self) -> None:
        """See `Grammars.prepare`."""
        with self._lock, suppress(RuntimeError):  # the system gives no thread now
            self._thread().submit(self._known_vocabulary)

    def begin(self, constraint: Constraint) -> Future[object]:
        """See `Grammars.begin`."""
        with self._lock:
            if (built := self._built.get(constraint.source)) is not None:
                self._built.move_to_end(constraint.source)  # it will be used soon
                done: Future[object] = Future()
                done.set_result(built)
                return done
            return self._thread().submit(self._start, constraint.source)

    def matcher(
        self, constraint: Constraint, stop_ids: Sequence[int], output: Sequence[int] = ()
    ) -> TextMatcher:
        """See `Grammars.matcher`."""
        start = self._start(constraint.source)
        stop, counts = self._known_vocabulary().stop, COUNTS in constraint.source
        return GrammarMatcher(start, stop, stop_ids, output, counts=counts)

    def _start(self, grammar: str) -> Any:
        """Return llguidance's matcher at the start of a grammar."""
        with self._lock:
            start = self._built.get(grammar)
            if start is not None:
                self._built.move_to_end(grammar)
                return start
        start = self._known_vocabulary().build(grammar)
        with self._lock:
            if grammar not in self._built:
                self._built[grammar] = start
                self._built_bytes += _size(grammar)
            while self._built_bytes > MAX_BUILT_BYTES:
                self._built_bytes -= _size(self._built.popitem(last=False)[0])
        return start

    def _thread(self) -> ThreadPoolExecutor:
        """Return the executor of the building thread; the caller holds the lock."""
        if self._builder is None:
            self._builder = _builder()
        return self._builder

    def _known_vocabulary(self) -> GrammarVocabulary:
        with self._loading:
            if self._vocabulary is None:
                library()  # without it, nothing is loaded
                tokenizer = self._load()
                if tokenizer is None:
                    raise ParamError(FIELD, "needs a tokenizer, and this model has none")
                tokens = TokenBytes.of(tokenizer, self._vocab_size)
                encode = partial(tokenizer.encode, add_special_tokens=False)
                self._vocabulary = GrammarVocabulary(tokens, encode)
            return self._vocabulary


def _size(grammar: str) -> int:
    """Estimate the bytes of a built grammar."""
    return BYTES_OF_EACH + BYTES_OF_CHARACTER * len(grammar)


def _builder() -> ThreadPoolExecutor:
    """Return an executor of one thread with a large stack."""
    before = threading.stack_size(STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix="kvik-grammar")
        pool.submit(int).result()
    finally:
        threading.stack_size(before)
    return pool

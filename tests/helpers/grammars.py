"""Grammars over a vocabulary of single bytes, to check byte by byte whether a text is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from kvik.core.structured import Constraint, Structure
from kvik.text.grammar import GrammarVocabulary, TokenBytes, translate
from kvik.text.matcher import GrammarMatcher

BYTES = 256
STOP = BYTES  # ends an answer
UNKNOWN = BYTES + 1  # has no text


@cache
def byte_vocabulary() -> GrammarVocabulary:
    """Return the vocabulary of all bytes, an end token, and a token without text."""
    return GrammarVocabulary(
        TokenBytes([*(bytes([i]) for i in range(BYTES)), b"\xff<end>", b""], [STOP])
    )


def structure(value: object) -> Constraint:
    """Return the constraint of a request."""
    return Structure().checked(value)


def matcher(value: object, output: bytes = b"") -> GrammarMatcher:
    """Return the matcher of a constraint, at its start or after `output`."""
    start = _at_start(structure(value))
    return GrammarMatcher(start, byte_vocabulary().stop, [STOP], output)


@lru_cache(8)
def _at_start(constraint: Constraint) -> Any:
    """Return llguidance's matcher, cached because tests walk many texts through one grammar."""
    vocabulary = byte_vocabulary()
    return vocabulary.build(translate(constraint, vocabulary)[0])


def tokens_of(one: GrammarMatcher, size: int, supposed: list[int] | None = None) -> list[int]:
    """Return which of the first `size` tokens may come next."""
    words = one.mask(supposed or [])
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
    return np.flatnonzero(bits).tolist()


def allowed(one: GrammarMatcher, supposed: bytes = b"") -> set[int]:
    """Return the tokens that may come next."""
    return set(tokens_of(one, UNKNOWN + 1, list(supposed)))


def accepts(one: GrammarMatcher, text: str) -> bool:
    """Return whether this text is a valid answer."""
    for byte in text.encode():
        if one.ended or byte not in allowed(one):
            return False
        one.append(byte)
    return one.ended or STOP in allowed(one)


class MarkedGrammar:
    """Matches texts with a grammar byte by byte, and markers as tokens.

    Args:
        source: a constraint, or a grammar in Lark.
        ids: the token of each marker, from `FIRST_MARKER` on.
    """

    def __init__(self, source: str | Constraint, ids: Mapping[str, int]) -> None:
        assert list(ids.values()) == list(range(FIRST_MARKER, FIRST_MARKER + len(ids)))
        texts = [bytes([i]) for i in range(BYTES)] + [b"\xff<end>"]
        texts += [b"\xff" + marker.encode() for marker in ids]
        self.num_tokens = len(texts)
        self._vocabulary = GrammarVocabulary(TokenBytes(texts, list(range(BYTES, len(texts)))))
        constraint = source if isinstance(source, Constraint) else Constraint("lark", source)
        grammar, _ = translate(constraint, self._vocabulary)
        self._start = self._vocabulary.build(grammar)
        self._counts = "max_tokens" in grammar

    def begin(self) -> GrammarMatcher:
        """Return the start of an answer, which `STOP` ends."""
        return GrammarMatcher(self._start, self._vocabulary.stop, [STOP], counts=self._counts)

    def allows(self, pieces: Iterable[str | int]) -> bool:
        """Return whether these texts and markers are a valid answer."""
        one = self.begin()
        for piece in pieces:
            for token in [piece] if isinstance(piece, int) else piece.encode():
                if one.ended or token not in tokens_of(one, self.num_tokens):
                    return False
                one.append(token)
        return one.ended or STOP in tokens_of(one, self.num_tokens)


FIRST_MARKER = BYTES + 1

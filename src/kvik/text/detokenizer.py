"""Incremental detokenisation: the text of new tokens, without incomplete characters.

The decoder of a language model's tokenizer writes a token in the same way everywhere, except that a
text loses its leading space. So the text of a sequence is a concatenation of pieces that are
computed once per token id, and a stream costs one dictionary lookup per token. A piece that is not
whole characters is kept as bytes and joined with its neighbours by the UTF-8 decoder, so at most
three bytes are ever held back.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers.decoders import ByteLevel

from kvik.errors import ModelError, brief

# Stop strings in streamed text, matched across the borders of tokens and pushes.
#
# An Aho-Corasick automaton (1975) over the stop strings: the depth of its state is the length of
# the longest suffix of the text that may still become a stop string, and exactly that suffix is
# held back. The cost per character depends neither on the text before it nor on the number of stop
# strings.


class StopTable:
    """The automaton. It is immutable, so any number of outputs may share it."""

    def __init__(self, stop: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # trie of the stop strings, node 0 is the root
        self.depth = [0]  # characters from the root
        self.match = [""]  # the longest stop string that ends at this node
        for text in stop:
            self._add(text)
        self._fail = self._link()  # node -> its longest proper suffix that is also a node
        self.starts = frozenset(self._next[0])  # characters that a stop string begins with

    def step(self, node: int, char: str) -> int:
        """Return the node after one more character."""
        while node and char not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(char, 0)

    def _add(self, text: str) -> None:
        node = 0
        for char in text:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[node] + 1)
                self.match.append("")
            node = self._next[node][char]
        self.match[node] = text

    def _link(self) -> list[int]:
        """Compute failure links in order of depth, and inherit the matches they lead to."""
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], char)
                self.match[child] = self.match[child] or self.match[self._fail[child]]
                queue.append(child)
        return self._fail


class StopStrings:
    """Watches one output for its stop strings.

    The match that ends first wins; of matches with the same end, the longest. With `include` the
    released text ends with the match, otherwise just before it.
    """

    def __init__(self, table: StopTable, include: bool) -> None:
        self._table = table
        self._include = include
        self._node = 0
        self._buffer = ""
        self._matched: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string if one was found.

        Text after a match is dropped.

        Args:
            may_end: a stop string that ends in this text is a match. One that only begins in it can
                match later in either case.
        """
        if self._matched is not None:
            return "", self._matched
        table = self._table
        if self._node == 0 and table.starts.isdisjoint(text):
            return text, None
        seen = len(self._buffer)
        tail = self._buffer + text
        for end, char in enumerate(text, start=seen + 1):
            node = table.step(self._node, char)
            self._node = node
            if may_end and table.match[node]:
                self._matched = table.match[node]
                self._buffer = ""
                cut = end if self._include else end - len(self._matched)
                return tail[:cut], self._matched
        free = len(tail) - table.depth[self._node]
        self._buffer = tail[free:]
        return tail[:free], None

    def flush(self) -> str:
        """Return the text held back, when the output ends without a match."""
        text, self._buffer = self._buffer, ""
        self._node = 0
        return text


REPLACEMENT = "\ufffd"
NO_MARKS: Mapping[int, str] = MappingProxyType({})
MAX_LEADING = 8  # number of tokens without text after which the text counts as begun
MAX_CHAR_BYTES = 4

# Decoder steps whose result for a token depends only on the token and on whether it is the first.
_LOCAL_STEPS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
_JOINING_STEPS = {"ByteLevel", "Fuse"}  # the steps after these process the joined text
_TEXT_STEPS = {"Fuse", "Strip"}  # steps on the joined text that change only its start

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the characters in which byte-level BPE spells bytes (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + rank): byte for rank, byte in enumerate(rest)}


_ALPHABET = _byte_alphabet()
# Each character of the alphabet -> the character of its byte; others below 256 -> one above.
_AS_LATIN_1 = str.maketrans(
    {chr(byte): "\u0100" for byte in range(256)} | {c: chr(b) for c, b in _ALPHABET.items()}
)


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Convert a panic of the library's Rust code to `ModelError`. A panic is a BaseException, which
    the handlers of a request's errors do not catch, and its class cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = f"the tokenizers library fails on it: {brief(error)}"
        raise ModelError("tokenizer.json", reason) from None


class TokenTexts:
    """The text of each token id, shared by all streams of a tokenizer.

    Raises:
        ModelError: the decoder rewrites a token because of its neighbours (CTC, "</w>" BPE).
    """

    def __init__(self, library: Library) -> None:
        _check_decoder(library)
        self._library = library
        self._byte_level = isinstance(library.decoder, ByteLevel)
        self._cache: dict[int, str | bytes] = {}

    def of(self, token: int) -> str | bytes:
        """Return the text of a token inside a sequence, or its bytes if they are not whole
        characters.

        An id that the tokenizer does not know (models pad their vocabulary) has no text.
        """
        piece = self._cache.get(token)
        if piece is None:
            piece = self._cache[token] = self.find(token)
        return piece

    def join(self, ids: Sequence[int]) -> str | None:
        """Return the text of tokens inside a sequence; None: one is not cached, or is bytes."""
        try:
            return "".join(map(self._cache.__getitem__, ids))  # type: ignore[arg-type]
        except (KeyError, TypeError):
            return None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the library's text of tokens at the start of a sequence."""
        with panics_are_errors():
            return self._library.decode(ids, skip_special_tokens=False)

    def find(self, token: int) -> str | bytes:
        """Return the same as `of`, without keeping it."""
        name = self._library.id_to_token(token)
        if name is None:
            return ""
        if self._byte_level:
            return _byte_level_piece(name)
        text = self.decode([token])
        if REPLACEMENT in text:
            match = _BYTE_TOKEN.fullmatch(name)
            if match:
                return bytes([int(match[1], 16)])
            if all(char in _ALPHABET for char in name):
                return bytes(_ALPHABET[char] for char in name)
        return self.decode([token, token])[len(text) :]  # the second one is not the first


def _byte_level_piece(name: str) -> str | bytes:
    """Return a token's text, or its bytes, as the library's `ByteLevel` decodes it, but faster: a
    grammar needs all tokens."""
    try:
        data = name.translate(_AS_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # a character is not of the alphabet, so it is text
        return name
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class Detokenizer:
    """Text of one growing sequence of tokens.

    The pushed texts and the flush add up to what the tokens add to the text of the prompt. A
    character that the prompt leaves unfinished belongs to the output.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt_ids: Sequence[int],
        skipped: AbstractSet[int],
        marks: Mapping[int, str],
    ) -> None:
        """
        Args:
            skipped: tokens to leave out.
            marks: token id -> text that replaces it, even if it is skipped.
        """
        self._texts = texts
        self._skipped = skipped
        self._marks = marks
        self._partial = b""  # start of a character, at most three bytes
        shown = (token for token in reversed(prompt_ids) if token not in skipped)
        last = list(islice(shown, MAX_LEADING))[::-1]
        has_text = len(last) == MAX_LEADING or texts.decode(last) != ""
        self._leading = None if has_text else last  # tokens so far, while their text is empty
        for token in last[-MAX_CHAR_BYTES:]:
            piece = texts.of(token)
            self._partial = self._partial + piece if isinstance(piece, bytes) else b""
        self._complete(b"")

    def push(self, ids: Sequence[int]) -> str:
        """Take more tokens; return the text that is final."""
        usual = not self._partial and self._skipped.isdisjoint(ids)
        if usual and self._leading is None and self._marks.keys().isdisjoint(ids):
            text = self._texts.join(ids)
            if text is not None:  # the usual case
                return text
        out: list[str] = []
        for token in ids:
            if token in self._marks:
                self._leading = None
                out.append(self.flush() + self._marks[token])
                continue
            if token in self._skipped:
                continue
            piece = self._texts.of(token)
            if isinstance(piece, bytes):
                self._leading = None
                out.append(self._complete(piece))
            elif self._leading is not None:
                out.append(self._lead(self._leading, token))
            elif piece:
                out.append(self.flush() + piece)
        return "".join(out)

    def flush(self) -> str:
        """Return the text held back, when the output ends: an incomplete character as U+FFFD."""
        rest = self._partial.decode(errors="replace")
        self._partial = b""
        return rest

    def _complete(self, data: bytes) -> str:
        """Return the characters that these bytes complete. Invalid bytes become U+FFFD at once."""
        data = self._partial + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._partial = data[used:]
        return text

    def _lead(self, leading: list[int], token: int) -> str:
        """Return the text of a token at the start of a text, where the decoder drops spaces."""
        leading.append(token)
        text = self._texts.decode(leading)
        if text or len(leading) == MAX_LEADING:
            self._leading = None
        return text


def _check_decoder(library: Library) -> None:
    if library.decoder is None:
        return
    state: dict[str, Any] = json.loads(library.decoder.__getstate__())
    joined = False
    for step in state["decoders"] if state["type"] == "Sequence" else [state]:
        kind = step["type"]
        allowed = _TEXT_STEPS if joined else _LOCAL_STEPS
        if kind not in allowed or step.get("stop", 0):
            raise ModelError(
                "tokenizer.json",
                f"its decoder step {kind} needs to see the whole text; tokens can be streamed with "
                f"{', '.join(sorted(_LOCAL_STEPS))}",
            )
        joined = joined or kind in _JOINING_STEPS

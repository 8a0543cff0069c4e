"""Words that must not appear, as the token sequences that would spell them."""

from __future__ import annotations

from collections.abc import Iterable

from kvik.errors import ParamError
from kvik.text.tokenizer import Tokenizer


def bad_word_ids(
    words: Iterable[str | tuple[int, ...]], tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelt at the start of a line and after a space; ids stay as they are.

    A word is banned as the tokenizer would write it. A model may still spell it with other tokens,
    letter by letter, say.

    Raises:
        ParamError: a word without a tokenizer to spell it, or one that has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}  # in order, each once
    for word in words:
        if not isinstance(word, str):
            found[word] = None
            continue
        if tokenizer is None:
            raise ParamError("bad_words", "must be token ids: this model has no tokenizer")
        bare = word.lstrip()
        spellings = [tuple(tokenizer.encode(text, False)) for text in (bare, f" {bare}")]
        if not spellings[0]:
            raise ParamError("bad_words", f"{word[:40]!r} has no tokens")
        found.update(dict.fromkeys(spellings))
    return tuple(found)

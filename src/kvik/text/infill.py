"""Prompts for models that fill the gap between two texts, such as code before and after a cursor.

Models that were trained for it (Bavarian et al. 2022, Fill in the Middle) have tokens that mark the
text before the gap, the text after it, and where the answer begins. The vocabulary says which.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvik.core.sampling_params import SamplingParams
from kvik.errors import ParamError
from kvik.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Markers:
    """The tokens of a family of models, as its vocabulary spells them.

    Attributes:
        files: before the name of another file; the first one that the vocabulary has.
        ends: tokens after which the answer has ended, besides all others here.
        after_first: the text after the gap stands before the other one.
    """

    before: str
    after: str
    answer: str | None  # None: the answer begins after the text before the gap
    files: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    after_first: bool = False


FAMILIES = (
    # Qwen, CodeGemma, Granite 4
    Markers(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        files=("<|file_sep|>", "<|file_separator|>"),
        ends=("<|fim_pad|>", "<|repo_name|>"),
    ),
    # StarCoder, Granite Code
    Markers(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        files=("<file_sep>", "<filename>"),
        ends=("<fim_pad>", "<repo_name>", "<reponame>"),
    ),
    Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),  # SantaCoder
    Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek)
    Markers("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    Markers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Markers("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", after_first=True),  # Seed-Coder
    Markers("[PREFIX]", "[SUFFIX]", None, ends=("[MIDDLE]",), after_first=True),  # Codestral
)
WORD_START = "▁"  # SentencePiece's space, which its tokenizers put before a text
OTHER_WORD = "☺"  # no token has it with what follows


class Infiller:
    """Makes the prompts of one model.

    Raises:
        ParamError: its vocabulary has no such tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.library.token_to_id
        for family in FAMILIES:
            markers = (family.before, family.after, family.answer)
            tokens = [vocabulary(name) for name in markers if name is not None]
            ids = [token for token in tokens if token is not None]
            if len(ids) == len(tokens):
                break
        else:
            reason = "this model has no tokens for it, as code models have"
            raise ParamError("suffix", f"a text cannot be inserted before another: {reason}")
        self._tokenizer = tokenizer
        self._family = family
        self._before, self._after, *self._answer = ids
        self._file = next(filter(None, map(vocabulary, family.files)), None)
        bos = tokenizer.bos_token
        added = tokenizer.encode("")
        self._start = added[:1] if bos is not None and added[:1] == [vocabulary(bos)] else []
        ends = [*ids, *map(vocabulary, (*family.files, *family.ends))]
        self._ends = tuple(sorted({token for token in ends if token is not None}))
        self._markup = re.compile("|".join(map(re.escape, tokenizer.markup_ids)) or "(?!)")
        (first, *_) = tokenizer.encode("a", False) or [0]
        self._begins_words = tokenizer.token(first).startswith(WORD_START)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the tokens that end an answer."""
        return params.with_changes(stop_token_ids=(*params.stop_token_ids, *self._ends))

    def ids(
        self,
        prefix: str,
        suffix: str,
        answer: str = "",
        files: Sequence[tuple[str, str]] = (),
        limit: int | None = None,
    ) -> tuple[list[int], int]:
        """Return the prompt for the gap between two texts, and how many of the files it has.

        Special tokens that are spelt out in the texts stay text.

        Args:
            answer: beginning of the answer.
            files: name and text of parts of other files, the most relevant one last.
            limit: tokens that the prompt may have; the first files are left out beyond it. Without
                files it may be longer.
        """
        before = [self._before, *self._text(prefix if self._answer else prefix + answer)]
        after = [self._after, *self._text(suffix, inside=True)]
        prompt = after + before if self._family.after_first else before + after
        if self._answer:
            prompt += [*self._answer, *self._text(answer, inside=True)]
        marker = [] if self._file is None else [self._file]  # of the file with the gap
        kept = list[list[int]]()
        num_left = None if limit is None else limit - len(self._start + marker + prompt)
        for name, text in reversed(files):
            ids = self._named_text(name, text)
            if num_left is not None and (num_left := num_left - len(ids)) < 0:
                break
            kept.insert(0, ids)
        others = [token for ids in (*kept, marker) for token in ids] if kept else []
        return [*self._start, *others, *prompt], len(kept)

    def _named_text(self, name: str, text: str) -> list[int]:
        if self._file is None:
            return self._text(f"{text}\n\n")
        return [self._file, *self._text(f"{name}\n{text}")]

    def _text(self, text: str, *, inside: bool = False) -> list[int]:
        """Return the ids of a text without special tokens, and without the space that some
        tokenizers put before a text if it stands inside of one."""
        ids, place = list[int](), 0
        for cut in (*(match.start() + 1 for match in self._markup.finditer(text)), len(text)):
            ids += self._part(text[place:cut], inside=inside or place > 0)
            place = cut
        return ids

    def _part(self, text: str, *, inside: bool) -> list[int]:
        if not (text and inside and self._begins_words):
            return self._tokenizer.encode(text, False)
        other = len(self._tokenizer.encode(OTHER_WORD, False))
        return self._tokenizer.encode(OTHER_WORD + text, False)[other:]

"""Tokens and their log probabilities as the API shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvik.core.types import TokenLogprobs
from kvik.server.openai.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from kvik.server.pieces import Made
from kvik.text.detokenizer import Detokenizer
from kvik.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no minus infinity


class TokenNames:
    """How the tokens of a model are written. Without a tokenizer they are only numbers."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def bytes(self, token: int) -> bytes | None:
        """What it adds to a text."""
        return None if self.tokenizer is None else self.tokenizer.token_bytes(token)

    def name(self, token: int, escape: str = "") -> str:
        """Its text; if it is no UTF-8 by itself, `escape` and its bytes as \\xHH."""
        data = self.bytes(token)
        if data is None:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return escape + "".join(f"\\x{byte:02x}" for byte in data)

    def chat(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Of a few output tokens, in order."""
        return ChatLogprobs([self._chat_token(one) for one in logprobs])

    def whole_chat(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Of all of them; for `pieces.encoded`."""
        return ChatLogprobs(cast(list[TokenLogprob], Made(logprobs, self._chat_token)))

    def _chat_token(self, one: TokenLogprobs) -> TokenLogprob:
        top = [
            TopLogprob(self.name(token), finite(value), self._numbers(token))
            for token, value in one.top
        ]
        token = one.token_id
        return TokenLogprob(self.name(token), finite(one.logprob), self._numbers(token), top)

    def _numbers(self, token: int) -> list[int] | None:
        data = self.bytes(token)
        return None if data is None else list(data)

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """By token id, the token itself first; for `pieces.encoded`, which knows no difference."""
        return cast(PromptLogprobs, Made(logprobs, self._prompt_token))

    def _prompt_token(self, one: TokenLogprobs | None) -> dict[str, PromptLogprob] | None:
        if one is None:
            return None
        found = {
            str(one.token_id): PromptLogprob(finite(one.logprob), one.rank, self.name(one.token_id))
        }
        for rank, (token, value) in enumerate(one.top, start=1):
            found.setdefault(str(token), PromptLogprob(finite(value), rank, self.name(token)))
        return found


class CompletionTokens:
    """The tokens of one completion in the shape of /v1/completions, from first to last.

    Args:
        num_top: alternatives to show at each position; more may have been computed.
        skip_special: whether special tokens are left out of the text, so that they have no length.
        prompt_ids: what stands before the completion's own tokens.
    """

    def __init__(
        self, names: TokenNames, num_top: int, skip_special: bool, prompt_ids: Sequence[int]
    ) -> None:
        self._names = names
        self._num_top = num_top
        self._offset = 0
        self._text: Detokenizer | None = None
        if names.tokenizer is not None:
            self._text = names.tokenizer.new_stream(prompt_ids, skip_special)

    def skip(self, num_chars: int) -> None:
        """Text that stands before the next token and belongs to none."""
        self._offset += num_chars

    def show(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """The next tokens, one entry of `logprobs` for each."""
        shown = CompletionLogprobs([], [], [], [] if self._num_top else None)
        for token, one in zip(token_ids, logprobs, strict=True):
            shown.text_offset.append(self._offset)
            shown.tokens.append(self._names.name(token, "bytes:"))
            shown.token_logprobs.append(None if one is None else finite(one.logprob))
            if shown.top_logprobs is not None:
                shown.top_logprobs.append(None if one is None else self._top(one))
            if self._text is not None:
                self._offset += len(self._text.push([token]))
        return shown

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """By text, the likelier where two tokens have the same. The token itself is among them."""
        found: dict[str, float] = {}
        for token, value in one.top[: self._num_top]:
            found.setdefault(self._names.name(token, "bytes:"), finite(value))
        found.setdefault(self._names.name(one.token_id, "bytes:"), finite(one.logprob))
        return found


def finite(logprob: float) -> float:
    return max(logprob, LEAST)

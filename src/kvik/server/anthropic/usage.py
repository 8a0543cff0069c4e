"""`usage`: the tokens of a request, counted as the engine counted them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvik.core.types import Pin, PromptUse
from kvik.server.anthropic.conversation import HOUR
from kvik.server.anthropic.message_answer import CacheCreation, Usage


@dataclass(frozen=True, slots=True)
class Meter:
    """Of one request.

    Attributes:
        num_prompt: tokens.
        pins: that were wanted.
        block_size: of the KV cache: what is pinned are full blocks.
    """

    num_prompt: int
    pins: Sequence[Pin]
    block_size: int

    def usage(self, used: PromptUse | None, num_output: int) -> Usage:
        """`used`: None if it is not known yet."""
        if used is None:
            return Usage(
                input_tokens=self.num_prompt,
                cache_creation_input_tokens=None,
                cache_read_input_tokens=None,
                cache_creation=None,
                output_tokens=num_output,
            )
        read, written = used.num_cached_tokens, used.num_pinned_tokens
        hour = self._for_an_hour(read, written)
        return Usage(
            input_tokens=self.num_prompt - read - written,
            cache_creation_input_tokens=written,
            cache_read_input_tokens=read,
            cache_creation=CacheCreation(
                ephemeral_5m_input_tokens=written - hour, ephemeral_1h_input_tokens=hour
            ),
            output_tokens=num_output,
        )

    def _for_an_hour(self, read: int, written: int) -> int:
        """Of the tokens written and pinned, those up to the last mark of an hour that they reach:
        there may not have been room for a longer pin."""
        lengths = [
            min(pin.num_tokens, self.num_prompt) // self.block_size * self.block_size
            for pin in self.pins
            if pin.seconds == HOUR
        ]
        reached = [length for length in lengths if length <= read + written]
        return min(max(max(reached, default=0) - read, 0), written)

"""A conversation -> the tokens of its prompt, and how many of them each cache mark means.

What a template makes of a block is the template's business. So the conversation is rendered once
more up to the mark, and what that has in common with the whole prompt is what stands before it,
whatever comes after. Where a template shows the beginning of a conversation in another way than
alone, less is in common, and less is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvik.config.errors import ParamError
from kvik.core.types import Pin
from kvik.server.anthropic.conversation import Conversation, Mark, Turn, plain
from kvik.server.continuation import continued
from kvik.server.errors import called
from kvik.server.texts import Texts


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    pins: tuple[Pin, ...]  # in order of length


async def make_prompt(texts: Texts, conversation: Conversation) -> Prompt:
    """Raises `ParamError` if the template refuses the conversation, or it is too long."""
    turns = conversation.turns
    if conversation.continues:
        with called(continue_final_message="messages"):
            text = await continued(texts, plain(turns))
    else:
        text = await texts.render(plain(turns), add_generation_prompt=True)
    with called(prompt="messages"):
        ids = await texts.encode(text, add_special_tokens=False)
    pins = []
    for mark in conversation.marks:
        length = await _length(texts, turns, mark, text, ids)
        if length:
            pins.append(Pin(length, mark.seconds))
    return Prompt(ids, tuple(sorted(pins, key=lambda pin: pin.num_tokens)))


async def _length(
    texts: Texts, turns: Sequence[Turn], mark: Mark, text: str, ids: Sequence[int]
) -> int:
    """Tokens of the prompt up to a mark."""
    marked = turns[mark.turn]
    shown = [*turns[: mark.turn], Turn(marked.role, marked.texts[: mark.block + 1])]
    if marked.role == "system":
        # Most templates need somebody to speak. What he says is not what he says in the prompt.
        following = turns[mark.turn + 1]
        other = "b" if following.texts[0].lstrip().startswith("a") else "a"
        shown.append(Turn(following.role, [other]))
    try:
        alone = await texts.render(plain(shown), add_generation_prompt=False)
    except ParamError:
        return 0  # this template cannot show the beginning of this conversation
    length = common_length(alone, text)
    if length == len(text):
        return len(ids)
    return common_length(await texts.encode(text[:length], add_special_tokens=False), ids)


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How long the longest common beginning is: by halves, since slices are compared quickly."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

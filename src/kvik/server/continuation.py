"""A conversation whose last message is gone on with."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from kvik.config.errors import ParamError
from kvik.server.texts import Texts


async def continued(
    texts: Texts,
    messages: Sequence[Mapping[str, object]],
    variables: Mapping[str, object] | None = None,
) -> str:
    """The text of a conversation to the end of its last message, without what the template writes
    behind that. White space at its end is left out, as many templates do anyway.

    The end is found by a mark that no message can hold: the last words themselves may well come
    again in what follows ("<" in "<|im_end|>").
    """
    *before, last = messages
    content = str(last["content"]).rstrip()
    mark = secrets.token_hex(16)
    text = await texts.render(
        [*before, {**last, "content": content + mark}],
        add_generation_prompt=False,
        variables=dict(variables or {}),
    )
    place = text.rfind(mark)
    if not content or place < 0:
        raise ParamError(
            "continue_final_message", "the chat template does not show the last message as it is"
        )
    return text[:place]

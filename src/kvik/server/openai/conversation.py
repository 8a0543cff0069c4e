"""Messages -> the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvik.config.errors import ParamError
from kvik.server.beside import beside
from kvik.server.continuation import continued
from kvik.server.errors import called
from kvik.server.openai.chat_request import Message, Part, Variable
from kvik.server.openai.unhonoured import MESSAGE
from kvik.server.texts import Texts
from kvik.server.unhonoured import refuse

# What a template gets anyway, or what would replace it.
_OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
_AS = {"developer": "system"}  # a newer name, which few templates know
_TOOL_ROLES = ("tool", "function")


async def conversation_ids(
    texts: Texts,
    messages: Sequence[Message],
    variables: Mapping[str, Variable] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    add_special_tokens: bool | None = None,
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn.

    Args:
        add_generation_prompt: None is true, unless the final message is continued.
        continue_final_message: end where the last message does, so that its author goes on.
        add_special_tokens: to what the template wrote, which has its own.

    Raises:
        ParamError: the messages are malformed or too long, or the template refuses them.
    """
    if continue_final_message and add_generation_prompt:
        raise ParamError("continue_final_message", "excludes add_generation_prompt")
    for name in variables or ():
        if name in _OWN_NAMES:
            raise ParamError("chat_template_kwargs", f"must not set {name}")
    plain = await beside(len(messages), lambda: [_plain(message) for message in messages])
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if continue_final_message:
        text = await continued(texts, plain, variables)
    else:
        text = await texts.render(
            plain, add_generation_prompt=add_generation_prompt, variables=dict(variables or {})
        )
    with called(prompt="messages"):
        return await texts.encode(text, bool(add_special_tokens))


def _plain(message: Message) -> dict[str, object]:
    refuse({name: getattr(message, name) for name in MESSAGE}, MESSAGE, "messages")
    if message.role in _TOOL_ROLES:
        raise ParamError("messages", f"of role {message.role!r} need tools, not supported yet")
    plain: dict[str, object] = {
        "role": _AS.get(message.role, message.role),
        "content": _text(message.content),
    }
    for name in ("name", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    return plain


def _text(content: str | list[Part] | None) -> str:
    if content is None:
        raise ParamError("messages", "need a content, a string or a list of text parts")
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise ParamError(
                "messages", f"have a part of type {part.type[:40]!r}; only text is supported"
            )
        if part.text is None:
            raise ParamError("messages", "have a text part without text")
    return "\n".join(part.text or "" for part in content)

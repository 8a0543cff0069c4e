"""What is served in the words of the Anthropic API."""

from __future__ import annotations

from functools import partial

from kvik.server.anthropic.message_answer import Answer, TokenCount
from kvik.server.anthropic.message_request import CountRequest, MessageRequest
from kvik.server.anthropic.messages import count_tokens, messages
from kvik.server.parts import Parts
from kvik.server.route import Route


def routes(parts: Parts) -> list[Route]:
    return [
        Route(
            "/v1/messages",
            partial(messages, parts),
            body=MessageRequest,
            answer=Answer,
            note="Answer a conversation, in one piece or as a stream of events.",
        ),
        Route(
            "/v1/messages/count_tokens",
            partial(count_tokens, parts),
            body=CountRequest,
            answer=TokenCount,
            note="How many tokens a conversation has as a prompt.",
        ),
    ]

"""The way out of an answer: the headers that all answers have, and what the log tells of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import formatdate

from starlette.types import Message, Send

from kvik.server.exchange import Exchange

SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Answer:
    """Wraps `send` of one request.

    Attributes:
        status: None until it has begun.
        num_bytes: of the body so far.
    """

    def __init__(
        self, send: Send, exchange: Exchange, request_id: str | None, headers: Mapping[str, str]
    ) -> None:
        """Args:
        request_id: what the client calls its request; sent back if it is harmless.
        headers: to add.
        """
        self.status: int | None = None
        self.num_bytes = 0
        self._send = send
        self._exchange = exchange
        theirs = request_id is not None and SAFE_ID.fullmatch(request_id)
        self._echoed = request_id if theirs else exchange.request_id
        self._headers = headers

    @property
    def started(self) -> bool:
        return self.status is not None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], *self._own_headers()]}
        else:
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "date": formatdate(usegmt=True),
            "x-request-id": self._echoed,
            "x-kvik-request-id": self._exchange.request_id,
            **self._headers,
        }
        if self._exchange.ignored_fields:
            headers["x-kvik-ignored-fields"] = ", ".join(self._exchange.ignored_fields)
        return [(name.encode(), str(value).encode("latin-1")) for name, value in headers.items()]

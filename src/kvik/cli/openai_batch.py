"""Answers a batch file of OpenAI's API with the server's application, in this process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Literal

import msgspec
from starlette.types import ASGIApp, Message

from kvik.async_llm import AsyncLLM
from kvik.cli.report import say_decisions
from kvik.config.server_config import MAX_SECONDS
from kvik.engine.thread import LOOKAHEAD
from kvik.errors import ParamError
from kvik.server import build_app
from kvik.server.errors import HttpError, in_messages
from kvik.server.route import DEFAULT_LIMITS, convert, parse_json

PAUSES = (1, 2, 4, 8, 16)  # seconds before a request that was refused for now is sent again
SCOPE: Mapping[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "query_string": b"",
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
}


class BatchRequest(msgspec.Struct, frozen=True):
    """One request of the file; other fields are ignored."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: Literal["POST"] = "POST"

    @property
    def id(self) -> str:
        """The id of its answer, which shows whether an answer is that of this very request."""
        text = json.dumps((self.custom_id, self.url, self.body), sort_keys=True)
        return f"batch_req_{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def read_request(text: str) -> BatchRequest:
    """Read a line of the file; raises `ParamError`."""
    try:  # as strictly as the server reads bodies
        return convert(parse_json(text.encode(), DEFAULT_LIMITS), BatchRequest)
    except HttpError as error:
        raise ParamError("prompts", f"is not a request of a batch: {error.message}") from None


async def answer_all(
    entries: Sequence[BatchRequest],
    options: Mapping[str, Any],
    answered: Callable[[dict[str, Any]], None],
    *,
    verbose: bool,
) -> None:
    """Answer requests with a new engine, as many at once as keep its batch full.

    Args:
        options: of the engine.
        answered: called with each line of the output when it is ready.
        verbose: print the engine's decisions.
    """
    async with AsyncLLM(**options) as engine:
        if verbose:
            say_decisions(engine.resolved)
        app = build_app(
            engine, any_model_name=True, request_timeout=MAX_SECONDS, stored_response_bytes=0
        )
        limits, replicas = engine.resolved.scheduler, engine.resolved.runner.replicas
        num_workers = min(limits.max_num_seqs * replicas + LOOKAHEAD, limits.max_queued_requests)
        queue = iter(entries)

        async def work() -> None:
            for entry in queue:
                answered(await _answer(engine, app, entry))

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(num_workers, len(entries))):
                    workers.create_task(work())
        except BaseExceptionGroup as group:  # a closed pipe, or an engine that failed for good
            raise group.exceptions[0] from None


async def _answer(engine: AsyncLLM, app: ASGIApp, entry: BatchRequest) -> dict[str, Any]:
    """Return a line in the format of OpenAI's output files."""
    if entry.body.get("stream"):
        refusal = HttpError(400, "stream: must be false in a batch", "stream")
        app = refusal.response(anthropic=in_messages(entry.url))
    for pause in chain(PAUSES, repeat(PAUSES[-1])):
        start, *rest = await _post(app, entry)
        if (b"x-should-retry", b"true") not in start["headers"]:
            break
        await engine.client.ready()  # raises if it never will be
        await asyncio.sleep(pause)  # the queue is full
    return {
        "id": entry.id,
        "custom_id": entry.custom_id,
        "response": {
            "status_code": start["status"],
            "request_id": secrets.token_hex(12),
            "body": json.loads(b"".join(part["body"] for part in rest)),
        },
        "error": None,
    }


async def _post(app: ASGIApp, entry: BatchRequest) -> list[Message]:
    """Return the messages of an application's response."""
    body, sent = [json.dumps(entry.body).encode()], list[Message]()

    async def receive() -> Message:
        if not body:  # the client stays connected
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": body.pop()}

    async def send(message: Message) -> None:
        sent.append(message)

    await app({**SCOPE, "path": entry.url}, receive, send)
    return sent

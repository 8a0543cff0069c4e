"""The production server: OpenAI- and Anthropic-compatible, for the engine that it is given.

At the edge, `http_protocol.py` handles a connection, `app.py` a request and its response,
`access.py` access control, `route.py` routes and bodies, `errors.py` error responses. From request
to text: `texts.py` has the tokenizer and the chat template, `admission.py` the queue limits,
`generation.py` the exchange with the engine, `responses.py` JSON and event streams,
`stored_responses.py` what requests of `/v1/responses` can continue. `server.py` assembles the
parts, `run.py` serves until a signal; `metrics.py` and `tracing.py` observe. `asgi.py` wraps an
`AsyncLLM` as an ASGI application. `proxy.py` is the proxy in front of several servers (`kvik
route`), `transfer.py` lets one of them compute prompts for another.

An endpoint is one file with its request, response, handler and routes: `native.py`, `anthropic.py`,
`llama_server.py`, `health.py`, `admin.py`, `engine_view.py` and all of `openai/`. `pages.py` serves
the playground of `ui/` and the documentation; `unhonoured.py` refuses unsupported fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvik.server.asgi import build_app

__all__ = ["build_app"]


if not TYPE_CHECKING:  # with it, type checkers would accept any name

    def __getattr__(name: str) -> object:  # lazy: parts of the server are used without the rest
        if name not in __all__:
            raise AttributeError(f"module 'kvik.server' has no attribute {name!r}")
        from kvik.server import asgi

        return getattr(asgi, name)

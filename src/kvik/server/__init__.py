"""The production server: OpenAI- and Anthropic-compatible, over one engine that it is handed.

The edge: `http_protocol.py` is one connection, `app.py` one request in and out, `access.py` who may
send it, `route.py` routes and bodies, `errors.py` what is wrong with it. From request to text:
`texts.py` tokenizer and chat template, `admission.py` the queue limits, `generation.py` the way to
the engine and back, `responses.py` JSON and event streams. `server.py` puts the parts together,
`run.py` serves until a signal; `metrics.py` and `tracing.py` observe. `asgi.py` makes an ASGI
application of an `AsyncLLM`. `proxy.py` stands in front of several servers (`kvik route`),
`transfer.py` is how one of these computes prompts for another one.

An endpoint is one file with its request, response, handler and routes: `native.py`, `anthropic.py`,
`llama_server.py`, `health.py`, `admin.py`, `engine_view.py` and all of `openai/`. `pages.py` serves
the playground of `ui/` and the documentation; `unhonoured.py` refuses what kvik does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvik.server.asgi import build_app

__all__ = ["build_app"]


def __getattr__(name: str) -> object:  # parts of the server are used without the rest
    if name not in __all__:
        raise AttributeError(f"module 'kvik.server' has no attribute {name!r}")
    from kvik.server import asgi

    return getattr(asgi, name)

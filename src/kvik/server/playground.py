"""The page at `/`: a playground beside the live engine, served from files of the package. Its form
has a field for each number among the sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import PARAMETERS
from kvik.options import Integer, Number
from kvik.server.route import Handler, Route

FOLDER = Path(__file__).with_name("ui")
TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
# Scripts and styles of this server alone, and none inside the page: text of a model that looks like
# a script is never run. The page talks to this server alone.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
PARAMETERS_SCRIPT = "parameters.js"
MAX_EXACT = 2**53  # integers beyond it are not exact in a browser
OTHERS = ("docs.html",)  # of the same folder, served elsewhere


def routes() -> list[Route]:
    """One for each file, read now: nothing that a request says is ever part of a file's name.

    They are open, since a browser cannot send a key with them, and hold nothing to protect.
    """
    found = []
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in TYPES and file.name not in OTHERS:
            path = "/" if file.name == INDEX else f"/ui/{file.name}"
            note = "The playground." if file.name == INDEX else ""
            handler = _content(file.read_bytes(), TYPES[file.suffix])
            found.append(Route(path, handler, "GET", open=True, note=note))
    script = f"export const PARAMETERS = {json.dumps(form_fields())};\n".encode()
    handler = _content(script, TYPES[".js"])
    found.append(Route(f"/ui/{PARAMETERS_SCRIPT}", handler, "GET", open=True))
    return found


def form_fields() -> list[dict[str, object]]:
    """The form's fields for numbers: name, label, what an input may hold, note."""
    made = []
    for one in PARAMETERS.values():
        kind = one.kind
        if one.facts["label"] and isinstance(kind, Integer | Number):
            limits: dict[str, object] = {"step": 1 if isinstance(kind, Integer) else "any"}
            if abs(kind.low) < MAX_EXACT and abs(kind.high) < MAX_EXACT:
                limits |= {"min": kind.low, "max": kind.high}
            made.append(
                {"name": one.name, "label": one.facts["label"], "limits": limits, "note": one.help}
            )
    return made


def _content(content: bytes, media_type: str) -> Handler:
    async def serve(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return serve

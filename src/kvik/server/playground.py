"""The page at `/`: a playground beside the live engine, served from files of the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

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
            found.append(Route(path, _file(file), "GET", open=True, note=note))
    return found


def _file(file: Path) -> Handler:
    content, media_type = file.read_bytes(), TYPES[file.suffix]

    async def serve(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return serve

"""The playground, and `/openapi.json` and `/docs`, generated from routes and types of bodies."""

from __future__ import annotations

import json
import re
from asyncio import to_thread
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvik import __version__
from kvik.core.sampling_params import PARAMETERS
from kvik.options import Integer, Number
from kvik.server.errors import Error, MessagesError, in_messages
from kvik.server.route import Handler, Route

# The page at `/`: a playground with a live view of the engine, served from package files. Its form
# has a field for each numeric sampling parameter.

FOLDER = Path(__file__).with_name("ui")
TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
# Only scripts and styles from this server, and none inline: model text that looks like a script is
# never run. No script can create HTML from text. The page connects to this server only.
PLAYGROUND_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
PLAYGROUND_HEADERS: Mapping[str, str] = {
    "content-security-policy": PLAYGROUND_POLICY,
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
PARAMETERS_SCRIPT = "parameters.js"
MAX_EXACT = 2**53  # integers beyond it are not exact in a browser
OTHERS = ("docs.html",)  # files of the folder that are not served here


def playground_routes() -> list[Route]:
    """Return a route for each file, read now, so that no file name comes from a request.

    They are open, since a browser cannot send a key for them, and contain nothing secret.
    """
    routes = []
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in TYPES and file.name not in OTHERS:
            path = "/" if file.name == INDEX else f"/ui/{file.name}"
            note = "The playground." if file.name == INDEX else ""
            handler = _content(file.read_bytes(), TYPES[file.suffix])
            routes.append(Route(path, handler, "GET", open=True, note=note))
    script = f"export const PARAMETERS = {json.dumps(form_fields())};\n".encode()
    handler = _content(script, TYPES[".js"])
    routes.append(Route(f"/ui/{PARAMETERS_SCRIPT}", handler, "GET", open=True))
    return routes


def form_fields() -> list[dict[str, object]]:
    """Return the form's numeric fields: name, label, limits of the input, note."""
    made = []
    for param in PARAMETERS.values():
        kind = param.kind
        if param.facts["label"] and isinstance(kind, Integer | Number):
            limits: dict[str, object] = {"step": 1 if isinstance(kind, Integer) else "any"}
            if abs(kind.low) < MAX_EXACT and abs(kind.high) < MAX_EXACT:
                limits |= {"min": kind.low, "max": kind.high}
            made.append(
                {
                    "name": param.name,
                    "label": param.facts["label"],
                    "limits": limits,
                    "note": param.help,
                }
            )
    return made


def _content(content: bytes, media_type: str) -> Handler:
    """Return a handler that sends the content, or 304 if the browser has it."""
    tag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
    headers = {**PLAYGROUND_HEADERS, "etag": tag}

    async def serve(request: Request) -> Response:
        if _has(request.headers.getlist("if-none-match"), tag):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return serve


def _has(fields: Sequence[str], tag: str) -> bool:
    """Return whether `If-None-Match` names a tag, weak or strong, or any (RFC 9110, 13.1.2)."""
    tags = [entry.strip().removeprefix("W/") for field in fields for entry in field.split(",")]
    return tag in tags or tags == ["*"]


PAGE = Path(__file__).with_name("ui") / "docs.html"
REFERENCE = "#/components/schemas/"
# The page has no script and loads nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
ERRORS = {
    "400": "The request is wrong; `param` names what of it.",
    "401": "No valid API key.",
    "429": "Too much of your own work is waiting; see `Retry-After`.",
    "503": "The engine is not ready or there is too much work; see `Retry-After`.",
}


def document_routes(table: Sequence[Route], root_path: str = "") -> list[Route]:
    """Return the two routes that describe the table and themselves.

    Args:
        root_path: prefix under which clients reach all paths, unless an outer app sets another.
    """

    @lru_cache(maxsize=8)  # at the first request: each start would wait for it
    def described(prefix: str) -> tuple[bytes, bytes]:
        api = document([*table, *routes], prefix)
        return json.dumps(api).encode(), render(api).encode()

    async def schema(request: Request) -> Response:
        content, _ = await to_thread(described, request.scope.get("root_path") or root_path)
        return Response(content, media_type="application/json", headers=HEADERS)

    async def page(request: Request) -> Response:
        _, content = await to_thread(described, request.scope.get("root_path") or root_path)
        return Response(content, media_type="text/html", headers=HEADERS)

    routes = [
        Route("/openapi.json", schema, "GET", open=True, note="This API for programs."),
        Route("/docs", page, "GET", open=True, note="This API for people."),
    ]
    return routes


def document(table: Iterable[Route], root_path: str = "") -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of the routes that have a note."""
    rows = [route for route in table if route.note]
    types = {kind for row in rows for kind in (row.body, row.answer) if kind is not None}
    kinds = [Error, MessagesError, *sorted(types, key=lambda kind: kind.__name__)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE + "{name}")
    of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", row.path)
        paths.setdefault(path, {})[row.method.lower()] = _operation(row, of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvik", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(row: Route, of: Mapping[Any, Any]) -> dict[str, Any]:
    content = {} if row.answer is None else {"content": _json_of(of[row.answer])}
    error = of[MessagesError if in_messages(row.path) else Error]
    responses: dict[str, Any] = {"200": {"description": "Done.", **content}}
    for status, note in ERRORS.items():
        if not (row.open or (row.body is None and status == "400")):
            responses[status] = {"description": note, "content": _json_of(error)}
    operation: dict[str, Any] = {"summary": row.note, "responses": responses}
    if not row.open:
        operation["security"] = [{"key": []}, {}]  # no key if the operator set none
    if row.body is not None:
        operation["requestBody"] = {"required": True, "content": _json_of(of[row.body])}
    names = re.findall(r"{(\w+)", row.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _json_of(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def render(described: Mapping[str, Any]) -> str:
    """Return the document as a page."""
    operations = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            operations.append(_section(method.upper(), path, operation))
    types = [_type(name, schema) for name, schema in described["components"]["schemas"].items()]
    page = PAGE.read_text("utf-8")
    page = page.replace("<!-- operations -->", "\n".join(operations))
    return page.replace("<!-- types -->", "\n".join(types))


def _section(method: str, path: str, operation: Mapping[str, Any]) -> str:
    lines = [f"<h3><code>{method} {escape(path)}</code></h3><p>{_prose(operation['summary'])}"]
    body = operation.get("requestBody")
    if body is not None:
        lines.append(f" Takes {_words(body['content']['application/json']['schema'])}.")
    content = operation["responses"]["200"].get("content")
    if content is not None:
        lines.append(f" Gives {_words(content['application/json']['schema'])}.")
    if "security" not in operation:
        lines.append(" Needs no key.")
    return "".join([*lines, "</p>"])


def _type(name: str, schema: Mapping[str, Any]) -> str:
    rows = []
    for field, kind in schema.get("properties", {}).items():
        needed = "required" if field in schema.get("required", ()) else ""
        note = _prose(_note(kind))
        rows.append(
            f'<tr><th scope="row"><code>{escape(field)}</code></th><td>{_words(kind)}</td>'
            f"<td>{needed}</td><td>{note}</td></tr>"
        )
    table = (
        "<table><thead><tr><th scope='col'>field</th><th scope='col'>is</th><th scope='col'></th>"
        f"<th scope='col'></th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
    note = f"<p>{_prose(schema.get('description', ''))}</p>"
    return f'<h3 id="{escape(name)}">{escape(name)}</h3>{note}{table if rows else ""}'


def _note(kind: Mapping[str, Any]) -> str:
    choices = [kind, *kind.get("anyOf", ())]
    return " ".join(dict.fromkeys(c["description"] for c in choices if "description" in c))


def _prose(text: str) -> str:
    """Write a text as HTML, with backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _words(kind: Mapping[str, Any]) -> str:
    """Return a schema in words, as HTML."""
    if "$ref" in kind:
        name = escape(kind["$ref"].removeprefix(REFERENCE))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in kind:
        return " or ".join(_words(choice) for choice in kind["anyOf"])
    if "enum" in kind:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in kind["enum"])
    if kind.get("type") == "array":
        items = kind.get("items")
        words = f"list of {_words(items)}" if isinstance(items, Mapping) else "list"
    else:
        words = escape(str(kind.get("type", "anything")))
    return f"{words}{_bounds(kind)}"


def _bounds(kind: Mapping[str, Any]) -> str:
    signs = {
        "minimum": "at least",
        "exclusiveMinimum": "more than",
        "maximum": "at most",
        "exclusiveMaximum": "less than",
        "minLength": "length at least",
        "maxLength": "length at most",
        "minItems": "entries at least",
        "maxItems": "entries at most",
        "pattern": "like",
    }
    bounds = [f"{words} {kind[key]}" for key, words in signs.items() if key in kind]
    return f" ({escape(', '.join(bounds))})" if bounds else ""

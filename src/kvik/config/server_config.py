"""Options of the server (`ServerConfig`)."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.errors import ConfigError
from kvik.options import (
    TAKES_SEVERAL,
    Flag,
    Integer,
    Kind,
    Number,
    OneOf,
    Text,
    TextList,
    bad_value,
    normalised,
    option,
)

PORT = Integer(0, 65_535)
MAX_SECONDS = 86_400
HOST_NAME = Text(
    "a name without a port, such as gpu.example.org", r"\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+"
)
ROOT_PATH = Text("like /llm, without a slash at its end", r"(/[A-Za-z0-9._~-]+)*", "PATH")
FILE = Text("a file", r"[^\0]+", "FILE")
ORIGIN = Text("such as https://example.org", r"(\*|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+)/*")


class ModelName(Kind):
    """A name of a model in requests."""

    def checked(self, value: object) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= 512 or not value.isprintable():
            raise bad_value("printable, and 1 to 512 characters", value)
        return value


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Server options of the operator, in addition to `EngineConfig`."""

    host: str = option("127.0.0.1", Text(), "address to listen on; 0.0.0.0: all")
    allowed_host: tuple[str, ...] = option(
        (),
        TextList(HOST_NAME),
        "name under which the server may be reached, such as gpu.example.org; *: any. Without keys "
        "only IP addresses, localhost and the machine's name are accepted in addition",
    )
    port: int = option(8000, PORT, "port to listen on; 0: a free one")
    uds: str | None = option(
        None,
        Text("a path", r"[^\0]+", "PATH"),
        "path of a Unix socket to listen on in place of host and port; any Host is accepted there",
    )
    ssl_certfile: str | None = option(
        None, FILE, "file with the certificate, then its chain (PEM), to serve HTTPS"
    )
    ssl_keyfile: str | None = option(
        None,
        FILE,
        "file with the private key of the certificate (PEM, without a password); None: it is in "
        "the file of the certificate",
    )
    root_path: str = option(
        "",
        ROOT_PATH,
        "path prefix under which a reverse proxy publishes the server; requests may still have it "
        "or not",
    )
    api_key: tuple[str, ...] = option(
        (),
        TextList(),
        "a key that clients must send; without keys the server is open. A flag is visible to all "
        "users of the machine (ps): prefer KVIK_API_KEY, where commas separate several keys",
    )
    api_key_file: str | None = option(
        None,
        FILE,
        "more keys, one on a line: [NAME:] KEY [admin]; KEY is the key or sha256:<64 hexadecimal "
        "digits> of it. A single key without a name is an administrator's",
    )
    kv_token: str | None = option(
        None,
        Text("a secret of 16 to 512 printable characters", r"[!-~]{16,512}", "SECRET", secret=True),
        "secret by which servers that exchange prompts or requests authenticate each other; the "
        "same on all of them",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        TextList(ModelName()),
        "names under which clients may request the model, one or several; answers have the first",
        {TAKES_SEVERAL: True},
    )
    any_model_name: bool = option(
        False, Flag(), "accept any model name in requests, and repeat it in the answer"
    )
    tool_format: str = option(
        "auto",
        Text("a name of letters, digits and points", r"[a-z0-9.-]+", "NAME"),
        "format in which the model writes tool calls (docs/tool-calls.md lists them); auto: "
        "found from its chat template; none: tools are refused",
    )
    admin_port: int | None = option(
        None, PORT, "port of the admin routes, on the loopback address; None: no such routes"
    )
    shutdown_timeout: float = option(
        30.0,
        Number(0, MAX_SECONDS),
        "seconds that running requests have to finish after the server is told to stop",
    )
    request_timeout: float = option(
        600.0, Number(0, MAX_SECONDS, above=True), "seconds that a request may take in total"
    )
    sleep_after: float | None = option(
        None,
        Number(0, MAX_SECONDS, above=True),
        "seconds without requests after which the engine frees its memory; the next request starts "
        "it again, and waits; none: it stays loaded",
    )
    cors_origin: tuple[str, ...] = option(
        (),
        TextList(ORIGIN),
        "origin of web pages that may use the server, such as https://example.org; *: any",
    )
    metrics_compat: str = option(
        "none", OneOf(("none", "vllm")), "also expose metrics under the names that vLLM gives them"
    )
    record: str | None = option(
        None, FILE, "file for a recording, which kvik replay runs again; None: no recording"
    )
    pressure_max_tokens: int | None = option(
        None,
        Integer(1, 2**31 - 1),
        "most tokens of an answer while the server is under pressure; None: no such limit",
    )
    stored_response_bytes: int = option(
        64 << 20,
        Integer(0, 1 << 40, "a number of bytes"),
        "memory for responses of /v1/responses that requests can continue; the least recently used "
        "are dropped; 0: none is kept",
    )
    share_prefix_cache: bool = option(
        False,
        Flag(),
        "prompts of different keys share cached prefixes; one key can then find out by timing what "
        "another one sent",
    )
    otlp_endpoint: str | None = option(
        None,
        Text("a URL such as http://127.0.0.1:4318/v1/traces", r"https?://[^\s/]\S*", "URL"),
        "URL to which traces of requests are sent (OTLP over HTTP); None: no traces",
    )
    log_level: str = option(
        "info",
        OneOf(("debug", "info", "warning", "error")),
        "least severe messages that are logged",
    )


def check_server_config(config: ServerConfig) -> None:
    """Raise ConfigError if an option is out of range, or contradicts another."""
    normalised(config, ConfigError)
    if config.admin_port and config.admin_port == config.port:
        raise ConfigError("admin_port", "must differ from port")
    if config.sleep_after is not None and config.record is not None:
        raise ConfigError("sleep_after", "cannot be given with record, which records one engine")
    if config.ssl_keyfile is not None and config.ssl_certfile is None:
        raise ConfigError("ssl_keyfile", "needs the certificate of the key: --ssl-certfile FILE")

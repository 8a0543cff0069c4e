"""What the operator of a server asked for (`ServerConfig`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvik.config.errors import ConfigError

METRICS_COMPAT = ("none", "vllm")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_SECONDS = 86_400.0
HOST_NAME = re.compile(r"\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Wishes of the operator, beside those of `EngineConfig`.

    Attributes:
        host: address to listen on; 0.0.0.0 is every one.
        allowed_host: a name under which the server may be reached, as gpu.example.org; * is any.
            Without keys others are refused, but for addresses, localhost and the machine's name.
        port: to listen on; 0 takes a free one.
        api_key: a key that clients must send; without any, everybody may use the server. A flag
            shows it to everybody on the machine (ps); rather set KVIK_API_KEY, where commas
            separate several.
        api_key_file: more keys, one on a line: [NAME:] KEY [admin]; KEY is the key or
            sha256:<64 hexadecimal digits> of it. A single key without a name is an administrator's.
        served_model_name: what clients call the model, one name or several; the first one is what
            answers call it.
        admin_port: of the admin routes, on the loopback address; none: there are no such routes.
        shutdown_timeout: seconds that running requests have to end when the server is stopped.
        request_timeout: seconds that a request may take in all.
        cors_origin: origin of web pages that may use the server, as https://example.org; * is any.
        metrics_compat: also expose metrics under the names that "vllm" gives them; or "none".
        record: file for arrivals and plans, which kvik replay runs again; none: no recording.
        pressure_max_tokens: under pressure an answer has at most so many tokens; none: no such
            limit.
        share_prefix_cache: prompts of different keys share cached prefixes, which lets one key
            find out by timing what another one sent.
        otlp_endpoint: URL that takes traces of requests (OTLP over HTTP); none: no traces.
        log_level: "debug", "info", "warning" or "error".
    """

    host: str = "127.0.0.1"
    allowed_host: tuple[str, ...] = ()
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    served_model_name: tuple[str, ...] = ()
    admin_port: int | None = None
    shutdown_timeout: float = 30.0
    request_timeout: float = 600.0
    cors_origin: tuple[str, ...] = ()
    metrics_compat: str = "none"
    record: str | None = None
    pressure_max_tokens: int | None = None
    share_prefix_cache: bool = False
    otlp_endpoint: str | None = None
    log_level: str = "info"


def check_server_config(config: ServerConfig) -> None:
    """Each wish alone.

    Raises:
        ConfigError: one is out of range.
    """
    for name, port in (("port", config.port), ("admin_port", config.admin_port)):
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(name, f"must be in [0, 65535], not {port}")
    if config.admin_port and config.admin_port == config.port:
        raise ConfigError("admin_port", "must not be the port of everybody else")
    if not 0 <= config.shutdown_timeout <= MAX_SECONDS:
        raise ConfigError("shutdown_timeout", f"must be in [0, {MAX_SECONDS:g}] seconds")
    if not 0 < config.request_timeout <= MAX_SECONDS:
        raise ConfigError("request_timeout", f"must be in (0, {MAX_SECONDS:g}] seconds")
    if config.metrics_compat not in METRICS_COMPAT:
        raise ConfigError("metrics_compat", f"must be one of {', '.join(METRICS_COMPAT)}")
    if config.log_level not in LOG_LEVELS:
        raise ConfigError("log_level", f"must be one of {', '.join(LOG_LEVELS)}")
    if config.pressure_max_tokens is not None and config.pressure_max_tokens < 1:
        raise ConfigError("pressure_max_tokens", "must be at least 1")
    for name in config.served_model_name:
        if not name or len(name) > 512 or not name.isprintable():
            raise ConfigError("served_model_name", "must be printable, and 1 to 512 characters")
    for host in config.allowed_host:
        if not HOST_NAME.fullmatch(host):
            message = f"must be a name without a port, as gpu.example.org, not {host[:60]!r}"
            raise ConfigError("allowed_host", message)
    for origin in config.cors_origin:
        if not ORIGIN.fullmatch(origin.rstrip("/")):
            raise ConfigError("cors_origin", f"must be as https://example.org, not {origin[:60]!r}")

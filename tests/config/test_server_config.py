"""Options of a server."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvik.config.config import EngineConfig
from kvik.config.server_config import ServerConfig, check_server_config
from kvik.errors import ConfigError


def test_no_option_has_the_name_of_one_of_the_engine() -> None:
    """They share a file, the environment and a command line."""
    engine = {field.name for field in fields(EngineConfig)}
    assert not engine & {field.name for field in fields(ServerConfig)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"port": 0},
        {"port": 65535, "admin_port": 1},
        {"port": 0, "admin_port": 0},
        {"shutdown_timeout": 0.0},
        {"cors_origin": ("*", "https://a.example:8443", "app://obsidian.md", "http://[::1]:3000/")},
        {"metrics_compat": "vllm", "log_level": "debug", "pressure_max_tokens": 1},
        {"otlp_endpoint": "https://otel.example:4318/v1/traces"},
    ],
)
def test_valid_options_are_accepted(options: dict[str, Any]) -> None:
    check_server_config(ServerConfig(**options))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("admin_port", 65536),
        ("admin_port", 8000),
        ("shutdown_timeout", -1.0),
        ("shutdown_timeout", float("nan")),
        ("shutdown_timeout", float("inf")),
        ("request_timeout", 0.0),
        ("request_timeout", float("nan")),
        ("metrics_compat", "sglang"),
        ("log_level", "loud"),
        ("pressure_max_tokens", 0),
        ("served_model_name", ("",)),
        ("served_model_name", ("a", "b\nc")),
        ("otlp_endpoint", ""),  # OpenTelemetry would take it for its own default
        ("otlp_endpoint", "127.0.0.1:4318"),
        ("cors_origin", ("good.example",)),
        ("cors_origin", ("https://a.example/path",)),
        ("cors_origin", ("https://a.example https://b.example",)),
    ],
)
def test_invalid_options_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: .*\Z"):
        check_server_config(ServerConfig(**{field: value}))

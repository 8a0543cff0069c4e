"""`kvik serve [MODEL]`: an HTTP server that speaks the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import argparse
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvik.cli.flags import (
    Parser,
    add_engine_flags,
    add_model,
    add_option_flags,
    engine_options,
    server_options,
)
from kvik.cli.terminal import visible
from kvik.collector import freeze
from kvik.config.config import EngineConfig, ResolvedConfig, check_config
from kvik.config.env import read_option_file
from kvik.config.server_config import ServerConfig, check_server_config
from kvik.engine.recorder import can_record
from kvik.engine_process import engine_in_process
from kvik.errors import ConfigError
from kvik.launch import load_tokenizer, resolve_config
from kvik.model_files import model_files
from kvik.planner.machine_metrics import MachineMetrics
from kvik.server.access import Keys, is_loopback, read_keys
from kvik.server.admin import LOOPBACK, make_admin_app
from kvik.server.app import complete_app
from kvik.server.run import Port, Printer, bind, bind_unix, serve, server_tls
from kvik.server.server import model_names
from kvik.server.texts import Texts

log = logging.getLogger(__name__)

# The other options can be set in the environment and in the file.
ENGINE_FLAGS = (
    *("revision", "lora", "adapters", "max_adapters", "max_adapter_rank", "chat_template", "dtype"),
    *("quantization", "device", "max_model_len", "window", "attention_sinks", "max_num_seqs"),
    *("max_num_batched_tokens", "memory_utilization", "kv_cache_memory", "kv_cache_dtype"),
    *("kv_tiers", "role", "enable_prefix_caching", "policy", "threads", "tensor_parallel_size"),
    *("pipeline_parallel_size", "expert_parallel", "distributed_executor_backend", "kv_budget"),
    *("seed", "fallback", "data_parallel_size", "speculative_config", "spec_method", "spec_model"),
    "spec_tokens",
)
NO_FLAGS = (  # likewise
    *("any_model_name", "kv_token", "otlp_endpoint", "pressure_max_tokens", "share_prefix_cache"),
    "stored_response_bytes",
)
STDOUT, STDERR = 1, 2
LAST_LINES_SECONDS = 1.0  # time for the last lines to be read
WILDCARDS = {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "serve",
        "[MODEL]",
        "Serve a model over HTTP, with OpenAI's and Anthropic's API. Flags take precedence over "
        "environment variables, and these over the file. Both may set options without a flag too.",
    )
    add_model(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with options, such as max-model-len = 4096"
    )
    add_option_flags(parser, "server options", ServerConfig, left_out=NO_FLAGS)
    add_engine_flags(parser, ENGINE_FLAGS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    import uvloop

    config, server = read_configs(arguments)
    config = check_config(config)
    keys = read_keys(server.api_key, server.api_key_file)
    tls = server_tls(server.ssl_certfile, server.ssl_keyfile)
    if server.admin_port is not None and not keys.has_admin:
        message = "needs a single API key, or one marked admin in api_key_file"
        raise ConfigError("admin_port", message)
    if config.role != "both" and server.kv_token is None:
        reason = f"must be given for role {config.role}, the same on all servers with a role"
        raise ConfigError("kv_token", f"{reason}: set KVIK_KV_TOKEN")
    if server.record is not None and not can_record(Path(server.record)):
        raise ConfigError("record", f"{server.record!r} must be a file in a folder to write to")
    with ExitStack() as stack:
        out, err = (stack.enter_context(_printer(fd)) for fd in (STDOUT, STDERR))
        level, line = server.log_level.upper(), "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=level, format=line, stream=err)
        # A port in use is reported before a model is loaded.
        listening = bind(server.host, server.port) if server.uds is None else bind_unix(server.uds)
        sockets = [stack.enter_context(listening)]
        if server.admin_port is not None:
            sockets.append(stack.enter_context(bind(LOOPBACK, server.admin_port, "admin_port")))
        if not keys.needed and server.uds is None and not is_loopback(server.host):
            text = "without an API key anyone who can reach %s may use the server (--api-key-file)"
            log.warning(text, _url(server, sockets[0]))
        resolved = resolve_config(config, moves=server.kv_token is not None)
        for d in resolved.decisions:  # a path may contain control characters
            out.tell(visible(f"{d.name:24}{d.value:11} {d.reason}"))
        return uvloop.run(_serve(config, server, keys, resolved, sockets, tls, out, err))


@contextmanager
def _printer(fd: int) -> Iterator[Printer]:
    printer = Printer(fd)
    try:
        yield printer
    finally:
        printer.close(LAST_LINES_SECONDS)


def read_configs(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """Return the options from flags, the environment and the file, in order of precedence.

    Raises:
        ConfigError: an option that does not exist, or an invalid value.
    """
    file: dict[type, dict[str, Any]] = {EngineConfig: {}, ServerConfig: {}}
    if arguments.config is not None:
        file = read_option_file(arguments.config)
    config = EngineConfig(**{**file[EngineConfig], **engine_options(arguments, arguments.model)})
    server = ServerConfig(**{**file[ServerConfig], **server_options(arguments)})
    check_server_config(server)
    uses: list[list[str]] = vars(arguments).get("served_model_name", [[]])
    if not config.model and len(uses[-1]) > 1 and _is_model(uses[-1][-1]):
        model = uses[-1][-1][:60]
        message = f"takes all names that follow it; if {model!r} is the model, put it before"
        raise ConfigError("served_model_name", message)
    return config, server


def _is_model(name: str) -> bool:
    """Return whether a name looks like a folder, a file or a hub id."""
    return "/" in name or Path(name).exists()


async def _serve(
    config: EngineConfig,
    server: ServerConfig,
    keys: Keys,
    resolved: ResolvedConfig,
    sockets: list[socket.socket],
    tls: ssl.SSLContext | None,
    out: Printer,
    err: Printer,
) -> int:
    path = Path(resolved.runner.model_path)
    names = model_names(server, config.model, path)
    parts, app = complete_app(
        server,
        engine_in_process(
            resolved,
            err.write,
            None if server.record is None else Path(server.record),
            (server.kv_token or "").encode(),
        ),
        Texts(
            load_tokenizer(resolved),
            resolved.scheduler.max_model_len,
            server.tool_format,
            resolved.model,
        ),
        model_files(path).default_params(),
        keys,
        names,
        MachineMetrics(resolved),
    )
    ports = [Port(app, sockets[0], tls)]
    if len(sockets) > 1:
        ports.append(Port(make_admin_app(parts), sockets[1]))
        out.tell(f"admin routes on http://{LOOPBACK}:{sockets[1].getsockname()[1]}")
    url = _url(replace(server, host=WILDCARDS.get(server.host, server.host)), sockets[0])
    out.tell(f"{names[0]} on {url}/v1, playground on {url}/, loading ...")
    freeze()
    return await serve(parts, ports, out.tell)


def _url(server: ServerConfig, listening: socket.socket) -> str:
    scheme = "http" if server.ssl_certfile is None else "https"
    if server.uds is not None:
        return f"{scheme}+unix://{quote(server.uds, safe='')}"
    name = f"[{server.host}]" if ":" in server.host else server.host
    return f"{scheme}://{name}:{listening.getsockname()[1]}"

"""The composition root: from a config to a running engine. The only place that joins the trunks."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from kvik.config.check import check_config
from kvik.config.config import CacheConfig, EngineConfig, ResolvedConfig, SchedulerConfig
from kvik.config.gpus import find_gpus
from kvik.config.hardware import detect
from kvik.config.kernels import ASKED
from kvik.config.model_source import find_model
from kvik.config.model_spec import read_model_spec
from kvik.config.resolve import resolve
from kvik.core.sampling_params import SamplingParams
from kvik.engine.client import EngineClient, InprocClient
from kvik.engine.core import EngineCore
from kvik.engine.defaults import read_default_params
from kvik.engine.executor import Executor
from kvik.engine.loop import EngineLoop
from kvik.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and what a frontend needs to know of its model."""

    resolved: ResolvedConfig
    client: EngineClient
    tokenizer: Tokenizer | None  # None: the folder has none; prompts are token ids
    default_params: SamplingParams
    executor: Executor


def launch(config: EngineConfig) -> Engine:
    """Decide, plan the memory, load, and hand over a client.

    Raises:
        KvikError: the model or an option cannot be used; nothing was loaded.
    """
    return start(resolve_config(config))


def start(resolved: ResolvedConfig) -> Engine:
    """Load what was decided on."""
    _tell_what_is_slow(resolved)
    folder = Path(resolved.runner.model_path)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    default_params = read_default_params(folder)

    from kvik.executors.inproc import InprocExecutor
    from kvik.worker.worker import Worker

    executor = InprocExecutor(lambda: Worker(resolved))
    executor.start()
    client = _client(resolved, executor)
    return Engine(resolved, client, tokenizer, default_params, executor)


def reschedule(engine: Engine, scheduler: SchedulerConfig, cache: CacheConfig) -> Engine:
    """The loaded model under another policy, with an empty prefix cache; nothing is loaded again.

    The sizes must be those it was loaded with. `engine` must have no requests, and is not used
    any more.
    """
    resolved = replace(engine.resolved, scheduler=scheduler, cache=cache)
    return replace(engine, resolved=resolved, client=_client(resolved, engine.executor))


def _client(resolved: ResolvedConfig, executor: Executor) -> EngineClient:
    loop = EngineLoop(EngineCore(resolved), executor, time.monotonic)
    return InprocClient(loop, time.sleep)


def _tell_what_is_slow(resolved: ResolvedConfig) -> None:
    """An engine that could be several times faster says so at start, and why it is not."""
    for decision in resolved.decisions:
        slow = decision.name == "kernels" and decision.value == "torch"
        if slow and resolved.runner.device == "cpu" and decision.reason != ASKED:
            log.warning("running on torch's kernels, which are slower: %s", decision.reason)


def resolve_config(config: EngineConfig) -> ResolvedConfig:
    """Every decision with its reason, before anything is loaded."""
    check_config(config)  # before a model is downloaded in vain
    folder = find_model(config.model)
    spec = read_model_spec(folder)
    gpus = () if config.device == "cpu" else find_gpus()
    return resolve(config, spec, detect(gpus), str(folder))

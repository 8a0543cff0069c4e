"""The composition root: from a config to a running engine. The only place that joins the trunks."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from kvik.config.check import check_config
from kvik.config.config import EngineConfig, ResolvedConfig
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


def launch(config: EngineConfig) -> Engine:
    """Decide, plan the memory, load, and hand over a client.

    Raises:
        KvikError: the model or an option cannot be used; nothing was loaded.
    """
    resolved = resolve_config(config)
    _tell_what_is_slow(resolved)
    folder = Path(resolved.runner.model_path)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    default_params = read_default_params(folder)

    from kvik.executors.inproc import InprocExecutor
    from kvik.worker.worker import Worker

    executor = InprocExecutor(lambda: Worker(resolved))
    executor.start()
    loop = EngineLoop(EngineCore(resolved), executor, time.monotonic)
    return Engine(resolved, InprocClient(loop, time.sleep), tokenizer, default_params)


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

"""The parts of a server, put together around an engine client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import SamplingParams
from kvik.engine.async_client import AsyncEngineClient
from kvik.server.admission import Admission
from kvik.server.generation import Generations
from kvik.server.intake import Limits
from kvik.server.keys import Keys
from kvik.server.observer import Observer, Observers
from kvik.server.parts import Parts
from kvik.server.pressure import Degradation
from kvik.server.texts import Texts


def assemble(
    config: ServerConfig,
    engine: AsyncEngineClient,
    texts: Texts,
    default_params: SamplingParams,
    keys: Keys,
    model_names: Sequence[str],
    observers: Sequence[Observer] = (),
) -> Parts:
    """The engine is not started: that is `engine.start(parts.generations.take)`."""
    scheduler = engine.config.scheduler
    admission = Admission(
        scheduler.max_queued_requests,
        scheduler.max_queued_tokens,
        shared=keys.needed,
        clock=time.monotonic,
    )
    observer = Observers(observers)
    limits = Limits(
        config.request_timeout,
        config.share_prefix_cache,
        Degradation(config.pressure_max_tokens),
    )
    return Parts(
        config=config,
        model_names=tuple(model_names),
        engine=engine,
        texts=texts,
        generations=Generations(engine, texts, admission, observer, limits),
        admission=admission,
        observer=observer,
        default_params=default_params,
        keys=keys,
        started=int(time.time()),
    )


def model_names(config: ServerConfig, model: str, path: Path) -> tuple[str, ...]:
    """What clients call the model: what the operator says, else its hub id, or the name of its
    folder or file.

    Args:
        model: as it was asked for; "" is the bundled one.
        path: where it lies.
    """
    if config.served_model_name:
        return tuple(dict.fromkeys(config.served_model_name))
    if model and not Path(model).expanduser().exists():
        return (model,)
    return (path.stem if path.is_file() else path.name,)

"""Making the weights of an engine folder: a model is loaded as ever, and written as it then lies in
memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from kvik.config.config import ResolvedConfig
from kvik.models.registry import load_model
from kvik.nn.engine_folder import Written, stored_bytes, write_weights
from kvik.nn.opening import open_weights
from kvik.nn.storage import FreshStorage
from kvik.worker.current_device import on_device
from kvik.worker.loading import make_builder
from kvik.worker.platforms import platform


@dataclass(frozen=True, slots=True)
class BuiltWeights:
    """
    Attributes:
        packing: how matrices lie in memory.
    """

    packing: str
    written: Written


def build_weights(
    config: ResolvedConfig, file: BinaryIO, progress: Callable[[int, int], None]
) -> BuiltWeights:
    """Load a model and write its weights.

    Args:
        progress: is told how many bytes of how many are written.

    Raises:
        ModelError: the weights do not fit the model.
        OSError: they cannot be written.
    """
    if config.runner.device == "cpu":
        torch.set_num_threads(config.runner.threads)
    with on_device(torch.device(config.runner.device)):
        return _build_weights(config, file, progress)


def _build_weights(
    config: ResolvedConfig, file: BinaryIO, progress: Callable[[int, int], None]
) -> BuiltWeights:
    runner = config.runner
    parts = platform(config).parts
    storage = FreshStorage(parts.ops)
    checkpoint, groups = open_weights(Path(runner.model_path)), config.cache.groups
    builder = make_builder(
        config, parts, config.model, groups, runner.quantization, checkpoint, storage
    )
    with torch.inference_mode():
        load_model(config.model, builder)
        total, done = stored_bytes(storage, parts.packing), 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            progress(min(done, total), total)

        written = write_weights(file, storage, parts.packing, advance)
    return BuiltWeights(parts.packing.name, written)

"""kvik: an LLM inference engine. Start with `from kvik import LLM, SamplingParams`.

Names are resolved on first use, so that `import kvik` is cheap and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvik.version import __version__

if TYPE_CHECKING:
    from kvik.async_llm import AsyncLLM
    from kvik.config.config import EngineConfig
    from kvik.core.sampling_params import SamplingParams
    from kvik.core.structured import Choice, Grammar, JsonSchema, Regex
    from kvik.engine.output import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        RequestOutput,
        ScoreOutput,
        TextDelta,
    )
    from kvik.errors import CapacityError, ConfigError, KvikError, ModelError, ParamError
    from kvik.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "Choice",
    "ClassificationOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EngineConfig",
    "Grammar",
    "JsonSchema",
    "KvikError",
    "ModelError",
    "ParamError",
    "Regex",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "TextDelta",
    "__version__",
]

_NAMES: Final = {
    "kvik.async_llm": ("AsyncLLM",),
    "kvik.config.config": ("EngineConfig",),
    "kvik.core.sampling_params": ("SamplingParams",),
    "kvik.core.structured": ("Choice", "Grammar", "JsonSchema", "Regex"),
    "kvik.engine.output": (
        "ClassificationOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "RequestOutput",
        "ScoreOutput",
        "TextDelta",
    ),
    "kvik.errors": ("CapacityError", "ConfigError", "KvikError", "ModelError", "ParamError"),
    "kvik.llm": ("LLM",),
}
_HOME: Final = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # with it, type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'kvik' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

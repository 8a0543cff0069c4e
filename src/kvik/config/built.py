"""An engine folder beside the wishes of a user: what was built in is not decided again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvik.config.config import EngineConfig
from kvik.config.engine_manifest import Built
from kvik.config.hardware import Hardware
from kvik.config.quantization import SCHEMES
from kvik.errors import ConfigError

BUILT_IN = "as the engine folder was built"
# What a field is when its user left the choice to kvik.
LEFT_OPEN: Mapping[str, str] = {
    "dtype": "auto",
    "kernels": "auto",
    "quantization": "none",
    "device": "auto",
}
REBUILD = "build another one from the model itself: kvik build MODEL -o ENGINE"


def built_in(built: Built) -> dict[str, str]:
    """Fields of `EngineConfig` that are settled, and their values."""
    found = {"dtype": built.dtype, "kernels": built.kernels, "quantization": built.quantization}
    return found | {"device": "cpu"} if built.kernels == "native" else found


def settled(config: EngineConfig, built: Built, hardware: Hardware) -> EngineConfig:
    """The wishes with what is built in.

    Raises:
        ConfigError: something else was asked for, or cannot run here.
    """
    values = built_in(built)
    for name, value in values.items():
        asked = getattr(config, name)
        if asked not in (value, LEFT_OPEN[name]):
            raise ConfigError(
                name,
                f"is {value} in this engine folder, not {asked}: leave it out, or {REBUILD} "
                f"--{name} {asked}",
            )
    if built.quantization not in SCHEMES:
        raise ConfigError(
            "quantization",
            f"{built.quantization!r} of this engine folder is unknown to this kvik: {REBUILD}",
        )
    if built.kernels == "native" and not hardware.native:
        raise ConfigError(
            "kernels",
            "this engine folder is for the native kernels, which kvik was installed without: "
            f"{REBUILD}",
        )
    if built.kernels == "triton" and not hardware.triton:
        raise ConfigError(
            "kernels",
            "this engine folder is for Triton's kernels, and Triton is not installed: "
            f"pip install 'kvik[gpu]', or {REBUILD}",
        )
    return replace(
        config,
        dtype=built.dtype,
        kernels=built.kernels,
        quantization=built.quantization,
        device=values.get("device", config.device),
    )


def check_draft(built: Built, dtype: str, kernels: str, quantization: str) -> None:
    """Whether a draft model in an engine folder can run beside a model.

    Args:
        dtype, kernels: of the model.
        quantization: asked for of the draft model.

    Raises:
        ConfigError: it cannot.
    """
    asked = {"dtype": dtype, "kernels": kernels}
    if quantization != LEFT_OPEN["quantization"]:
        asked["quantization"] = quantization
    values = built_in(built)
    for name, value in asked.items():
        if values[name] != value:
            raise ConfigError(
                "spec_model",
                f"{name} is {values[name]} in its engine folder and must be {value}: {REBUILD} "
                f"--{name} {value}",
            )

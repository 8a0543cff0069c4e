"""Plans of engines on made-up machines."""

from __future__ import annotations

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import NATIVE_ISAS, Hardware
from kvik.config.resolve import resolve
from kvik.config.speculative import NO_SOURCE, DraftSource
from kvik.models.model_spec import ModelSpec
from kvik.planner.families import public_configs

LARGE = Hardware("large", 64, 1 << 40, "RAM", frozenset(NATIVE_ISAS["avx2"]), native=True)


def public_spec(name: str) -> ModelSpec:
    return ModelSpec.from_config(public_configs()[name])


def planned(
    model: ModelSpec | str,
    hardware: Hardware = LARGE,
    source: DraftSource = NO_SOURCE,
    **options: object,
) -> ResolvedConfig:
    """Return the plan of an engine for a model, or for a public one by its name."""
    spec = public_spec(model) if isinstance(model, str) else model
    return resolve(EngineConfig(**options), spec, hardware, "", source)


def decision(resolved: ResolvedConfig, name: str) -> tuple[str, str]:
    """Return a decision's value and reason."""
    (found,) = [d for d in resolved.decisions if d.name == name]
    return found.value, found.reason

"""Extensions of the command line by other packages: `kvik_bench` adds all measurements.

They are registered as entry points, so that no file of kvik imports a package built on it. A
look-up reads the metadata of all installed packages, so it is done only when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvik.errors import ConfigError

if TYPE_CHECKING:
    from kvik.config.config import ResolvedConfig

VERBS = "kvik.verbs"  # entry points to mappings from a verb to (its module, what it does)
METERS = "kvik.meters"  # entry points to measurements
DECODING = "decoding"


class SpeedChange(Protocol):
    """Tokens/s of a single request before and after a change of the model."""

    def as_json(self) -> dict[str, object]: ...

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield (name, text) of each line of a report."""
        ...


# Measures decoding of two models alternately: (before, after) a change.
DecodingMeter: TypeAlias = "Callable[[ResolvedConfig, ResolvedConfig], SpeedChange]"


def added_verbs() -> dict[str, tuple[str, str]]:
    """Return the verbs of all installed packages: verb -> (its module, what it does)."""
    from importlib.metadata import entry_points

    all_verbs: dict[str, tuple[str, str]] = {}
    for entry in entry_points(group=VERBS):
        verbs: Mapping[str, tuple[str, str]] = entry.load()
        all_verbs |= verbs
    return all_verbs


def decoding_meter() -> DecodingMeter:
    """Return the measurement of decoding; raise ConfigError if no installed package has one."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=METERS, name=DECODING):
        meter: DecodingMeter = entry.load()
        return meter
    raise ConfigError("speed", "needs the package kvik_bench, which is not installed")

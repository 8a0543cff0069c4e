"""Compiles the kernels that will be timed, several at once while nothing is timed. Triton caches
compiled kernels on disk, so timing spends no time on it. A kernel that fails here fails again when
it is timed, and is reported there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import kernels_attention
import kernels_linear
import kernels_small
import models
from clock import Call, Timing
from notes import Notes
from place import sized
from shapes import ONE_LAYER

CACHE = sized(2 << 30, 4 << 20)  # bytes: many processes share the device
LEFT = 35.0  # seconds reserved for the requests after that


def once(calls: Sequence[Call], budget: float = 0.0) -> Timing:
    """Replace `clock.timed`: run all calls once, as a layer's products have several shapes."""
    for call in calls:
        call()
    return Timing(1.0, False)


def attention(notes: Notes) -> None:
    kernels_attention.measure(notes.silenced(), once)


def small(notes: Notes) -> None:
    kernels_small.measure(notes.silenced(), once)


def products(notes: Notes, format: str) -> None:
    kernels_linear.measure(notes.silenced(), once, (format,))


def engine(notes: Notes, shape: str, format: str) -> None:
    quiet = notes.silenced()
    quiet.attempt("all", partial(_engine, quiet, shape + ONE_LAYER, format))


def _engine(notes: Notes, shape: str, format: str) -> None:
    """Warm up an engine of one layer, as kernels do not depend on the number of layers."""
    loaded = models.loaded(shape, format, models.LONGEST, models.SEQS, kv_cache_memory=CACHE)
    while loaded.loop.idle_step() and notes.left() > LEFT:
        pass  # everything that an idle engine prepares
    for name, call, needs in models.Measured(notes, loaded, shape, format).parts():
        if not name.startswith("busy"):  # profilers in several processes at once may conflict
            notes.attempt(name, call, needs)

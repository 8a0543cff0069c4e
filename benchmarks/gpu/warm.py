"""Compiles what kernels and engines are timed with, several kernels at a time while nothing is
timed. Triton keeps what it compiled on disk, so that timing spends no time on it. What fails here
fails again where it is timed, and is told of there."""

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
LEFT = 40.0  # seconds for what requests need beside that


def once(calls: Sequence[Call], budget: float = 0.0) -> Timing:
    """In place of `clock.timed`. All calls, as those of a layer are products of several shapes."""
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
    """Of a model of one layer, as kernels do not depend on their number."""
    loaded = models.loaded(shape, format, models.LONGEST, models.SEQS, kv_cache_memory=CACHE)
    while loaded.loop.rest() and notes.left() > LEFT:
        pass  # all that an idle engine gets ready
    for name, call, needs in models.Measured(notes, loaded, shape, format).parts():
        if not name.startswith("busy"):  # a profiler for each of several processes may be too many
            notes.attempt(name, call, needs)

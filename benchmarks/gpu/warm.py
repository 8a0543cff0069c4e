"""Compiles what the kernels section times, several kernels at a time while nothing is timed. Triton
keeps what it compiled on disk, so that the section itself spends no time on it. What fails here
fails again where it is timed, and is told of there."""

from __future__ import annotations

from collections.abc import Sequence

import kernels_attention
import kernels_linear
import kernels_small
from clock import Call, Timing
from notes import Notes


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

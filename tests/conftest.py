"""Shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

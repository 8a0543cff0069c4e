"""The native kernels for test files that partly run without them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NATIVE = find_spec("kvik.kernels.cpu._native") is not None
needs_native = pytest.mark.skipif(not NATIVE, reason="kvik was installed without native kernels")


def instruction_sets() -> list[str]:
    """Return those that the kernels support and this machine runs, best first; empty without
    them."""
    if not NATIVE:
        return []
    from kvik.kernels.cpu import _native

    return _native.instruction_sets()

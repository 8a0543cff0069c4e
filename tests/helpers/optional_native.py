"""The native kernels for test files that run, in part, without them too."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NATIVE = find_spec("kvik.kernels.cpu._native") is not None
needs_native = pytest.mark.skipif(not NATIVE, reason="kvik was installed without native kernels")


def instruction_sets() -> list[str]:
    """Those that the native kernels have and this machine runs, best first; none without them."""
    if not NATIVE:
        return []
    from kvik.kernels.cpu import _native

    return _native.instruction_sets()

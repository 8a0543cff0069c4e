"""Python's collector of reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the collector off until the block ends: modules and models are long-lived, and scanning
    them repeatedly takes a tenth of a start."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze() -> None:
    """Collect garbage, then exempt all other objects from later collections, of which each would
    stall an engine for 60 to 100 ms. For processes of kvik: whatever is in use by now stays so."""
    gc.collect()
    gc.freeze()

"""The checksum of pages, which is zlib's whatever computes it."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from helpers.optional_native import needs_native


@needs_native
@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 79, 80, 127, 128, 129, 4097, 65_537])
def test_the_native_checksum_is_that_of_zlib(size: int) -> None:
    from kvik.kernels.cpu._native import crc32

    data = np.random.default_rng(size).integers(0, 256, size + 3, np.uint8)
    for start in (0, 1, 0xFFFFFFFF):
        for first in (0, 3):  # at any address
            part = data[first : first + size]
            assert crc32(part, start) == zlib.crc32(part.tobytes(), start)

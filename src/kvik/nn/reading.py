"""Parts of a file, the next one being read while one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvik.config.errors import ModelError
from kvik.config.files import regular


def read_ahead(path: Path, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Each span (first byte, bytes) as [bytes] uint8, valid until the next one is asked for.

    The file is read and not mapped: pages that have to be mapped cost more time than the copy, and
    a file that gets shorter ends in an error and not in a signal.

    Raises:
        ModelError: the file cannot be read or has become shorter.
    """
    largest = max((size for _, size in spans), default=0)
    buffers = cycle([np.empty(largest, np.uint8), np.empty(largest, np.uint8)])
    try:
        with (
            open(path, "rb", buffering=0, opener=regular) as file,
            ThreadPoolExecutor(1) as reader,
        ):
            reads = deque[Future[np.ndarray]]()
            for start, size in spans:
                reads.append(reader.submit(_read, file, start, size, next(buffers)))
                if len(reads) == 2:
                    yield torch.from_numpy(reads.popleft().result())
            for last in reads:
                yield torch.from_numpy(last.result())
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from None
    except EOFError:
        raise ModelError(path.name, "has become shorter than its header says") from None


def _read(file: FileIO, start: int, size: int, buffer: np.ndarray) -> np.ndarray:
    file.seek(start)
    left = buffer[:size].data
    while left:
        count = file.readinto(left)
        if not count:
            raise EOFError
        left = left[count:]
    return buffer[:size]

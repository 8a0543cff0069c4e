"""Parts of loading that run while torch is imported, which takes most of a second on one core.

Does not import torch.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvik.config.config import ResolvedConfig
from kvik.files import gguf_parts, is_gguf, regular

if TYPE_CHECKING:
    import numpy as np

PIECE = 16 << 20  # bytes of memory touched between checks whether to stop
PAGE, HUGE = 4096, 2 << 20
MAX_READ = 4 << 30  # bytes of files to read ahead: a disk reads no more in that time
ENDINGS = (".safetensors", ".bin")


class LoadAhead:
    """A thread that makes the system read the weight files ahead, and allocates memory for them.

    The system provides a page of memory when it is first written. That takes about 0.1 ms per MB,
    and several times that in a virtual machine that must request it from its host.
    """

    def __init__(self, config: ResolvedConfig, rank: int = 0) -> None:
        """
        Args:
            rank: of this process in its group; rank 0 reads the files ahead for all.

        Raises:
            MemoryError: the address space is too small.
        """
        self._memory = _weight_memory(config)
        self._stopping = False
        files = [] if rank else _weight_files(Path(config.runner.model_path))
        self._thread = threading.Thread(
            target=self._run, args=(files,), name="kvik-ahead", daemon=True
        )
        self._thread.start()

    def memory(self) -> np.ndarray | None:
        """End the thread and hand over the memory, [bytes] uint8 zeros; None: none was allocated,
        or it was handed over before."""
        self._stopping = True
        self._thread.join()
        memory, self._memory = self._memory, None
        return memory

    def __enter__(self) -> LoadAhead:
        return self

    def __exit__(self, *exception: object) -> None:
        self.memory()

    def _run(self, files: Iterable[Path]) -> None:
        for file in files:
            _ask_for(file)
        memory = self._memory
        if memory is None:
            return
        # The last part is not touched, since the planned size of weights has some reserve.
        for start in range(0, len(memory) // 8 * 7, PIECE):
            if self._stopping:
                return
            # numpy releases Python's lock, and touching page by page lets other threads allocate.
            memory[start : start + PIECE : PAGE] = 0


def _weight_memory(config: ResolvedConfig) -> np.ndarray | None:
    """Return memory of the size of the weights; None: they are mapped, this is a pipeline, or the
    kernels are not native."""
    runner = config.runner
    mapped = config.model.built is not None or runner.engine_cache is not None
    if runner.kernels != "native" or mapped or runner.stages or sys.platform != "linux":
        return None
    import numpy as np

    # The same as in the native kernels, which cannot be imported before torch.
    size = config.memory.weights // runner.ranks
    try:
        pages = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    first = -memory.ctypes.data % HUGE
    return memory[first : first + size]


def _weight_files(path: Path) -> Iterator[Path]:
    """Yield files until they have more bytes than are read ahead."""
    of_folder = (file for file in path.glob("*") if file.suffix in ENDINGS)
    read = 0
    for file in gguf_parts(path) if is_gguf(path) else sorted(of_folder):
        yield file
        with suppress(OSError):
            read += file.stat().st_size
        if read > MAX_READ:
            return


def _ask_for(file: Path) -> None:
    """Make the system read a file ahead; errors are reported when it is loaded."""
    if sys.platform != "linux":
        return
    with suppress(OSError), open(file, "rb", opener=regular) as opened:
        os.posix_fadvise(opened.fileno(), 0, MAX_READ, os.POSIX_FADV_WILLNEED)

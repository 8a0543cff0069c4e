"""Processes that compute a model together by torch.distributed: gloo on CPUs, NCCL on GPUs.

This is not torch's default group: a process can have only one of that, and two engines need one
each. Sums are computed in the order of the ranks, by the same operations for any number of rows. So
all processes have the same bits, and those of a token do not depend on the other tokens of its
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvik.kernels.cpu.barrier import EXCHANGE_SECONDS, BrokenGroup

# With GPUs the first process waits this many times longer in an exchange: torch ends a process that
# has waited too long, and the first process is the caller's.
FIRST_TIMES = 10
JOIN_SECONDS = 60.0  # timeout of connecting, once all processes have started
LOOK_SECONDS = 0.01
SHARED_SUMS = 1 << 16  # numbers from which on each process computes a part of a sum
LOOPBACK = "127.0.0.1"


class TorchGroup:
    """The processes, as seen by one of them. All make the same calls in the same order."""

    def __init__(self, processes: Any, rank: int, size: int) -> None:
        """
        Args:
            processes: a `ProcessGroupGloo` or `ProcessGroupNCCL`.
        """
        self.rank, self.size = rank, size
        # How many matrices were divided, and their total number of weights.
        self.matrices = self.numbers = 0
        self._processes = processes

    @property
    def digest(self) -> str:
        """Digest of the divided matrices: if it differs between processes, their calls do not
        match."""
        return f"{self.matrices} matrices of {self.numbers} numbers, torch {torch.__version__}"

    def gather(self, local: Tensor) -> Tensor:
        """Gather own [...], of the same shape in all processes -> [processes, ...].

        Raises:
            BrokenGroup: a process is gone, or the exchange timed out.
        """
        gathered = local.new_empty(self.size, *local.shape)
        if local.numel():
            parts = gathered.view(-1), local.contiguous().view(-1)
            self._wait(lambda: self._processes._allgather_base(*parts))
        return gathered

    def gather_columns(self, local: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all processes.

        Args:
            local: [rows, columns of this process].
            widths: columns of each process, in their order.

        Returns:
            [rows, sum of widths].
        """
        if min(widths) == max(widths):
            return self.gather(local).movedim(0, 1).flatten(1)
        sent = local.new_zeros(local.shape[0], max(widths))
        sent[:, : local.shape[1]] = local
        parts = zip(self.gather(sent), widths, strict=True)
        return torch.cat([part[:, :width] for part, width in parts], 1)

    def add_up(self, local: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum of own [rows, columns] over all processes and the residual, summed in fp32
        and rounded once.

        Small tensors are gathered and summed whole. For large ones, among more than two processes,
        each process sums some columns, and all gather the sums. Both ways give the same bits.
        """
        if self.size > 2 and local.numel() >= SHARED_SUMS:
            return self.add_up_shared(local, residual, dtype)
        return _sum(self.gather(local), residual, dtype)

    def add_up_shared(self, local: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See `add_up`."""
        width = -(-local.shape[1] // self.size)  # columns per process, the last ones padded
        sent = local.new_zeros(self.size, len(local), width)
        for part, columns in zip(sent, local.split(width, 1), strict=False):
            part[:, : columns.shape[1]] = columns
        first = self.rank * width
        some = None
        if residual is not None:
            some = residual.new_zeros(len(local), width)
            mine = residual[:, first : first + width]
            some[:, : mine.shape[1]] = mine
        made = _sum(self.swap(sent), some, dtype)
        return self.gather(made).movedim(0, 1).flatten(1)[:, : local.shape[1]]

    def swap(self, parts: Tensor) -> Tensor:
        """Exchange parts [processes, ...], one for each process; returns those for this one.

        Raises:
            BrokenGroup: see `gather`.
        """
        received, sent = torch.empty_like(parts), parts.contiguous()
        self._wait(lambda: self._processes.alltoall_base(received, sent, [], []))
        return received

    def spread(self, tensor: Tensor) -> Tensor:
        """Broadcast the first process's tensor, in place; returns it."""
        if tensor.numel():
            self._wait(lambda: self._processes.broadcast([tensor], dist.BroadcastOptions()))
        return tensor

    def begin(self) -> None:
        """Do nothing: there is no state of earlier calls."""

    def share(self, hidden: Tensor) -> Tensor:
        """See `OtherRanks.share`: `spread` sends it to the others."""
        return hidden.contiguous()

    def give_up(self) -> None:
        """Stop waiting for other processes. gloo detects by itself that one is gone; on a GPU a
        kernel waits."""
        if self._processes is not None and self._processes.name() == "nccl":
            self._processes.abort()

    def close(self) -> None:
        """Close the connections; safe to call twice."""
        self.give_up()
        self._processes = None

    def _wait(self, begin: Callable[[], Any]) -> None:
        if self._processes is None:
            raise BrokenGroup
        try:
            begin().wait()
        except RuntimeError as error:
            raise BrokenGroup(str(error)) from error


def _sum(parts: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum parts [processes, rows, columns] in the order of the ranks -> [rows, columns]."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return (total if residual is None else total + residual).to(dtype)


def connect(
    device: torch.device, file: str, rank: int, size: int, lost: Callable[[], object]
) -> TorchGroup:
    """Wait for the other processes, and connect to them. gloo uses only the loopback address.

    Args:
        device: of this process; on GPUs each process has a different one.
        file: path of a file that is empty or does not exist. It may be removed at any time. It must
            not be a path by file descriptor: the store opens it again when it is destroyed, and
            ends the process if the descriptor then refers to something else.
        lost: returns whether one of them is gone.

    Raises:
        BrokenGroup: one of them is gone, or does not connect in time.
    """
    store = _torch().FileStore(file, size)
    store.set_timeout(timedelta(seconds=JOIN_SECONDS))
    store.set(f"rank {rank}", "here")
    names = [f"rank {other}" for other in range(size)]
    while not store.check(names):
        if lost():
            raise BrokenGroup
        time.sleep(LOOK_SECONDS)
    try:
        return TorchGroup(_processes(device, store, rank, size), rank, size)
    except RuntimeError as error:
        raise BrokenGroup(str(error)) from error


def _torch() -> Any:
    """Return torch.distributed as `Any`: its annotations lack the classes used here."""
    return dist


def _processes(device: torch.device, store: object, rank: int, size: int) -> Any:
    limit = EXCHANGE_SECONDS
    if device.type == "cpu":
        gloo = _torch().ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=limit)
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        return gloo(store, rank, size, options)
    nccl = _torch().ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=limit if rank else FIRST_TIMES * limit)
    return nccl(store, rank, size, options)

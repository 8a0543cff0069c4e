"""Processes that compute a model together by torch.distributed: gloo on CPUs, NCCL on GPUs.

Not the default group of torch, of which a process has one: two engines have one each. Sums are made
in the order of the ranks, by the same operations for any number of rows, so that all processes have
the same bits and those of a token do not depend on the others of its step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvik.kernels.cpu.meeting import BrokenGroup

# Until all have come to an exchange. The watch of the group finds a process that is gone long
# before; this ends the wait for one that lives and does not come. The first process of GPUs waits
# longer: there torch ends a process that has waited this long, and the first one is the caller's.
EXCHANGE_SECONDS = 180.0
FIRST_TIMES = 10
JOIN_SECONDS = 60.0  # between the begins of two processes that have both come
LOOK_SECONDS = 0.01
SHARED_SUMS = 1 << 16  # numbers of a sum from which on each process makes a part of it
LOOPBACK = "127.0.0.1"


class TorchGroup:
    """The processes, as one of them sees them. All make the same calls in the same order.

    Attributes:
        matrices, numbers: that were cut, and their weights in all.
    """

    def __init__(self, processes: Any, rank: int, size: int) -> None:
        """
        Args:
            processes: a `ProcessGroupGloo` or `ProcessGroupNCCL`.
        """
        self.rank, self.size = rank, size
        self.matrices = self.numbers = 0
        self._processes = processes

    @property
    def digest(self) -> str:
        """Of what was cut: equal in all processes, or their calls do not fit."""
        return f"{self.matrices} matrices of {self.numbers} numbers, torch {torch.__version__}"

    def gather(self, own: Tensor) -> Tensor:
        """own [...], of the same shape in all processes -> [processes, ...].

        Raises:
            BrokenGroup: a process is gone, or has not come in time.
        """
        found = own.new_empty(self.size, *own.shape)
        if own.numel():
            parts = found.view(-1), own.contiguous().view(-1)
            self._wait(lambda: self._processes._allgather_base(*parts))
        return found

    def gather_columns(self, own: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all processes.

        Args:
            own: [rows, columns of this process].
            widths: columns of each process, in their order.

        Returns:
            [rows, sum of widths].
        """
        if min(widths) == max(widths):
            return self.gather(own).movedim(0, 1).flatten(1)
        sent = own.new_zeros(own.shape[0], max(widths))
        sent[:, : own.shape[1]] = own
        parts = zip(self.gather(sent), widths, strict=True)
        return torch.cat([part[:, :width] for part, width in parts], 1)

    def add_up(self, own: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """own [rows, columns] -> the sum over all processes and the residual, summed in fp32 and
        rounded once.

        In either way each number is the same sum, to the bit: small ones are gathered whole; of
        large ones, among more than two, each process sums some columns, and all gather the sums.
        """
        if self.size > 2 and own.numel() >= SHARED_SUMS:
            return self.add_up_shared(own, residual, dtype)
        return _sum(self.gather(own), residual, dtype)

    def add_up_shared(self, own: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See `add_up`."""
        width = -(-own.shape[1] // self.size)  # of each, the last ones filled up
        sent = own.new_zeros(self.size, len(own), width)
        for part, columns in zip(sent, own.split(width, 1), strict=False):
            part[:, : columns.shape[1]] = columns
        first = self.rank * width
        some = None
        if residual is not None:
            some = residual.new_zeros(len(own), width)
            mine = residual[:, first : first + width]
            some[:, : mine.shape[1]] = mine
        made = _sum(self.swap(sent), some, dtype)
        return self.gather(made).movedim(0, 1).flatten(1)[:, : own.shape[1]]

    def swap(self, parts: Tensor) -> Tensor:
        """parts [processes, ...], one for each process -> those that are for this one.

        Raises:
            BrokenGroup: as `gather`.
        """
        found, sent = torch.empty_like(parts), parts.contiguous()
        self._wait(lambda: self._processes.alltoall_base(found, sent, [], []))
        return found

    def spread(self, tensor: Tensor) -> Tensor:
        """Let all have what the first process has, in place; returns it."""
        if tensor.numel():
            self._wait(lambda: self._processes.broadcast([tensor], dist.BroadcastOptions()))
        return tensor

    def begin(self) -> None:
        """Nothing is kept of earlier calls."""

    def share(self, hidden: Tensor) -> Tensor:
        """See `Others.share`: `spread` brings it to the others."""
        return hidden.contiguous()

    def give_up(self) -> None:
        """Let this process wait no more. Over gloo it sees by itself that another one is gone; on a
        GPU a kernel waits."""
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
    """parts [processes, rows, columns], in the order of the ranks -> [rows, columns]."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return (total if residual is None else total + residual).to(dtype)


def connect(
    device: torch.device, file: str, rank: int, size: int, lost: Callable[[], object]
) -> TorchGroup:
    """Wait for the other processes, and connect with them. Over gloo at the loopback address alone.

    Args:
        device: of this process; on GPUs each has its own.
        file: path of one that is empty or not there yet. It may be removed at any time; a path by
            the number of an open file may not serve: the store opens it again when it is destroyed,
            and ends the process where the number then means something else.
        lost: whether one of them is gone.

    Raises:
        BrokenGroup: one of them is, or does not begin in time.
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
    """torch.distributed, whose annotations leave out what it joins groups with."""
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

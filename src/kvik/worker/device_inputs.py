"""Inputs of a step at fixed places on a device, brought there by one copy.

A captured forward reads the same memory at every replay. Behind what a step has lies padding, as
far as any captured forward reads: tokens that are stored nowhere, and requests without keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvik.config.graph_sizes import GraphSize
from kvik.worker.step_inputs import StepSizes

ALIGNMENT = 256  # bytes; kernels read pairs and quadruples of numbers
# What stands behind the last entry. Of `COUNTING` the next numbers: one token for each request.
PADDING = {"slot_mapping": -1}  # and 0 of all others: there is a token 0 to take logits of
COUNTING = "query_start_loc"


class DeviceInputs:
    fixed = True

    def __init__(
        self,
        sizes: StepSizes,
        num_groups: int,
        max_blocks: int,
        device: torch.device,
        captured: Sequence[GraphSize] = (),
        *,
        trees: bool = False,
    ) -> None:
        """
        Args:
            captured: forwards that read from here; none is larger than `sizes`.
            trees: whether a step may hold trees of drafts.
        """
        self.groups = range(num_groups)
        self.trees = trees
        rows = max((size.rows for size in captured), default=0)
        tokens = max((size.tokens for size in captured), default=0)
        samples = max((size.samples for size in captured), default=0)
        counts = {
            "input_ids": (sizes.tokens, np.int64),
            "positions": (sizes.tokens, np.int64),
            "logits_indices": (sizes.samples, np.int64),
            "query_start_loc": (sizes.seqs + 1, np.int32),
            "seq_lens": (sizes.seqs, np.int32),
        }
        if trees:
            counts["tree"] = (sizes.tokens, np.int64)
        for group in self.groups:
            counts[f"slot_mapping {group}"] = (sizes.tokens, np.int64)
        padded = {"seq_lens": rows, COUNTING: rows + 1, "logits_indices": samples}
        self._padded = {name: padded.get(name, tokens) for name in counts}  # entries
        places: dict[str, slice] = {}
        end = 0
        for name, (count, dtype) in counts.items():
            places[name] = slice(end, end + count * np.dtype(dtype).itemsize)
            end = -(-places[name].stop // ALIGNMENT) * ALIGNMENT
        self._host = _host_memory(end, device)
        self._there = torch.zeros(end, dtype=torch.uint8, device=device)
        self._places = places
        self._arrays = {
            name: self._host.numpy()[where].view(counts[name][1]) for name, where in places.items()
        }
        self._tensors = {
            name: self._there[where].view(torch.from_numpy(self._arrays[name]).dtype)
            for name, where in places.items()
        }
        self._tables = {
            f"block_table {group}": _BlockTable(sizes.seqs, max_blocks, device)
            for group in self.groups
        }
        self._changed: tuple[int, int] | None = None  # bytes of the host's that are to be sent
        # Behind the last copy, which may still read the host's memory if something was sent.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._sent = False

    def put(self, name: str, array: np.ndarray) -> Tensor:
        if self._sent and self._copied is not None:
            self._copied.synchronize()  # the step before the last one has ended, and so has this
            self._sent = False
        if name in self._tables:
            return self._tables[name].put(array)
        whole, count = self._arrays[name], len(array)
        if count > len(whole):
            raise ValueError(f"{name} has room for {len(whole)}, not {count}")
        whole[:count] = array
        end = max(count, self._padded[name])
        if name == COUNTING:
            after = whole[count - 1] + 1 if count else 0
            whole[count:end] = np.arange(after, after + end - count)
        else:
            whole[count:end] = PADDING.get(name.partition(" ")[0], 0)
        first = self._places[name].start
        last = first + end * whole.itemsize
        if self._changed is not None:
            first, last = min(first, self._changed[0]), max(last, self._changed[1])
        self._changed = first, last
        return self._tensors[name][:count]

    def send(self) -> None:
        if self._changed is not None:
            part = slice(*self._changed)
            self._there[part].copy_(self._host[part], non_blocking=True)
            self._changed = None
        for table in self._tables.values():
            table.send()
        if self._copied is not None:
            self._copied.record()
            self._sent = True

    def clear(self) -> None:
        """A step without requests."""
        nothing = np.empty(0, np.int64)
        for name in self._arrays:
            self.put(name, nothing)
        self.send()

    def whole(self, name: str, rows: int) -> Tensor:
        """The first so many entries of an input, whatever the step has of them."""
        if name in self._tables:
            return self._tables[name].whole[:rows]
        return self._tensors[name][:rows]


class _BlockTable:
    """[seqs, max_blocks] int32, of which a step needs a corner."""

    def __init__(self, seqs: int, max_blocks: int, device: torch.device) -> None:
        self._host = _host_memory(seqs * max_blocks * 4, device)
        self._corner = torch.empty(seqs * max_blocks, dtype=torch.int32, device=device)
        self.whole = torch.zeros(seqs, max_blocks, dtype=torch.int32, device=device)
        self._put: tuple[int, int] | None = None  # its size

    def put(self, array: np.ndarray) -> Tensor:
        rows, width = array.shape
        self._host.numpy().view(np.int32)[: rows * width] = array.reshape(-1)
        self._put = rows, width
        return self.whole[:rows, :width]

    def send(self) -> None:
        """The corner lies in one piece on its way, because only such a copy waits for nobody."""
        if self._put is not None:
            rows, width = self._put
            corner = self._corner[: rows * width]
            corner.copy_(self._host.view(torch.int32)[: rows * width], non_blocking=True)
            self.whole[:rows, :width] = corner.view(rows, width)
            self._put = None


def _host_memory(count: int, device: torch.device) -> Tensor:
    """[count] bytes, from which a GPU copies by itself."""
    return torch.zeros(count, dtype=torch.uint8, pin_memory=device.type == "cuda")

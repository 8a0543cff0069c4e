"""Memory of a step's inputs: new tensors, or the same memory in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvik.config.config import ResolvedConfig
from kvik.config.graph_sizes import GraphSize
from kvik.kernels.upload import upload
from kvik.spec.adapters import NO_ADAPTER

# Copies of results from the device to the host while steps run, without waiting.
#
# On a CPU both are the same memory. On a GPU an asynchronous copy needs pinned host memory, and a
# result may be read only once its copy has arrived.


Arrival = Callable[[], list[NDArray[Any]]]  # waits for the arrays and returns them


class Copies(Protocol):
    """Copies results to the host."""

    # Useful number of steps in flight; 1 if results are ready as soon as a step has begun, else
    # results are read after later steps have begun.
    depth: int

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        """Begin to copy tensors, after all work begun before."""
        ...


class AtOnce:
    """Reads results synchronously."""

    depth = 1

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        return lambda: [tensor.cpu().numpy() for tensor in tensors]


class PinnedCopies:
    """Copies results into pinned memory asynchronously, after the kernels that compute them, so
    that the next step may begin before they are read."""

    depth = 2  # one runs, one is queued; more would only plan earlier than necessary

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        copies = []
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> list[NDArray[Any]]:
            arrived.synchronize()
            return [copy.numpy() for copy in copies]

        return wait


CPU = torch.device("cpu")


class EnteredStates:
    """Memory at fixed addresses for what the stage before computes: `hidden` and `onward` of its
    output."""

    def __init__(
        self,
        count: int,
        tokens: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        zeros: Callable[[tuple[int, ...], type], np.ndarray] | None = None,
    ) -> None:
        """
        Args:
            count: number of tensors, of up to [tokens, width] each.
            zeros: where memory of the host comes from; None: torch.
        """
        shape = count, tokens * width * dtype.itemsize
        if zeros is None:
            self._host = _host_memory(shape[0] * shape[1], device).view(shape)
        else:
            self._host = torch.from_numpy(zeros(shape, np.uint8))
        self._memory = self._host if device.type == "cpu" else self._host.to(device)
        self._tensors = [memory.view(dtype).view(tokens, width) for memory in self._memory]
        # Recorded after the copies of a step, which read host memory, perhaps after later calls:
        # the host does not wait for a step that samples nothing.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def put(self, data: bytes) -> None:
        """Put [tokens, width] of each tensor, as bytes. The step before has begun its forward."""
        parts = np.frombuffer(data, np.uint8).reshape(len(self._host), -1)
        size = parts.shape[1]
        if self._copied is not None:
            self._copied.synchronize()
        self._host.numpy()[:, :size] = parts
        if self._memory is not self._host:
            for host, memory in zip(self._host, self._memory, strict=True):
                memory[:size].copy_(host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def first(self, tokens: int) -> list[Tensor]:
        """Return the first tokens of each tensor."""
        return [tensor[:tokens] for tensor in self._tensors]


class StepInputs:
    """Takes the input arrays of steps."""

    # An array is written where the last one of its name and shape was, so tensors returned before
    # show later values.
    fixed: bool
    states: EnteredStates | None = None  # what the stage before computes; None: there is none

    def put(self, name: str, array: np.ndarray) -> Tensor:
        """Return the array as a tensor on the device, valid until the next step.

        Args:
            name: a field of `InputBatch` or `StepLayout`; the latter's are followed by the number
                of the KV group where groups differ.
        """
        raise NotImplementedError

    def send(self) -> None:
        """Send all arrays that were put: kernels launched after this see them. By default `put`
        has sent them."""

    def entered(self, tokens: int) -> Sequence[Tensor]:
        """Return `StepTensors.entered` of a step with some tokens."""
        return () if self.states is None else self.states.first(tokens)


# Inputs of a step at fixed addresses on a device, written by one copy.
#
# A captured forward reads the same memory at every replay. After the inputs of a step comes
# padding, as far as any captured forward reads: tokens that are not stored, and requests without
# keys.

ALIGNMENT = 256  # bytes; kernels read pairs and quadruples of numbers
# Values after the last entry. `COUNTING` is continued by counting: one token for each request.
PADDING = {
    "slot_mapping": -1,
    "state_rows": -1,
    "adapters": NO_ADAPTER,
}  # 0 for all others: token 0 exists, so its logits can be computed
COUNTING = "query_start_loc"
STATE_INPUTS = ("state_rows", "state_pending", "state_drafts")  # an entry for each request


class DeviceInputs(StepInputs):
    fixed = True

    def __init__(
        self,
        sizes: StepSizes,
        num_groups: int,
        max_blocks: int,
        device: torch.device,
        captured: Sequence[GraphSize] = (),
        states: EnteredStates | None = None,
    ) -> None:
        """
        Args:
            captured: forwards that read from here; none is larger than `sizes`.
        """
        self.groups, self.sizes, self.states = range(num_groups), sizes, states
        rows = max((size.rows for size in captured), default=0)
        tokens = max((size.tokens for size in captured), default=0)
        samples = max((size.samples for size in captured), default=0)
        counts = sizes.inputs(num_groups)
        padded = {
            "seq_lens": rows,
            **dict.fromkeys(STATE_INPUTS, rows),
            COUNTING: rows + 1,
            "logits_indices": samples,
        }
        padded |= {f"first_keys {group}": rows for group in self.groups}
        self._padded = {name: padded.get(name, tokens) for name in counts}  # entries
        places: dict[str, slice] = {}
        end = 0
        for name, count in counts.items():
            places[name] = slice(end, end + count * np.dtype(dtype_of(name)).itemsize)
            end = -(-places[name].stop // ALIGNMENT) * ALIGNMENT
        self._host = _host_memory(end, device)
        self._device_memory = torch.zeros(end, dtype=torch.uint8, device=device)
        self._places = places
        self._arrays = {
            name: self._host.numpy()[where].view(dtype_of(name)) for name, where in places.items()
        }
        self._tensors = {
            name: self._device_memory[where].view(torch.from_numpy(self._arrays[name]).dtype)
            for name, where in places.items()
        }
        self._tables = {
            f"block_table {group}": _BlockTable(sizes.seqs, max_blocks, device)
            for group in self.groups
        }
        self._changed: tuple[int, int] | None = None  # range of bytes on the host to send
        # Recorded after the last copy, which may still read host memory if something was sent.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._sent = False

    def put(self, name: str, array: np.ndarray) -> Tensor:
        if self._sent and self._copied is not None:
            self._copied.synchronize()  # usually done: the step before the last one has ended
            self._sent = False
        if name in self._tables:
            return self._tables[name].put(array)
        target, count = self._arrays[name], len(array)
        if count > len(target):
            raise ValueError(f"{name} has room for {len(target)}, not {count}")
        target[:count] = array
        end = max(count, self._padded[name])
        if name == COUNTING:
            after = target[count - 1] + 1 if count else 0
            target[count:end] = np.arange(after, after + end - count)
        else:
            target[count:end] = PADDING.get(name.partition(" ")[0], 0)
        first = self._places[name].start
        last = first + end * target.itemsize
        if self._changed is not None:
            first, last = min(first, self._changed[0]), max(last, self._changed[1])
        self._changed = first, last
        return self._tensors[name][:count]

    def send(self) -> None:
        if self._changed is not None:
            part = slice(*self._changed)
            self._device_memory[part].copy_(self._host[part], non_blocking=True)
            self._changed = None
        for table in self._tables.values():
            table.send()
        if self._copied is not None:
            self._copied.record()
            self._sent = True

    def clear(self) -> None:
        """Send the inputs of a step without requests."""
        nothing = np.empty(0, np.int64)
        for name in self._arrays:
            self.put(name, nothing)
        self.send()

    def padded(self, name: str, rows: int) -> Tensor:
        """Return the first `rows` entries of an input, including padding."""
        if name in self._tables:
            return self._tables[name].padded[:rows]
        return self._tensors[name][:rows]


class _BlockTable:
    """[seqs, max_blocks] int32, of which a step uses the upper left corner."""

    def __init__(self, seqs: int, max_blocks: int, device: torch.device) -> None:
        self._host = _host_memory(seqs * max_blocks * 4, device)
        self._corner = torch.empty(seqs * max_blocks, dtype=torch.int32, device=device)
        self.padded = torch.zeros(seqs, max_blocks, dtype=torch.int32, device=device)
        self._put: tuple[int, int] | None = None  # size of the corner to send

    def put(self, array: np.ndarray) -> Tensor:
        rows, width = array.shape
        self._host.numpy().view(np.int32)[: rows * width] = array.reshape(-1)
        self._put = rows, width
        return self.padded[:rows, :width]

    def send(self) -> None:
        """Send the corner as one contiguous piece, since only such a copy is asynchronous."""
        if self._put is not None:
            rows, width = self._put
            corner = self._corner[: rows * width]
            corner.copy_(self._host.view(torch.int32)[: rows * width], non_blocking=True)
            self.padded[:rows, :width] = corner.view(rows, width)
            self._put = None


def _host_memory(count: int, device: torch.device) -> Tensor:
    """Return [count] bytes, pinned if a GPU copies from them."""
    return torch.zeros(count, dtype=torch.uint8, pin_memory=device.type == "cuda")


class FreshInputs(StepInputs):
    """Makes a new tensor for each array."""

    fixed = False

    def __init__(self, device: torch.device, states: EnteredStates | None = None) -> None:
        self.device, self.states = device, states
        self._on_host = device.type == "cpu"

    def put(self, name: str, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array) if self._on_host else upload(array, self.device)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step. The three numbers differ, so that a size identifies what it counts."""

    tokens: int
    seqs: int
    samples: int  # rows of logits: one for each row that samples, and one for each draft
    trees: bool = False  # a step may hold trees of drafts
    logs: bool = False  # layers with states log drafts
    adapters: bool = False  # requests choose adapters

    @staticmethod
    def of(max_num_batched_tokens: int, max_num_seqs: int, max_draft_rows: int = 0) -> StepSizes:
        tokens, seqs = max_num_batched_tokens, max_num_seqs
        seqs += seqs == tokens
        rows = max_num_seqs + max_draft_rows
        samples = next(n for n in range(rows, rows + 3) if n not in (tokens, seqs))
        return StepSizes(tokens, seqs, samples)

    @staticmethod
    def of_engine(config: ResolvedConfig) -> StepSizes:
        """Return the sizes of steps of the served model."""
        scheduler, speculation = config.scheduler, config.speculation
        tokens, seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        adapters = config.runner.max_adapters > 0
        if speculation is None:
            return replace(StepSizes.of(tokens, seqs), adapters=adapters)
        sizes = StepSizes.of(tokens, seqs, speculation.max_draft_rows)
        logs = bool(config.model.states)
        return replace(sizes, trees=speculation.trees, logs=logs, adapters=adapters)

    @staticmethod
    def of_drafting(config: ResolvedConfig) -> StepSizes:
        """Return the sizes of forwards of a network that drafts from hidden states."""
        scheduler = config.scheduler
        return StepSizes.of(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)

    def inputs(self, num_groups: int) -> dict[str, int]:
        """Return the number of entries of each input of the largest step, by name, except the block
        tables."""
        sizes = dict.fromkeys(("input_ids", "positions"), self.tokens)
        sizes |= {"query_start_loc": self.seqs + 1, "seq_lens": self.seqs}
        sizes |= dict.fromkeys(STATE_INPUTS if self.logs else STATE_INPUTS[:1], self.seqs)
        sizes["logits_indices"] = self.samples
        if self.trees:
            sizes["tree"] = self.tokens
        if self.adapters:
            sizes["adapters"] = self.tokens
        for group in range(num_groups):
            sizes[f"slot_mapping {group}"] = self.tokens
            sizes[f"first_keys {group}"] = self.seqs
        return sizes


_NARROW = ("query_start_loc", "seq_lens", *STATE_INPUTS, "block_table", "first_keys")


def dtype_of(name: str) -> type[np.integer]:
    """Return the dtype of an input of a step."""
    return np.int32 if name.partition(" ")[0] in _NARROW else np.int64


Packed = dict[str, tuple[list[int], bytes]]  # inputs by name: shape, bytes


def packed(arrays: Mapping[str, np.ndarray]) -> Packed:
    """Return inputs of a step as other processes get them."""
    return {name: (list(array.shape), array.tobytes()) for name, array in arrays.items()}


def unpacked(inputs: Packed) -> dict[str, np.ndarray]:
    """Return inputs of a step that another process has packed, in memory of their own."""
    return {
        name: np.frombuffer(bytearray(data), dtype_of(name)).reshape(shape)
        for name, (shape, data) in inputs.items()
    }


PARTS = 64  # views of an input that are cached


class FixedInputs(StepInputs):
    """Host memory that recorded kernels read; each step overwrites the first part of it."""

    fixed = True

    def __init__(
        self,
        sizes: StepSizes,
        num_groups: int,
        max_blocks: int,
        *,
        zeros: Callable[[tuple[int, ...], type], np.ndarray] = np.zeros,
        states: EnteredStates | None = None,
    ) -> None:
        """
        Args:
            zeros: where the memory comes from.
        """
        self.sizes, self.states = sizes, states
        self._arrays: dict[str, np.ndarray] = {
            name: zeros((count,), dtype_of(name))
            for name, count in sizes.inputs(num_groups).items()
        }
        for group in range(num_groups):
            self._arrays[f"block_table {group}"] = zeros((sizes.seqs, max_blocks), np.int32)
        self._tensors = {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        # Views by their shape: most steps have the size of a recent one.
        self._parts: dict[str, dict[tuple[int, ...], tuple[np.ndarray, Tensor]]] = {
            name: {} for name in self._arrays
        }

    def put(self, name: str, array: np.ndarray) -> Tensor:
        part = self._parts[name].get(array.shape)
        if part is None:
            part = self._part(name, array.shape)
        part[0][...] = array
        return part[1]

    def _part(self, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, Tensor]:
        parts, where = self._parts[name], tuple(map(slice, shape))
        if len(parts) == PARTS:
            parts.clear()
        parts[shape] = self._arrays[name][where], self._tensors[name][where]
        return parts[shape]

    def full(self, name: str) -> Tensor:
        """Return the memory of an input, with the size of the largest step."""
        return self._tensors[name]

"""A fake GPU: tensors that report device "cuda", compute on the CPU, and record where the host
waits for the device.

By torch's documentation and sources, the host waits when it reads a value, for sizes that depend on
values, and for copies that are not non-blocking or not from or to pinned memory. As on a GPU,
operations with operands on two devices are refused.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from kvik import launch
from kvik.config.config import ResolvedConfig
from kvik.engine.thread import EngineThread
from kvik.worker.worker import Worker

CUDA = torch.device("cuda:0")
SOURCES = str(Path(__file__).parents[2] / "src" / "kvik")
# The size of their result depends on values.
OF_UNKNOWN_SIZE = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
OF_UNKNOWN_SIZE |= {"bincount", "repeat_interleave"}
LOOKING = {"_local_scalar_dense", "equal", "is_nonzero", "item"}
INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_"}


class OnDevice(Tensor):
    """A tensor of the fake GPU. To torch's C++ it is on the CPU, to kvik it is not.

    Attributes:
        inner: the CPU tensor with its values.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = CUDA
    is_cuda = True
    inner: Tensor
    gpu: FakeGpu

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: FakeGpu) -> OnDevice:
        with torch.inference_mode(False):  # views of normal tensors are normal
            made: OnDevice = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
            )
        made.inner, made.gpu = inner, gpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor on a GPU that is gone")

    def cpu(self) -> Tensor:
        self.gpu.wait()
        return self.inner.clone()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self) -> Any:
        raise TypeError("can't convert a tensor of a GPU to numpy")

    def __repr__(self, **_: object) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"  # without its values


class FakeGpu(TorchDispatchMode):
    """Runs operations on `OnDevice` tensors.

    Attributes:
        waits: number of times the host waited, by function of kvik.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._within = False  # inside a decomposed operation
        self._pinned: dict[int, Tensor] = {}  # by address; kept, so that no other gets it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # importing dynamo takes seconds

    def wait(self) -> None:
        """Count a wait of the calling function of kvik."""
        for frame in reversed(traceback.extract_stack()):
            if frame.filename.startswith(SOURCES):
                self.waits[f"{Path(frame.filename).stem}.{frame.name}"] += 1
                return
        self.waits["elsewhere"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in ("pin_memory", "_pin_memory"):
            return self._pin(args[0].clone())
        if name == "is_pinned":
            return self._is_pinned(args[0])
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        device = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)), None)
        # C++ code sees the device of a tensor as the CPU, and creates tensors there.
        there = device is not None and (self._within or device.type == "cuda")
        if not there and not any(isinstance(x, OnDevice) for x in tensors):
            pinned = kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            return self._pin(made) if pinned else made
        if name in ("to", "_to_copy") and device is not None:
            non_blocking = bool(kwargs.get("non_blocking", False))
            to = CUDA if there else device
            return self._brought(args[0], to, kwargs.get("dtype"), non_blocking)
        decomposed = self._decomposed(func, args, kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        self._look(name, args, kwargs, tensors)
        if there:
            kwargs["device"] = "cpu"
        known = {id(x.inner): x for x in tensors if isinstance(x, OnDevice)}
        known |= {id(x): x for x in tensors}
        found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))

        def outer(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return known[id(x)] if id(x) in known else OnDevice(x, self)

        return tree_map(outer, found)

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a composite operation by its parts."""
        before, self._within = self._within, True
        try:
            with self:
                return func.decompose(*args, **kwargs)
        finally:
            self._within = before

    def _brought(
        self, source: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool
    ) -> Tensor:
        """Copy a tensor to a device, or return it if it is there."""
        inner = _inner(source)
        found = inner.clone() if dtype in (None, inner.dtype) else inner.to(dtype)
        if isinstance(source, OnDevice) and device.type == "cuda":
            return source if dtype in (None, inner.dtype) else OnDevice(found, self)
        if isinstance(source, OnDevice):
            if not non_blocking:
                self.wait()
            return self._pin(found)  # non-blocking copies end in pinned memory
        if not (non_blocking and self._is_pinned(source)):
            self.wait()
        return OnDevice(found, self)

    def _look(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Count a wait if this operation waits."""
        if name in LOOKING or name in OF_UNKNOWN_SIZE:
            self.wait()
        elif name in INDEXING:
            indices = [x for x in args[1] if x is not None]
            masks = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
            value = args[2] if len(args) > 2 else None
            filled = value is not None and not (value.dim() or isinstance(value, OnDevice))
            # Filling a mask with a host number needs no copy; indices and other values do.
            if masks != filled or not all(isinstance(x, OnDevice) for x in indices):
                self.wait()
        elif name == "copy_":
            (to, source), async_copy = args[:2], kwargs.get("non_blocking", args[2:3] == (True,))
            if isinstance(to, OnDevice) != isinstance(source, OnDevice):
                host = source if isinstance(to, OnDevice) else to
                if not (async_copy and self._is_pinned(host)):
                    self.wait()
        elif any(not isinstance(x, OnDevice) and x.dim() for x in tensors):
            raise RuntimeError(f"{name}: operands are on the host and on the GPU")

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return (
            not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in self._pinned
        )


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, OnDevice) else x


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Make a fake GPU available to torch in this thread and those of engines, for a block."""
    gpu = FakeGpu()
    main = EngineThread._main

    def with_gpu(*arguments: Any) -> None:
        with gpu:
            main(*arguments)

    class Generator(torch.Generator):
        def __new__(cls, device: object = None) -> torch.Generator:
            return super().__new__(cls, "cpu")

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None:
            gpu.wait()

    calls: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "synchronize": lambda *_: gpu.wait(),
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: (9, 0),
        "Event": Event,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, call in calls.items():
            patch.setattr(torch.cuda, name, call)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(EngineThread, "_main", with_gpu)
        torch._C._set_only_lift_cpu_tensors(True)  # as on a GPU, where they are copied
        try:
            with gpu:
                yield gpu
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


@contextmanager
def on_gpu(kernels: str, attention: str) -> Iterator[None]:
    """Put the worker of engines made inside, with device="cpu", on the fake GPU."""

    def placed(config: ResolvedConfig) -> ResolvedConfig:
        choice = {"device": str(CUDA), "kernels": kernels, "attention_backend": attention}
        return replace(config, runner=replace(config.runner, **choice))

    def load(
        config: ResolvedConfig,
        clock: Callable[[], float] = time.monotonic,
        ahead: object = None,
        **options: object,
    ) -> Worker:
        return Worker(placed(config), clock, grammars=launch.grammars_of(config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "load_worker", load)
        yield

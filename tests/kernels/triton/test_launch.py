"""Launches of compiled code, which Triton is asked for once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from kvik.kernels.triton import launch as module
from kvik.kernels.triton.launch import launch

X = torch.zeros(64)
DEFAULTS = {"num_stages": 3, "enable_fp_fusion": True, "maxnreg": None}


class Code:
    """Compiled code, which must be loaded before its function is known."""

    packed_metadata = "metadata"
    function = ""

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self._launched = launched

    @property
    def run(self) -> Callable[..., None]:
        self.function = "function"
        return lambda *args: self._launched.append(args)


@dataclass
class Kernel:
    """A kernel that keeps what it was compiled for, the arguments of launches of its compiled code,
    and those of launches through Triton."""

    compiled: list[tuple[Any, ...]] = field(default_factory=list)
    launched: list[tuple[Any, ...]] = field(default_factory=list)
    bound: list[tuple[Any, ...]] = field(default_factory=list)

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Code:
        self.compiled.append((*args, options))
        return Code(self.launched)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.bound.append((grid, *args, options))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel on device 3, whose current stream is 7."""
    active = SimpleNamespace(
        get_current_device=lambda: 3, get_current_stream=lambda device: device + 4
    )
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(module, "INTERPRETED", False)
    return Kernel()


def test_the_same_code_is_launched_with_other_tensors(kernel: Kernel) -> None:
    tensors = X, torch.zeros(64)
    for grid, x in zip(((5, 2), (9,)), tensors, strict=True):
        launch(kernel, grid, (x, None), (16, 0.5), ("int8",), num_warps=2)
    ((*compiled, options),) = kernel.compiled
    assert compiled == [torch.float32, None, 16, 0.5, "int8"]
    assert options == {"num_warps": 2, **DEFAULTS}
    settings = (7, "function", "metadata", None, None, None)
    assert kernel.launched == [
        (*grid, *settings, x.data_ptr(), None, 16, 0.5, "int8")
        for grid, x in zip(((5, 2, 1), (9, 1, 1)), tensors, strict=True)
    ]
    assert not kernel.bound


@pytest.mark.parametrize(
    "changed",
    [
        {"tensors": (X.to(torch.float16),)},
        {"tensors": (None,)},
        {"numbers": (1,)},
        {"numbers": (None,)},
        {"constants": (3,)},
        {"num_warps": 8},
        {"num_stages": 2},
        {"enable_fp_fusion": False},
        {"maxnreg": 128},
    ],
    ids=str,
)
def test_what_is_compiled_separately(changed: dict[str, Any], kernel: Kernel) -> None:
    usual = {"tensors": (X,), "numbers": (16,), "constants": (2,)}
    launch(kernel, (1,), **usual)
    launch(kernel, (1,), **(usual | changed))
    assert len(kernel.compiled) == len(kernel.launched) == 2


def test_equal_numbers_of_different_types_are_different(kernel: Kernel) -> None:
    for number in (1, 1.0, True):
        launch(kernel, (1,), (X,), (number,), ())
    assert [type(number) for _, number, _ in kernel.compiled] == [int, float, bool]


def test_addresses_that_are_no_multiple_of_16_go_through_triton(kernel: Kernel) -> None:
    for tensor in (X, X[1:], X[4:], X[1:]):
        launch(kernel, (3,), (tensor,), (), (), num_stages=2)
    grid, x, options = kernel.bound[0]
    assert (grid, len(x)) == ((3,), 63)
    assert options == {"num_warps": 4, **DEFAULTS, "num_stages": 2}
    assert (len(kernel.compiled), len(kernel.launched), len(kernel.bound)) == (1, 2, 2)


def test_kernels_and_devices_have_their_own_code(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Kernel()
    for each in (kernel, other):
        launch(each, (1,), (X,), (), ())
    monkeypatch.setattr(module.driver.active, "get_current_device", lambda: 4)
    launch(kernel, (1,), (X,), (), ())
    assert (len(kernel.compiled), len(other.compiled)) == (2, 1)

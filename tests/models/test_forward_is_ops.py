"""A forward consists of `Ops`, attention and views, so that these can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
import torch
from helpers.model_cases import CASES
from helpers.paged_model import PagedModel
from helpers.tiny_models import tiny_config, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvik.attention.reference import ReferenceAttention
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.models.model_spec import ModelSpec
from kvik.spec.network import ForwardContext


class Foreign(TorchDispatchMode):
    """Records what torch computes outside of operations and attention; views compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.depth and not func.is_view:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self.inside():
                return function(*args)

        return run

    def ops(self) -> Ops:
        return Ops(**{f.name: self.wrap(getattr(REFERENCE, f.name)) for f in fields(Ops)})


class Watched(PagedModel):
    """A model whose forward and logits run under a `Foreign`."""

    foreign: Foreign

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        with self.foreign:
            hidden = super().forward(ids, ctx)
            self.model.logits(hidden)
        return hidden


@pytest.mark.full
@pytest.mark.each(1)  # few operations depend on the dtype
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_forwards_only_compute_in_operations(case: str, dtype: torch.dtype) -> None:
    family, options = CASES[case]
    spec = ModelSpec.from_config(tiny_config(family, **options).to_dict())
    foreign = Foreign()
    backend = ReferenceAttention(REFERENCE)
    paged = Watched(None, spec=spec, dtype=dtype, ops=foreign.ops(), backend=backend)
    backend.run = foreign.wrap(backend.run)
    backend.run_latent = foreign.wrap(backend.run_latent)
    backend.choose = foreign.wrap(backend.choose)
    backend.run_compressed = foreign.wrap(backend.run_compressed)
    paged.foreign = foreign
    paged.logits(tokens(9), chunk=5)
    assert foreign.found == []


def test_other_arithmetic_is_detected() -> None:
    foreign = Foreign()
    with foreign:
        x = torch.ones(2, 6)
        x.view(3, 4).unbind(1)
        y = x + x
        with foreign.inside():
            y.mul_(2)
    assert foreign.found == ["aten.ones.default", "aten.add.Tensor"]

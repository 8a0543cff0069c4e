"""What GGUF files store otherwise than checkpoints do: the order of rows, gains of norms, how fast
heads forget, and dimensions of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvik.errors import ModelError
from kvik.models.model_spec import ModelSpec
from kvik.nn.gguf_blocks import permute_rotary, unpermute_rotary
from kvik.spec.declare import Architecture


@dataclass(frozen=True, slots=True)
class Change:
    """How a tensor of a checkpoint becomes that of a file, and back.

    Attributes:
        unit: rows that change places among one another.
        to_file, from_file: take and return [whole units, ...].
    """

    unit: int
    to_file: Callable[[Tensor], Tensor]
    from_file: Callable[[Tensor], Tensor]

    @property
    def told(self) -> str:
        """What a tensor must be."""
        return f"must have whole heads, of {self.unit} rows each"


def changes(spec: ModelSpec, family: Architecture) -> dict[str, Change]:
    """Return the changes of a model's tensors, by their names in checkpoints.

    Args:
        family: the architecture that names the files.
    """
    found: dict[str, Change] = {}
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
    pairs = Change(
        size, partial(permute_rotary, head_dim=size), partial(unpermute_rotary, head_dim=size)
    )
    group = (heads // kv_heads * size, size, size)
    by_kind = Change(
        kv_heads * sum(group), partial(_by_kind, group=group), partial(_by_group, group=group)
    )
    for linear in spec.declaration.linears:
        names = [f"{name}.{last}" for name in linear.names for last in ("weight", "bias")]
        if linear.by_head:
            found |= dict.fromkeys(names, by_kind)
        elif linear.role == "qkv" and family.gguf_pairs:
            found |= dict.fromkeys(names[:4], pairs)  # of q and k
    for norm in spec.declaration.norms:
        if norm.offset:
            one = partial(_plus, offset=norm.offset), partial(_plus, offset=-norm.offset)
            found[f"{norm.name}.weight"] = Change(1, *one)
    for other in spec.declaration.others:
        if other.logarithm:
            found[other.name] = Change(1, _rates, _logarithms)
    moved = {} if family.gguf_rows is None else family.gguf_rows(spec)
    for number in range(spec.num_layers):
        for name, order in moved.items():
            full = spec.declaration.block.format(number) + name
            found[full] = _moved(torch.tensor(order), found.get(full))
    return found


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors that files have without dimensions of one, by their
    names in checkpoints."""
    found = {other.name: other.shape for other in spec.declaration.others if other.shape}
    gates = (linear for linear in spec.declaration.linears if linear.role == "shared_gate")
    return found | {f"{gate.names[0]}.weight": (1, gate.inputs) for gate in gates}


def _moved(order: Tensor, change: Change | None) -> Change:
    """Return a change that also takes the row `order[i]` of the checkpoint to row i."""
    back = order.argsort()
    if change is None:
        return Change(len(order), lambda rows: rows[order], lambda rows: rows[back])
    first, last = change.to_file, change.from_file
    return Change(len(order), lambda rows: first(rows[order]), lambda rows: last(rows)[back])


def _by_kind(rows: Tensor, group: tuple[int, ...]) -> Tensor:
    """[groups * (queries, a key, a value), ...] -> all queries, all keys, all values."""
    grouped = rows.reshape(-1, sum(group), *rows.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in grouped.split_with_sizes(group, 1)])


def _by_group(rows: Tensor, group: tuple[int, ...]) -> Tensor:
    """Undo `_by_kind`."""
    groups = len(rows) // sum(group)
    parts = rows.split_with_sizes([groups * size for size in group])
    grouped = [part.reshape(groups, -1, *rows.shape[1:]) for part in parts]
    return torch.cat(grouped, 1).reshape(rows.shape)


def _rates(logarithms: Tensor) -> Tensor:
    """How fast states of heads decay, as files have it."""
    return -logarithms.float().exp()


def _logarithms(rates: Tensor) -> Tensor:
    """Undo `_rates`.

    Raises:
        ModelError: a state would grow.
    """
    if not bool((rates < 0).all()):
        raise ModelError("model", "must hold negative numbers in ssm_a, how fast states decay")
    return (-rates.float()).log()


def _plus(gains: Tensor, offset: float) -> Tensor:
    """Gains as they are multiplied with, which is how files have them, or what they add to."""
    return gains.float() + offset

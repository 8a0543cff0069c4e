"""What a model is built with: it declares layers by checkpoint name and gets them back unfilled.

A model therefore has no loading code, and does not know how its weights are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvik.attention.base import AttentionBackend
from kvik.config.kv_spec import KVGroup
from kvik.config.rope_spec import RopeSpec
from kvik.kernels.ops import Ops
from kvik.nn.attention import Attention
from kvik.nn.checkpoint import Checkpoint
from kvik.nn.embedding import Embedding, LMHead, TiedHead
from kvik.nn.formats.base import LinearShape, Shard
from kvik.nn.formats.registry import choose_format
from kvik.nn.linear import Linear
from kvik.nn.mlp import MLP, GatedMLP
from kvik.nn.norm import LayerNorm, RMSNorm
from kvik.nn.rope import Rope


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """A tensor the checkpoint must hold.

    Attributes:
        name: in the checkpoint.
        target: unfilled view, with the shape the checkpoint's tensor has.
        kind: "matrix", "gain" or "bias": what random weights look like here.
        shard_axis: axis that ranks divide among them; None: every rank has the whole.
    """

    name: str
    target: Tensor
    kind: str
    shard_axis: int | None


@dataclass(slots=True)
class Declarations:
    """Everything a model declared, in order."""

    tensors: list[DeclaredTensor] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    linears: list[Linear] = field(default_factory=list)

    def finish(self) -> None:
        """After loading: let each format prepare its weights."""
        for linear in self.linears:
            linear.finish()


class Builder:
    """Makes layers within a scope of the checkpoint's names; `at` narrows the scope."""

    def __init__(
        self,
        ops: Ops,
        backend: AttentionBackend,
        groups: Sequence[KVGroup],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        checkpoint: Checkpoint | None,
        quantization: Mapping[str, object] | None = None,
    ) -> None:
        """
        Args:
            groups: KV groups in the order of `ForwardContext.metadata`.
            max_model_len: fixes the base of "dynamic" rotary positions.
            checkpoint: whose names decide how weights are stored; None: random weights.
            quantization: config.json's quantization_config.
        """
        self.ops = ops
        self.backend = backend
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self.checkpoint = checkpoint
        self.quantization = quantization
        self.declared = Declarations()
        self._scope = ""
        self._group_of = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        self._stored: dict[str, set[str]] = {}  # layer name -> names of its tensors
        for name in checkpoint.entries if checkpoint else ():
            layer, _, last = name.rpartition(".")
            self._stored.setdefault(layer, set()).add(last)

    def at(self, name: str | int, *, optional: bool = False) -> Builder:
        """The builder of a narrower scope.

        Args:
            optional: checkpoints may leave this part of the names out (those saved from the bare
                trunk of a model do); then the scope stays as it is.
        """
        scope = self._name(str(name))
        found = any(layer.startswith(f"{scope}.") for layer in self._stored)
        if optional and self._stored and not found:
            return self
        inner = copy(self)
        inner._scope = scope
        return inner

    def ignore(self, *names: str) -> None:
        """Tensors that some checkpoints hold and the model does not need."""
        self.declared.ignored.update(self._name(name) for name in names)

    def linear(
        self,
        names: str | tuple[str, ...],
        inputs: int,
        outputs: int | tuple[int, ...],
        *,
        bias: bool,
        shard: Shard,
        transposed: bool = False,
    ) -> Linear:
        """x [tokens, inputs] -> [tokens, sum of outputs], fused from one layer per name.

        Args:
            transposed: the checkpoint stores [inputs, outputs].
        """
        names = (names,) if isinstance(names, str) else names
        outputs = (outputs,) if isinstance(outputs, int) else outputs
        layers = [self._name(name) for name in names]
        stored = frozenset(self._stored.get(layers[0], ())) - {"bias"}
        format = choose_format(layers[0], stored, self.quantization)
        shape = LinearShape(inputs, outputs, transposed)
        params = format.params(shape, shard, self.dtype, self.device)
        for suffix, param in params.items():
            for layer, part in zip(layers, param.parts, strict=True):
                self._declare(f"{layer}.{suffix}", part, "matrix", param.shard_axis)
        offset = None
        if bias:
            offset = self._empty(sum(outputs))
            for layer, part in zip(layers, offset.split(outputs), strict=True):
                self._declare(f"{layer}.bias", part, "bias", 0 if shard == "column" else None)
        linear = Linear(format, {name: param.tensor for name, param in params.items()}, offset)
        self.declared.linears.append(linear)
        return linear

    def gated_mlp(self, hidden: int, inner: int, *, bias: bool) -> GatedMLP:
        """gate_proj, up_proj and down_proj of this scope."""
        gate_up = self.linear(
            ("gate_proj", "up_proj"), hidden, (inner, inner), bias=bias, shard="column"
        )
        return GatedMLP(
            self.ops, gate_up, self.linear("down_proj", inner, hidden, bias=bias, shard="row")
        )

    def mlp(
        self, up: str, down: str, hidden: int, inner: int, *, bias: bool, transposed: bool
    ) -> MLP:
        """The two matrices `up` and `down` of this scope."""
        return MLP(
            self.ops,
            self.linear(up, hidden, inner, bias=bias, shard="column", transposed=transposed),
            self.linear(down, inner, hidden, bias=bias, shard="row", transposed=transposed),
        )

    def embedding(self, name: str, rows: int, hidden: int, *, shard: Shard = None) -> Embedding:
        """A table [rows, hidden]; "column" lets ranks divide its rows."""
        weight = self._empty(rows, hidden)
        self._declare(self._name(f"{name}.weight"), weight, "matrix", 0 if shard else None)
        return Embedding(weight)

    def lm_head(self, name: str, embedding: Embedding, *, tied: bool) -> LMHead:
        """Logits over the rows of `embedding`, by its weight or by a matrix of their own."""
        if tied:
            self.ignore(f"{name}.weight")
            return TiedHead(embedding)
        vocab, hidden = embedding.weight.shape
        return self.linear(name, hidden, vocab, bias=False, shard="column")

    def rms_norm(self, name: str, dim: int, eps: float) -> RMSNorm:
        return RMSNorm(self.ops, self._gain(name, dim), eps)

    def layer_norm(self, name: str, dim: int, eps: float) -> LayerNorm:
        weight, bias = self._gain(name, dim), self._empty(dim)
        self._declare(self._name(f"{name}.bias"), bias, "bias", None)
        return LayerNorm(self.ops, weight, bias, eps)

    def rope(self, spec: RopeSpec, head_dim: int) -> Rope:
        return Rope(self.ops, spec, head_dim, self.max_model_len, self.device)

    def attention(self, layer: int, head_dim: int) -> Attention:
        """Attention of a layer with the usual scale, 1 / sqrt(head_dim)."""
        return Attention(self.backend, layer, self._group_of[layer], head_dim**-0.5)

    def _gain(self, name: str, dim: int) -> Tensor:
        weight = self._empty(dim)
        self._declare(self._name(f"{name}.weight"), weight, "gain", None)
        return weight

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _declare(self, name: str, target: Tensor, kind: str, shard_axis: int | None) -> None:
        self.declared.tensors.append(DeclaredTensor(name, target, kind, shard_axis))

    def _name(self, name: str) -> str:
        return f"{self._scope}.{name}" if self._scope else name

"""Builds MLPs and routed experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.kernels.weights import PAIRED, Activation, Matrix
from kvik.nn.formats.base import LinearShape
from kvik.nn.layers import MLP, AdaptedExperts, Adapters, Experts, Xielu
from kvik.nn.parameters import LayerNames, Parameters, fill_rows
from kvik.nn.parts import gate_then_up
from kvik.spec.declare import XIELU, XIELU_NAMES, ExpertNames, whole_name
from kvik.spec.experts import ExpertsSpec, Router
from kvik.spec.shares import TILE, Between
from kvik.spec.weights import matrix_kind

# Activations of MLPs without a gate, by their names in config.json.
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}


@dataclass(frozen=True, slots=True)
class MLPShape:
    """Names and sizes of an MLP's layers."""

    names: tuple[str, ...]  # of gate and up, of one layer for both, or without a gate of up
    down: str
    hidden: int
    inner: int
    bias: bool
    transposed: bool = False  # float weights are stored [inputs, outputs]
    up_first: bool = False  # one layer has the rows of up before those of gate
    down_bias: bool | None = None  # of down; None: as `bias`


@dataclass(frozen=True, slots=True)
class FeedForwardBuilder:
    """Builds the MLPs and experts in a scope of the checkpoint's names."""

    parameters: Parameters
    scope: str

    def mlp(
        self,
        shape: MLPShape,
        activation: Activation | None,
        *,
        mixed: bool = False,
        expert: tuple[int, int] | None = None,
        fused: bool = True,
        divisible: bool = True,
    ) -> MLP:
        """Return an MLP.

        Args:
            mixed: see `ExpertNames`.
            expert: see `MatrixSpec`.
            fused: the first matrix has the activation.
            divisible: processes may divide the channels between the matrices.
        """
        names, inner = shape.names, shape.inner
        rows = 2 * inner if activation in PAIRED else inner
        transposed = shape.transposed or mixed
        shapes = [LinearShape(shape.hidden, rows // len(names), transposed)] * len(names)
        places = gate_then_up(rows) if mixed else None
        if shape.up_first:
            places = torch.arange(rows).roll(inner)
        between = self._channels(inner, shape.down) if divisible else None
        up = self.parameters.linear(
            LayerNames(self.scope, names),
            shapes,
            bias=shape.bias,
            activation=activation if fused else None,
            places=places,
            expert=expert,
            between=between,
        )
        down = self.parameters.linear(
            LayerNames(self.scope, (shape.down,)),
            [LinearShape(inner, shape.hidden, transposed)],
            bias=shape.bias if shape.down_bias is None else shape.down_bias,
            expert=expert,
            between=None if between is None else replace(between, read=True),
        )
        return MLP(up, down)

    def _channels(self, inner: int, down: str) -> Between | None:
        """Return the channels between an MLP's matrices, to be divided only between groups of
        inputs of `down`; None: there are adapters in between."""
        if self.parameters.adapters is not None:
            return None
        stored = self.parameters.scheme(self._name(down))
        kind = matrix_kind(self.parameters.quantization, inner, [stored], head=False)
        return Between(inner, math.lcm(TILE, kind.group if kind and kind.group else 1))

    def sparse(self, shape: MLPShape, activation: Activation, sparsity: float) -> MLP:
        """Return the MLP of a layer with `LayerSpec.sparsity`, whose activation reads whole
        rows."""
        mlp = self.mlp(shape, activation, fused=False, divisible=False)
        deviations, ops = NormalDist().inv_cdf(sparsity), self.parameters.ops
        return replace(mlp, between=lambda x: ops.activate_top(x, activation, deviations))

    def limited(self, shape: MLPShape, limit: float) -> MLP:
        """Return the MLP of a layer with `LayerSpec.limit`."""
        mlp = self.mlp(shape, "silu_and_mul", fused=False, divisible=False)
        ops = self.parameters.ops

        def multiply(x: Tensor) -> Tensor:
            """x [tokens, 2 * inner] -> [tokens, inner]."""
            gate, up = x.chunk(2, 1)
            gate = ops.clipped(ops.gated(gate, gate, "sigmoid"), limit)  # never below -0.28
            return ops.gated(gate, ops.clipped(up, limit), "none")

        return replace(mlp, between=multiply)

    def ungated(self, shape: MLPShape, activation: str) -> MLP:
        """Return an MLP without a gate.

        Args:
            activation: by its name in config.json.
        """
        if activation == XIELU:
            return replace(self.mlp(shape, None), between=self._xielu())
        return self.mlp(shape, ACTIVATIONS[activation])

    def _xielu(self) -> Xielu:
        scope, _, _ = XIELU_NAMES[0].rpartition(".")
        to, storage = self.parameters, self.parameters.storage
        factors = storage.tensor(self._name(scope), (2,), torch.float32, to.device)
        xielu = Xielu(to.ops, factors)
        for place, name in enumerate(XIELU_NAMES):
            fill = partial(xielu.fill, place)
            to.declare(self._name(name), factors[place : place + 1], "bias", fill)
        constants = f"{scope}.beta", f"{scope}.eps"
        to.declared.ignored.update(map(self._name, constants))
        if storage.names:
            xielu.on_host()
        return xielu

    def experts(
        self,
        hidden: int,
        spec: ExpertsSpec,
        names: ExpertNames,
        bias: bool,
        activation: Activation,
        shared_activation: Activation | None,
        vocab: int,
    ) -> Experts:
        """Return the routed experts; see `Builder.experts`."""
        to, rule = self.parameters, spec.router
        shape = LinearShape(hidden, rule.outputs)
        router = to.linear(
            LayerNames(self.scope, (names.router,)), [shape], bias=bias, exact=True, wide=True
        )
        correction, scales, table = None, None, None
        if rule.by_token:
            table = self._experts_of_tokens(self._name(names.table), vocab, rule)
        if rule.scaled:
            scales = to.tensor(self._name(names.scales), (rule.experts,), "gain")
        if rule.corrected:
            full, sizes = self._name(names.correction), (rule.outputs,)
            correction = to.storage.tensor(full, sizes, torch.float32, to.device)
            stored = correction[None] if names.correction_row else correction
            to.declare(full, stored, "bias")
        up, down = [], []
        first = [self._name(name.format(0)) for name in (*names.gate_up, names.down)]
        unfused = to.adapters is not None and any(
            to.adapters.room([name]) for name in (first[0], first[-1])
        )
        for expert in range(rule.experts):
            gate_up = tuple(name.format(expert) for name in names.gate_up)
            mlp = self.mlp(
                MLPShape(gate_up, names.down.format(expert), hidden, spec.inner, bias),
                activation,
                mixed=names.mixed,
                expert=(expert, rule.experts),
                fused=not unfused,
            )
            up.append(mlp.up.matrix)
            down.append(mlp.down.matrix)
        for matrices in (up, down):
            if len({matrix.spec.kind for matrix in matrices}) > 1:
                named = shown(self._name(names.down.format("*")))
                raise ModelError("model", f"stores the experts {named} in several ways")
        shared, gate = None, None
        if spec.gated:
            gate_names = LayerNames(self.scope, (names.shared_gate,))
            gate = to.linear(gate_names, [LinearShape(hidden, 1)], bias=False, exact=True)
        if spec.shared:
            inside = replace(self, scope=self._name(names.shared))
            of_all = MLPShape(names.shared_gate_up, names.shared_down, hidden, spec.shared, bias)
            if spec.shared_limit:
                shared = inside.limited(of_all, spec.shared_limit)
            else:
                shared = inside.mlp(of_all, shared_activation or activation)
        adapted = self._adapted(up, down, names, activation, rule) if unfused else None
        experts = replace(to.ops.expert_set(up, down), weigh_inputs=rule.weigh_inputs)
        of_router = router, rule, correction
        return Experts(to.ops, *of_router, experts, shared, gate, scales, adapted, table)

    def _experts_of_tokens(self, full: str, vocab: int, rule: Router) -> Tensor:
        """Return the table of the experts of each token, [vocab, active] int64."""
        to, shape = self.parameters, (vocab, rule.active)
        table = to.storage.tensor(full, shape, torch.int64, to.device)

        def fill(first: int, values: Tensor) -> None:
            ordered = values.sort(1).values
            inside = (ordered >= 0) & (ordered < rule.experts)
            if not bool(inside.all()) or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
                reason = f"different numbers below {rule.experts} in each row"
                raise ModelError("model", f"tensor {shown(full)} must have {reason}")
            fill_rows(table, first, values)

        to.declare(full, table, "ids", fill)
        return table

    def _adapted(
        self,
        up: Sequence[Matrix],
        down: Sequence[Matrix],
        names: ExpertNames,
        activation: Activation,
        rule: Router,
    ) -> AdaptedExperts:
        """Return experts whose activation is not fused, with the adapters that change them."""
        adapters, ops = self.parameters.adapters, self.parameters.ops
        assert adapters is not None
        made: list[tuple[Matrix, Adapters | None]] = []
        for matrix, layers in ((up[0], names.gate_up), (down[0], (names.down,))):
            spec, first = matrix.spec, matrix is up[0]
            each = [[self._name(layer.format(e)) for layer in layers] for e in range(rule.experts)]
            shapes = [LinearShape(spec.inputs, spec.rows // len(layers))] * len(layers)
            places = gate_then_up(spec.rows) if names.mixed and first else None
            pairs = adapters.of_experts(each, shapes, places)
            made.append((self.parameters.identity(spec.rows if first else spec.inputs), pairs))
        (after, up_pairs), (before, down_pairs) = made
        ups = ops.expert_set(up, [after] * len(up))
        downs = ops.expert_set([before] * len(down), down)
        return AdaptedExperts(ops, ups, downs, up_pairs, down_pairs, activation, rule.weigh_inputs)

    def _name(self, name: str) -> str:
        return whole_name(self.scope, name)

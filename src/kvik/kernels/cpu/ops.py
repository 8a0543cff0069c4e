"""The native operations of `Ops`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.cpu.experts import CpuExperts
from kvik.kernels.cpu.matrix import CpuMatrices
from kvik.kernels.cpu.native import DTYPES, Native, pointer, strided
from kvik.kernels.ops import DeltaHeads, Draws, Gate, Masks, Ops, Penalties, Sequences, Truncation
from kvik.kernels.torch_ops import TORCH, with_torch_for_others
from kvik.kernels.weights import ACTIVATIONS, PAIRED, Activation

# The truncations that the kernels apply.
RULES = ("top_k", "top_p", "min_p")
GATES: Mapping[Gate, int] = {"none": 0, "silu": 1, "sigmoid": 2}  # csrc/arguments.hpp


def _addresses(rules: Truncation) -> dict[str, int]:
    """Return addresses of the rules that kernels apply, by argument; 0: no row uses the rule."""
    return {name: pointer(getattr(rules, name)) for name in RULES}


def scale(native: Native, x: Tensor, factor: float, y: Tensor) -> None:
    """Write x * factor to y, both [rows, columns]."""
    native.launch(
        "scaled",
        **strided(x=x, y=y),
        rows=native.rows(x),
        dim=x.shape[1],
        factor=factor,
        dtype=DTYPES[x.dtype],
    )


def native_ops(native: Native) -> Ops:
    """Return operations on float32 and bfloat16 tensors whose last axis is dense. Copying blocks of
    the cache is not part of a forward, so torch does that."""
    matrices, experts = CpuMatrices(native), CpuExperts(native)
    operations = _Operations(native)
    table = Ops(
        matrix=matrices.matrix,
        pack_rows=matrices.pack_rows,
        linear=matrices.linear,
        route=experts.route,
        expert_set=experts.expert_set,
        experts=experts.experts,
        linear_each=matrices.linear_each,
        matrix_rows=matrices.rows,
        gather_rows=operations.gather,
        add=operations.add,
        largest=operations.largest,
        penalize=operations.penalize,
        mask=operations.mask,
        draw=operations.draw,
        probabilities=operations.probabilities,
        rms_norm=operations.rms_norm,
        layer_norm=operations.layer_norm,
        rotations=operations.rotations,
        rotary=operations.rotary,
        activate=operations.activate,
        scaled=operations.scaled,
        softcap=operations.softcap,
        gated=operations.gated,
        causal_conv=operations.causal_conv,
        gated_delta=operations.gated_delta,
        store_kv=TORCH.store_kv,
        copy_blocks=TORCH.copy_blocks,
    )
    return with_torch_for_others(table, RULES)


class _Operations:
    """Operations other than products with matrices. All results are new tensors, except for
    `rotary`, `softcap`, `penalize` and `mask`."""

    def __init__(self, native: Native) -> None:
        self.native = native

    def gather(self, table: Tensor, ids: Tensor) -> Tensor:
        out = self.native.empty(ids.shape[0], table.shape[1], dtype=table.dtype)
        item = table.dtype.itemsize
        self.native.launch(
            "gather_rows",
            table=table.data_ptr(),
            table_stride=table.stride(0) * item,
            ids=ids.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0) * item,
            rows=self.native.rows(ids),
            row_bytes=table.shape[1] * item,
        )
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.native.empty(*x.shape, dtype=x.dtype)
        self.native.launch(
            "add",
            **strided(x=x, y=y, out=out),
            rows=self.native.rows(x),
            dim=x.shape[1],
            dtype=DTYPES[x.dtype],
        )
        return out

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        top = self.native.empty(logits.shape[0], dtype=torch.float32)
        ids = self.native.empty(logits.shape[0], dtype=torch.int64)
        self.native.launch(
            "largest",
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            rows=self.native.rows(logits),
            vocab=logits.shape[1],
            top=top.data_ptr(),
            ids=ids.data_ptr(),
        )
        return top, ids

    def penalize(self, logits: Tensor, penalties: Penalties) -> None:
        self.native.launch(
            "penalize",
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            vocab=logits.shape[1],
            count=self.native.rows(penalties.rows),
            rows=penalties.rows.data_ptr(),
            seen=penalties.seen.data_ptr(),
            repetition=penalties.repetition.data_ptr(),
            frequency=penalties.frequency.data_ptr(),
            presence=penalties.presence.data_ptr(),
            in_prompt=penalties.in_prompt.data_ptr(),
            counts=penalties.counts.data_ptr(),
            seen_stride=penalties.counts.stride(0),
        )

    def mask(self, logits: Tensor, masks: Masks) -> None:
        self.native.launch(
            "mask",
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            vocab=logits.shape[1],
            count=self.native.rows(masks.rows),
            rows=masks.rows.data_ptr(),
            **strided(words=masks.words),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        inner = x.shape[1] if x.dim() == 3 else 1  # heads, each normalised separately
        self.native.launch(
            "rms_norm",
            **strided(x=x, y=y),
            x_inner_stride=x.stride(-2),
            weight=weight.data_ptr(),
            y_inner_stride=y.stride(-2),
            rows=self.native.rows(x),
            inner=inner,
            dim=x.shape[-1],
            eps=eps,
            dtype=DTYPES[x.dtype],
            weight_dtype=DTYPES[weight.dtype],
        )
        return y

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        scale(self.native, x, factor, y)
        return y

    def softcap(self, x: Tensor, cap: float) -> None:
        rows, dim = self.native.rows(x), x.shape[1]
        self.native.launch(
            "softcap", x=x.data_ptr(), x_stride=x.stride(0), rows=rows, dim=dim, cap=cap
        )

    def gated(self, x: Tensor, gate: Tensor, by: Gate) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        self.native.launch(
            "gated",
            **strided(x=x, gate=gate, y=y),
            gate_dim=gate.shape[1],
            rows=self.native.rows(x),
            dim=x.shape[1],
            by=GATES[by],
            wide=int(gate.dtype == torch.float32),
            dtype=DTYPES[x.dtype],
        )
        return y

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        self.native.launch(
            "layer_norm",
            **strided(x=x, y=y),
            x_inner_stride=x.stride(-2),
            weight=weight.data_ptr(),
            bias=bias.data_ptr(),
            weight_stride=weight.shape[-1] if weight.dim() == 2 else 0,
            y_inner_stride=y.stride(-2),
            rows=self.native.rows(x),
            inner=x.shape[1] if x.dim() == 3 else 1,
            dim=x.shape[-1],
            eps=eps,
            dtype=DTYPES[x.dtype],
        )
        return y

    def rotations(self, high: Tensor, low: Tensor, positions: Tensor, last: int) -> Tensor:
        out = self.native.empty(positions.shape[0], low.shape[1], dtype=torch.float32)
        self.native.launch(
            "rotations",
            high=high.data_ptr(),
            low=low.data_ptr(),
            low_rows=low.shape[0],
            positions=positions.data_ptr(),
            last=last,
            out=out.data_ptr(),
            rows=self.native.rows(positions),
            head_dim=low.shape[1],
        )
        return out

    def rotary(self, q: Tensor, k: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ops.rotary`; changes q and k in place."""
        self.native.launch(
            "rotary",
            **strided(q=q, k=k),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            rotation=rotation.data_ptr(),
            rows=self.native.rows(q),
            head_dim=q.shape[2],
            dtype=DTYPES[q.dtype],
        )
        return q, k

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        columns = x.shape[1] // 2 if activation in PAIRED else x.shape[1]
        y = self.native.empty(x.shape[0], columns, dtype=x.dtype)
        self.native.launch(
            "activate",
            **strided(x=x, y=y),
            rows=self.native.rows(x),
            columns=columns,
            activation=ACTIVATIONS[activation],
            dtype=DTYPES[x.dtype],
        )
        return y

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        logits, rules = logits.float(), draws.truncation
        ids = self.native.empty(len(logits), dtype=torch.int64)
        self.native.launch(
            "draw",
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            rows=self.native.rows(logits),
            vocab=logits.shape[1],
            temperature=draws.temperature.data_ptr(),
            uniforms=draws.uniforms.data_ptr(),
            **_addresses(rules),
            ids=ids.data_ptr(),
        )
        return ids

    def probabilities(self, logits: Tensor, temperature: Tensor, rules: Truncation) -> Tensor:
        logits = logits.float()
        shares = self.native.empty(*logits.shape, dtype=torch.float32)
        self.native.launch(
            "probabilities",
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            rows=self.native.rows(logits),
            vocab=logits.shape[1],
            temperature=temperature.data_ptr(),
            **_addresses(rules),
            **strided(shares=shares),
        )
        return shares

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        sequences: Sequences,
        silu: bool,
    ) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        self.native.launch(
            "causal_conv",
            **strided(x=x, state=state, y=y),
            weight=weight.data_ptr(),
            bias=pointer(bias),
            **self._places(sequences),
            channels=x.shape[1],
            width=weight.shape[0],
            silu=silu,
            dtype=DTYPES[x.dtype],
        )
        return y

    def gated_delta(
        self,
        x: Tensor,
        gates: Tensor,
        heads: DeltaHeads,
        state: Tensor,
        log: Tensor,
        sequences: Sequences,
    ) -> Tensor:
        _, value_heads, key_dim, value_dim = state.shape
        y = self.native.empty(x.shape[0], value_heads * value_dim, dtype=x.dtype)
        self.native.launch(
            "gated_delta",
            **strided(x=x, gates=gates, state=state, log=log, y=y),
            decay=heads.decay.data_ptr(),
            bias=heads.bias.data_ptr(),
            **self._places(sequences),
            key_heads=heads.key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=DTYPES[x.dtype],
        )
        return y

    def _places(self, sequences: Sequences) -> dict[str, int]:
        """Return addresses of the sequences and their states, by argument."""
        return {
            "starts": sequences.starts.data_ptr(),
            "lengths": sequences.lengths.data_ptr(),
            "state_rows": sequences.rows.data_ptr(),
            "pending": pointer(sequences.pending),
            "drafts": pointer(sequences.drafts),
            "num_seqs": self.native.rows(sequences.rows),
        }

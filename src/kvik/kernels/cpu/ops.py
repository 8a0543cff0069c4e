"""The native operations of `Ops`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from kvik.kernels.cpu.experts import CpuExperts
from kvik.kernels.cpu.matrix import CpuMatrices
from kvik.kernels.cpu.native import Argument, Native
from kvik.kernels.ops import Draws, Gate, Masks, Ops, Penalties, Sequences, StateHeads, Truncation
from kvik.kernels.torch_ops import TORCH, with_torch_for_others
from kvik.kernels.weights import ACTIVATIONS, PAIRED, Activation

# The truncations that the kernels apply.
RULES = ("top_k", "top_p", "min_p")
GATES: tuple[Gate, ...] = get_args(Gate)


def scale(native: Native, x: Tensor, factor: float, y: Tensor) -> None:
    """Write x * factor to y, both [rows, columns]."""
    native.launch("scaled", x=x, y=y, dim=x.shape[1], factor=factor)


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
        rescaled=operations.rescaled,
        rotations=operations.rotations,
        rotary=operations.rotary,
        activate=operations.activate,
        activate_top=operations.activate_top,
        xielu=operations.xielu,
        scaled=operations.scaled,
        clipped=operations.clipped,
        joined=operations.joined,
        weighted_sums=operations.weighted_sums,
        stream_weights=operations.stream_weights,
        softcap=operations.softcap,
        gated=operations.gated,
        causal_conv=operations.causal_conv,
        recurrence=operations.recurrence,
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
            table=table,
            table_stride=table.stride(0) * item,
            ids=ids,
            out=out,
            out_stride=out.stride(0) * item,
            rows=self.native.rows(ids),
            row_bytes=table.shape[1] * item,
        )
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.native.empty(*x.shape, dtype=x.dtype)
        self.native.launch("add", x=x, y=y, out=out, dim=x.shape[1])
        return out

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        top = self.native.empty(logits.shape[0], dtype=torch.float32)
        ids = self.native.empty(logits.shape[0], dtype=torch.int64)
        self.native.launch("largest", logits=logits, vocab=logits.shape[1], top=top, ids=ids)
        return top, ids

    def penalize(self, logits: Tensor, penalties: Penalties) -> None:
        self.native.launch(
            "penalize",
            logits=logits,
            vocab=logits.shape[1],
            count=self.native.rows(penalties.rows),
            rows=penalties.rows,
            seen=penalties.seen,
            repetition=penalties.repetition,
            frequency=penalties.frequency,
            presence=penalties.presence,
            in_prompt=penalties.in_prompt,
            counts=penalties.counts,
            seen_stride=penalties.counts.stride(0),
        )

    def mask(self, logits: Tensor, masks: Masks) -> None:
        count, vocab = self.native.rows(masks.rows), logits.shape[1]
        rows, words = masks.rows, masks.words
        self.native.launch("mask", logits=logits, vocab=vocab, count=count, rows=rows, words=words)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normalised("rms_norm", x, weight, eps, {"weight_dtype": weight.dtype})

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self._normalised("layer_norm", x, weight, eps, {"bias": bias})

    def _normalised(
        self, kernel: str, x: Tensor, weight: Tensor, eps: float, more: Mapping[str, Argument]
    ) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        self.native.launch(
            kernel,
            x=x,
            x_inner_stride=x.stride(-2),
            weight=weight,
            weight_stride=weight.shape[-1] if weight.dim() == 2 else 0,
            y=y,
            y_inner_stride=y.stride(-2),
            inner=x.shape[1] if x.dim() == 3 else 1,  # heads, each normalised separately
            dim=x.shape[-1],
            eps=eps,
            **more,
        )
        return y

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        scale(self.native, x, factor, y)
        return y

    def clipped(self, x: Tensor, limit: float) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        self.native.launch("clipped", x=x, y=y, dim=x.shape[1], limit=limit)
        return y

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        width = x.shape[1]
        out = self.native.empty(x.shape[0], width + y.shape[1], dtype=x.dtype)
        scale(self.native, x, 1.0, out[:, :width])
        scale(self.native, y, 1.0, out[:, width:])
        return out

    def weighted_sums(self, x: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        rows, sums, parts = weights.shape
        dim = x.shape[1] // parts
        out = self.native.empty(rows, sums * dim, dtype=x.dtype)
        self.native.launch(
            "weighted_sums",
            x=x,
            weights=weights,
            residual=residual,
            out=out,
            parts=parts,
            sums=sums,
            dim=dim,
        )
        return out

    def stream_weights(
        self, x: Tensor, logits: Tensor, factors: Tensor, eps: float, streams: int, rounds: int
    ) -> Tensor:
        y = self.native.empty(*logits.shape, dtype=torch.float32)
        self.native.launch(
            "stream_weights",
            x=x,
            logits=logits,
            factors=factors,
            y=y,
            dim=x.shape[1],
            columns=logits.shape[1],
            eps=eps,
            streams=streams,
            rounds=rounds,
        )
        return y

    def softcap(self, x: Tensor, cap: float) -> None:
        self.native.launch("softcap", x=x, dim=x.shape[1], cap=cap)

    def gated(self, x: Tensor, gate: Tensor, by: Gate) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        self.native.launch(
            "gated",
            x=x,
            gate=gate,
            gate_dim=gate.shape[1],
            y=y,
            dim=x.shape[1],
            by=GATES.index(by),
            wide=gate.dtype == torch.float32,
        )
        return y

    def rescaled(self, x: Tensor, like: Tensor, least_square: float) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        self.native.launch(
            "rescaled",
            x=x,
            x_inner_stride=x.stride(1),
            like=like,
            y=y,
            y_inner_stride=y.stride(1),
            inner=x.shape[1],
            dim=x.shape[2],
            least=least_square,
        )
        return y

    def rotations(self, high: Tensor, low: Tensor, positions: Tensor, last: int) -> Tensor:
        out = self.native.empty(positions.shape[0], low.shape[1], dtype=torch.float32)
        self.native.launch(
            "rotations",
            high=high,
            low=low,
            low_rows=low.shape[0],
            positions=positions,
            last=last,
            out=out,
            rows=self.native.rows(positions),
            head_dim=low.shape[1],
        )
        return out

    def rotary(self, q: Tensor, k: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ops.rotary`; changes q and k in place."""
        (_, heads, size), kv_heads = q.shape, k.shape[1]
        self.native.launch(
            "rotary", q=q, heads=heads, k=k, kv_heads=kv_heads, rotation=rotation, head_dim=size
        )
        return q, k

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        columns = x.shape[1] // 2 if activation in PAIRED else x.shape[1]
        y = self.native.empty(x.shape[0], columns, dtype=x.dtype)
        number = ACTIVATIONS[activation]
        self.native.launch("activate", x=x, y=y, columns=columns, activation=number)
        return y

    def activate_top(self, x: Tensor, activation: Activation, deviations: float) -> Tensor:
        y = self.native.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
        self.native.launch(
            "activate_top",
            x=x,
            y=y,
            columns=y.shape[1],
            activation=ACTIVATIONS[activation],
            deviations=deviations,
        )
        return y

    def xielu(self, x: Tensor, positive: float, negative: float) -> Tensor:
        y = self.native.empty(*x.shape, dtype=x.dtype)
        dim = x.shape[1]
        self.native.launch("xielu", x=x, y=y, dim=dim, positive=positive, negative=negative)
        return y

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        ids = self.native.empty(len(logits), dtype=torch.int64)
        to: dict[str, Argument] = {"uniforms": draws.uniforms, "ids": ids}
        self._sample("draw", logits, draws.temperature, draws.truncation, to)
        return ids

    def probabilities(self, logits: Tensor, temperature: Tensor, rules: Truncation) -> Tensor:
        shares = self.native.empty(*logits.shape, dtype=torch.float32)
        self._sample("probabilities", logits, temperature, rules, {"shares": shares})
        return shares

    def _sample(
        self,
        kernel: str,
        logits: Tensor,
        temperature: Tensor,
        rules: Truncation,
        more: Mapping[str, Argument],
    ) -> None:
        """Launch a kernel that applies rules; None: no row uses the rule."""
        logits = logits.float()
        self.native.launch(
            kernel,
            logits=logits,
            vocab=logits.shape[1],
            temperature=temperature,
            **{name: getattr(rules, name) for name in RULES},
            **more,
        )

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
            x=x,
            weight=weight,
            bias=bias,
            state=state,
            **self._places(sequences),
            channels=x.shape[1],
            width=weight.shape[0],
            silu=silu,
            y=y,
        )
        return y

    def recurrence(
        self,
        x: Tensor,
        gates: Tensor,
        heads: StateHeads,
        state: Tensor,
        log: Tensor,
        sequences: Sequences,
    ) -> Tensor:
        _, value_heads, key_dim, value_dim = state.shape
        y = self.native.empty(x.shape[0], value_heads * value_dim, dtype=x.dtype)
        self.native.launch(
            "recurrence",
            x=x,
            gates=gates,
            decay=heads.decay,
            bias=heads.bias,
            skip=heads.skip,
            by_row=heads.by_row,
            by_channel=heads.by_channel,
            beta_scale=heads.beta_scale,
            bound=heads.bound,
            state=state,
            log=log,
            **self._places(sequences),
            key_heads=heads.key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            y=y,
        )
        return y

    def _places(self, sequences: Sequences) -> dict[str, Argument]:
        """Return the sequences and their states, by argument."""
        return {
            "starts": sequences.starts,
            "lengths": sequences.lengths,
            "state_rows": sequences.rows,
            "pending": sequences.pending,
            "drafts": sequences.drafts,
            "num_seqs": self.native.rows(sequences.rows),
        }

"""Attention of whole prompts by torch's fused kernels, where those are faster than Triton's.

A prompt of which nothing is cached yet attends to this step's own keys and values. They lie in
order, so torch's kernels (cuDNN's, FlashAttention's) can take them, which read no paged cache.
Everything else stays with the kernels that do.

Of latent vectors (`LatentSpec`) these kernels read keys and values that are made for all heads: as
many operations as to multiply queries and results by the same matrices, and then each pair of
tokens takes 2 * (192 + 128) of a head in place of 2 * (576 + 512) (DeepSeek-V3). Behind a cached
prefix its keys and values would have to be made again, which only long chunks are worth.

cuDNN plans its kernels anew for each shape. So prompts are lengthened to multiples of a number,
which makes few shapes: causal queries do not see the keys behind them, and nothing reads the
results of the queries that were added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvik.attention.base import AttendLatent, AttentionSpec, StepLayout
from kvik.kernels.reference.ops import stored_weight
from kvik.spec.kv import Window, first_visible

PADDED = 1024  # lengths are multiples of this
# Those that need no memory for all scores at once, in torch's own order.
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
MAX_HEAD_DIM = 256  # of both


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """A sequence all of whose tokens are in this step.

    Attributes:
        start, end: its tokens in the flat batch.
        tokens: [padded length] int64, the same and the last one again; None: as they lie.
        keys: [padded length] int64, their KV positions.
    """

    start: int
    end: int
    tokens: Tensor | None
    keys: Tensor

    def own(self, x: Tensor) -> Tensor:
        """x [tokens of the step, ...] -> [padded length, ...]."""
        return x[self.start : self.end] if self.tokens is None else x.index_select(0, self.tokens)


class FreshPrompts:
    def __init__(self, least: int, padded: int = PADDED) -> None:
        """
        Args:
            least: tokens of a prompt, from which it is taken.
            padded: see above.
        """
        self.least = least
        self._padded = padded

    def can_do(self, spec: AttentionSpec, head_dim: int) -> bool:
        """Return whether torch's kernels can do what a layer needs."""
        return not spec.options and head_dim <= MAX_HEAD_DIM

    def take(self, layout: StepLayout, window: Window | None) -> dict[int, FreshPrompt]:
        """By sequence, those of a step that can be taken and are long enough."""
        found: dict[int, FreshPrompt] = {}
        if max(layout.num_scheduled) < self.least:
            return found
        start = 0
        for i, (length, context) in enumerate(
            zip(layout.num_scheduled, layout.contexts, strict=True)
        ):
            end = start + length
            whole = length == context and first_visible(length - 1, window) == 0
            if whole and length >= self.least and not layout.nodes(start, length):
                found[i] = self._plan(layout, start, end)
            start = end
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prompt: FreshPrompt, scale: float) -> Tensor:
        """
        Args:
            q: [tokens of the step, heads, head_dim]. k: [num_blocks, block_size, kv_heads,
                head_dim], the cache, which has the turned keys. v: [tokens, kv_heads, head_dim].

        Returns:
            [end - start, heads, head_dim].
        """
        q, v = prompt.own(q), prompt.own(v)
        k = k.flatten(0, 1).index_select(0, prompt.keys)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = _fused(q, k, v, scale)[0].transpose(0, 1)
        return out[: prompt.end - prompt.start]

    def attend_latent(
        self, attend: AttendLatent, q_rope: Tensor, k_rope: Tensor, prompt: FreshPrompt
    ) -> Tensor:
        """
        Args:
            attend: of a layer whose cache keeps latent vectors as they are.
            q_rope: [tokens of the step, heads, rope]; k_rope: [tokens, 1, rope]; both turned.

        Returns:
            [end - start, heads, value].
        """
        up, heads = attend.up, attend.q.shape[1]
        q = torch.cat((prompt.own(attend.q), prompt.own(q_rope)), 2).transpose(0, 1)
        latent, k_rope = prompt.own(attend.latent), prompt.own(k_rope).transpose(0, 1)
        # [heads, rank, nope] and [heads, value, rank]
        to_keys = stored_weight(up.keys).values.unflatten(0, (heads, -1))[:, : up.rank]
        to_values = stored_weight(up.values).values.unflatten(0, (heads, -1))[:, : up.value]
        k = torch.cat((latent @ to_keys, k_rope.expand(heads, -1, -1)), 2)
        v = latent @ to_values.transpose(1, 2)
        width = max(k.shape[2], up.value)  # fused kernels take heads of one size
        q, k, v = (F.pad(x, (0, width - x.shape[2]))[None] for x in (q, k, v))
        out = _fused(q, k, v, attend.spec.scale)[0].transpose(0, 1)
        return out[: prompt.end - prompt.start, :, : up.value]

    def _plan(self, layout: StepLayout, start: int, end: int) -> FreshPrompt:
        length, slots = end - start, layout.slot_mapping
        padded = -(-length // self._padded) * self._padded
        if padded == length:
            # Tokens that are stored nowhere (-1) belong to no sequence.
            return FreshPrompt(start, end, None, slots[start:end].clamp(min=0))
        tokens = torch.arange(start, start + padded, device=slots.device).clamp_(max=end - 1)
        return FreshPrompt(start, end, tokens, slots.index_select(0, tokens).clamp_(min=0))


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q: [1, heads, queries, head_dim] -> the same shape; k, v: [1, kv_heads, queries, head_dim].

    Raises:
        RuntimeError: no fused kernel takes them.
    """
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    with sdpa_kernel(FUSED):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

"""Attention of whole prompts by torch's fused kernels, if those are faster than Triton's.

A prompt without cached tokens attends only to this step's keys and values. They are contiguous, so
torch's kernels (cuDNN's, FlashAttention's), which cannot read a paged cache, can process them.
Everything else is left to the paged kernels.

For latent vectors (`LatentSpec`), keys and values are computed for all heads first. That takes as
many operations as multiplying queries and results by the same matrices, and then each pair of
tokens takes 2 * (192 + 128) operations per head instead of 2 * (576 + 512) (DeepSeek-V3). After a
cached prefix, its keys and values would have to be computed again, which pays off only for long
chunks.

cuDNN plans its kernels again for each shape. So prompts are padded to multiples of a number, for
few shapes: causal queries do not see later keys, and the results of padding are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvik.attention.base import AttendLatent, AttentionSpec
from kvik.attention.layout import StepLayout
from kvik.kernels.reference.ops import stored_weight
from kvik.spec.visible_keys import Window, first_visible

PADDED = 1024  # lengths are multiples of this
# Kernels that do not store all scores at once, in torch's order.
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
MAX_HEAD_DIM = 256  # of both


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """A sequence all of whose tokens are in this step."""

    # start, end: its tokens in the flat batch.
    start: int
    end: int
    # [padded length] int64, the same, with the last one repeated; None: no padding.
    tokens: Tensor | None
    keys: Tensor  # [padded length] int64, their KV positions

    def rows_of(self, x: Tensor) -> Tensor:
        """x [tokens of the step, ...] -> [padded length, ...]."""
        return x[self.start : self.end] if self.tokens is None else x.index_select(0, self.tokens)


class FreshPrompts:
    def __init__(self, min_tokens: int, padded: int = PADDED) -> None:
        """
        Args:
            min_tokens: fewest tokens of a prompt that is taken.
            padded: see `PADDED`.
        """
        self.min_tokens = min_tokens
        self._padded = padded

    def can_do(self, spec: AttentionSpec, head_dim: int) -> bool:
        """Return whether torch's kernels can do what a layer needs."""
        return not spec.options and head_dim <= MAX_HEAD_DIM

    def take(self, layout: StepLayout, window: Window | None) -> dict[int, FreshPrompt]:
        """Return the fresh prompts of a step that are long enough, by sequence."""
        prompts: dict[int, FreshPrompt] = {}
        if max(layout.num_scheduled) < self.min_tokens:
            return prompts
        start = 0
        for i, (length, context) in enumerate(
            zip(layout.num_scheduled, layout.contexts, strict=True)
        ):
            end = start + length
            is_fresh = length == context and first_visible(length - 1, window) == 0
            if is_fresh and length >= self.min_tokens and not layout.nodes(start, length):
                prompts[i] = self._plan(layout, start, end)
            start = end
        return prompts

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prompt: FreshPrompt, scale: float) -> Tensor:
        """Attend in one prompt.

        Args:
            q: [tokens of the step, heads, head_dim]. k: [num_blocks, block_size, kv_heads,
                head_dim], the cache, which has the rotated keys. v: [tokens, kv_heads, head_dim].

        Returns:
            [end - start, heads, head_dim].
        """
        q, v = prompt.rows_of(q), prompt.rows_of(v)
        k = k.flatten(0, 1).index_select(0, prompt.keys)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = _fused(q, k, v, scale)[0].transpose(0, 1)
        return out[: prompt.end - prompt.start]

    def attend_latent(
        self, attend: AttendLatent, q_rope: Tensor, k_rope: Tensor, prompt: FreshPrompt
    ) -> Tensor:
        """Attend in one prompt, over keys and values made from latent vectors.

        Args:
            attend: of a layer whose cache stores latent vectors unrounded.
            q_rope: [tokens of the step, heads, rope]; k_rope: [tokens, 1, rope]; both rotated.

        Returns:
            [end - start, heads, value].
        """
        up, heads = attend.up, attend.q.shape[1]
        q = torch.cat((prompt.rows_of(attend.q), prompt.rows_of(q_rope)), 2).transpose(0, 1)
        latent, k_rope = prompt.rows_of(attend.latent), prompt.rows_of(k_rope).transpose(0, 1)
        # [heads, rank, nope] and [heads, value, rank]
        to_keys = stored_weight(up.keys).values.unflatten(0, (heads, -1))[:, : up.rank]
        to_values = stored_weight(up.values).values.unflatten(0, (heads, -1))[:, : up.value]
        k = torch.cat((latent @ to_keys, k_rope.expand(heads, -1, -1)), 2)
        v = latent @ to_values.transpose(1, 2)
        width = max(k.shape[2], up.value)  # fused kernels need K and V heads of one size
        q, k, v = (F.pad(x, (0, width - x.shape[2]))[None] for x in (q, k, v))
        out = _fused(q, k, v, attend.spec.scale)[0].transpose(0, 1)
        return out[: prompt.end - prompt.start, :, : up.value]

    def _plan(self, layout: StepLayout, start: int, end: int) -> FreshPrompt:
        length, slots = end - start, layout.slot_mapping
        padded = -(-length // self._padded) * self._padded
        if padded == length:
            # Tokens that are not stored (-1) belong to no sequence.
            return FreshPrompt(start, end, None, slots[start:end].clamp(min=0))
        tokens = torch.arange(start, start + padded, device=slots.device).clamp_(max=end - 1)
        return FreshPrompt(start, end, tokens, slots.index_select(0, tokens).clamp_(min=0))


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q: [1, heads, queries, head_dim] -> the same shape; k, v: [1, kv_heads, queries, head_dim].

    Raises:
        RuntimeError: no fused kernel supports them.
    """
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    with sdpa_kernel(FUSED):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

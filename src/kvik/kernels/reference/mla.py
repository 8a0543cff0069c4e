"""Attention over latent vectors in plain torch, which defines the result of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Compute latent attention with absorbed projections (DeepSeek-V2, 2024, section 2.1.2).

    A token's keys and values of all heads are linear in one latent vector c. So a query is
    multiplied by W_UK once, and then by c: q . (W_UK c) = (W_UK^T q) . c. The result is a mean of
    latent vectors, which the caller multiplies by W_UV. In addition, all heads share one key with
    rotary positions.

    Args:
        q_latent: [tokens, heads, latent], W_UK^T q. q_rope: [tokens, heads, rope].
        cache: [blocks, block_size, latent + rope], c and the rotated key of each token.
        block_table: [sequences, blocks per sequence]. query_start_loc: [sequences + 1].
        seq_lens: [sequences]; the queries of each are its last tokens.

    Returns:
        [tokens, heads, latent].
    """
    latent = q_latent.shape[2]
    block_size = cache.shape[1]
    out = torch.zeros_like(q_latent)
    starts = query_start_loc.tolist()
    for i, context in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        place = torch.arange(context, device=cache.device)
        at = block_table[i][place // block_size].long() * block_size + place % block_size
        keys = cache.flatten(0, 1)[at].float()
        q = torch.cat((q_latent[rows], q_rope[rows]), 2).float()
        position = context - len(q) + torch.arange(len(q), device=cache.device)
        scores = torch.einsum("qhd,kd->hqk", q, keys) * scale
        weights = scores.masked_fill(place > position[:, None], -torch.inf).softmax(2)
        out[rows] = torch.einsum("hqk,kd->qhd", weights, keys[:, :latent]).to(out.dtype)
    return out

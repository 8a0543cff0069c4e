"""Draft heads with random weights, on the platform of their engine."""

from __future__ import annotations

from functools import partial

import torch

from kvik.models.draft_heads import EagleLayer, MedusaHeads
from kvik.nn.builder import Builder
from kvik.nn.loader import random_weights
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import Drafter
from kvik.worker.drafters.eagle import EagleDrafter
from kvik.worker.drafters.heads import MedusaDrafter
from kvik.worker.drafters.registry import DrafterParts

TREE = DraftTree.best([[0.6, 0.3]] * 3, 8)


def medusa(parts: DrafterParts) -> Drafter:
    builder, model = _builder(parts), parts.config.model
    with torch.inference_mode():
        heads = MedusaHeads(
            builder,
            heads=int(TREE.depths.max()),
            layers=1,
            hidden=model.hidden_size,
            vocab=model.vocab_size,
            logits=None,
        )
        random_weights(builder.declared, seed=0)
    return MedusaDrafter(heads, TREE, parts.device, parts.rows)


def eagle(parts: DrafterParts) -> Drafter:
    builder, width = _builder(parts), parts.config.model.hidden_size
    with torch.inference_mode():
        layer = EagleLayer(builder, hidden=width, inner=width)
        random_weights(builder.declared, seed=0)
    ids = torch.zeros(1, dtype=torch.int64, device=parts.device)
    rows = partial(parts.rows, more=(ids, ids))
    return EagleDrafter(layer, parts.network, parts.table, TREE, parts.device, rows)


def _builder(parts: DrafterParts) -> Builder:
    chosen = parts.platform.parts
    return Builder(
        chosen.ops,
        chosen.backend,
        (),
        dtype=chosen.dtype,
        device=chosen.device,
        max_model_len=1,
        checkpoint=None,
    )

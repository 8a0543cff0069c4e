"""Draft heads with random weights, on the platform of their engine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvik.models.draft_heads import EagleLayer, MedusaHeads
from kvik.nn.builder import Builder
from kvik.nn.loader import random_weights
from kvik.nn.parameters import Parameters
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import Drafter
from kvik.worker.drafters.heads import EagleDrafter, MedusaDrafter
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


def save_heads(folder: Path, kind: str, *, hidden: int, vocab: int = 96) -> None:
    """Save random heads of a kind in a folder."""
    config: dict[str, object] = {"medusa_num_heads": 3}
    sizes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        sizes |= {f"{head}.0.linear.weight": (hidden, hidden), f"{head}.0.linear.bias": (hidden,)}
        sizes |= {f"{head}.1.weight": (vocab, hidden)}
    if kind == "eagle":
        config = {"model_type": "eagle", "hidden_size": hidden, "vocab_size": vocab}
        config |= {"num_steps": 3, "intermediate_size": 16}
        sizes = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,), "norm.weight": (hidden,)}
        sizes |= {f"mlp.{name}_proj.weight": (16, hidden) for name in ("gate", "up")}
        sizes |= {"mlp.down_proj.weight": (hidden, 16)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(*size, generator=generator) for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _builder(parts: DrafterParts) -> Builder:
    chosen = parts.platform.parts
    parameters = Parameters(chosen.ops, dtype=chosen.dtype, device=chosen.device, checkpoint=None)
    return Builder(parameters, chosen.backend, (), max_model_len=1)

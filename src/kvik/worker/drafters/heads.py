"""Draft heads: drafts in a tree, from the hidden state from which the newest token was sampled.

Medusa's heads (Cai et al. 2024, arXiv 2401.10774) all read that state; head d predicts the token d
positions after the newest one. The likeliest tokens of each head form the tree (`draft_tree.py`).

An EAGLE layer (after EAGLE; Li et al. 2024, arXiv 2401.15077) continues the state: it makes a
hidden state of a node from that of its parent and from the node's token; the model's head makes the
candidates for its children from it. So a tree takes a forward of the layer for each level, and none
of the model.

`models/draft_heads.py` has the layers; they are loaded from a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvik.config.draft_heads import EAGLE, MEDUSA, HeadsSpec, heads_for
from kvik.errors import ModelError
from kvik.kernels.upload import upload
from kvik.models.draft_heads import EagleLayer, MedusaHeads
from kvik.nn.builder import Builder
from kvik.nn.checkpoint import SINGLE, WHOLE, FolderCheckpoint, open_checkpoint
from kvik.nn.loader import load_weights
from kvik.nn.parameters import Parameters
from kvik.nn.safetensors import read_header
from kvik.worker.draft_tree import MAX_NODES, DraftTree
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.graphs import EngineNetwork, RowFunction, RowGraph
from kvik.worker.platforms import PlatformParts
from kvik.worker.request_table import RequestTable


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads. Stores no state for a request."""

    def __init__(
        self,
        heads: Callable[[Tensor], Tensor],
        tree: DraftTree,
        device: torch.device,
        rows: Callable[[RowFunction], RowGraph] = RowGraph,
    ) -> None:
        """
        Args:
            heads: hidden [rows, hidden] -> logits [rows, depths, vocab] of the tokens after the
                next one.
            device: of the hidden states.
            rows: makes the graph that runs `_guess`.
        """
        self.heads = heads
        self.tree = tree
        self._depth = upload(tree.depths[1:] - 1, device)  # [drafts]
        self._rank = upload(np.array(tree.ranks[1:], np.int64), device)
        self._rows = rows(self._guess)

    def propose(self, rows: DraftRows) -> Drafts:
        tokens = self._rows.run(rows.hidden()).cpu()  # [rows, drafts]
        return Drafts.first(rows.limits, tokens.numpy(), self.tree)

    def _guess(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> the tokens of the tree [rows, drafts]."""
        ranks = max(self.tree.ranks) + 1
        likely = torch.topk(self.heads(hidden), ranks, dim=-1).indices  # [rows, depths, ranks]
        return likely[:, self._depth, self._rank]


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes of one depth that have children, and their children."""

    # nodes, parents: [nodes] int64; each parent's index among the nodes of the level before.
    nodes: Tensor
    parents: Tensor
    # children, owners, ranks: [children] int64: nodes of the tree, each one's parent as an index
    # into `nodes`, and its rank among the parent's candidates.
    children: Tensor
    owners: Tensor
    ranks: Tensor
    candidates: int  # number per node: the largest rank + 1


class EagleDrafter(Drafter):
    """Drafts with an EAGLE layer. Stores no state for a request."""

    def __init__(
        self,
        layer: Callable[[Tensor, Tensor], Tensor],
        model: EngineNetwork,
        table: RequestTable,
        tree: DraftTree,
        device: torch.device,
        rows: Callable[[RowFunction], RowGraph] = RowGraph,
    ) -> None:
        """
        Args:
            layer: inputs and hidden states, [rows, hidden] each -> the next hidden states.
            model: the model, whose embedding and head are used with the layer.
            device: of the hidden states.
            rows: makes the graph that runs `_grow`.
        """
        self.layer = layer
        self.model = model
        self.table = table
        self.tree = tree
        self._levels = _levels(tree, device)
        self._rows = rows(self._grow)

    def propose(self, rows: DraftRows) -> Drafts:
        slots = rows.slots
        newest = self.table.num_tokens[slots].astype(np.int64) - 1
        tokens = self.table.token_ids[slots, newest].astype(np.int64)
        hidden = rows.hidden()
        inputs = (upload(array, hidden.device) for array in (tokens, newest))
        drafts = self._rows.run(hidden, *inputs).cpu()  # [rows, drafts]
        return Drafts.first(rows.limits, drafts.numpy(), self.tree)

    def _grow(self, hidden: Tensor, newest: Tensor, places: Tensor) -> Tensor:
        """Grow the trees level by level.

        Args:
            hidden: [rows, hidden], at the token before the newest. newest, places: [rows] int64,
                the newest tokens and their positions.

        Returns:
            [rows, drafts] int64.
        """
        count = len(newest)
        tokens = newest.new_zeros(count, len(self.tree.parents))
        tokens[:, 0] = newest
        last = self.table.token_ids.shape[1] - 1  # the last position
        hidden = hidden[:, None]  # [rows, nodes of a level, hidden]
        for depth, level in enumerate(self._levels):
            wide = len(level.nodes)
            ids = tokens.index_select(1, level.nodes)
            positions = (places + depth).clamp(max=last)[:, None].expand(count, wide)
            before = hidden.index_select(1, level.parents)
            inputs = self.model.enter(ids.flatten(), positions.flatten())
            after = self.layer(inputs, before.flatten(0, 1))
            likely = torch.topk(self.model.logits(after), level.candidates, dim=-1).indices
            candidates = likely.view(count, wide, level.candidates)
            tokens.index_copy_(1, level.children, candidates[:, level.owners, level.ranks])
            hidden = after.view(count, wide, -1)
        return tokens[:, 1:]


def _levels(tree: DraftTree, device: torch.device) -> list[_Level]:
    levels: list[_Level] = []
    parents, ranks = np.array(tree.parents), np.array(tree.ranks, np.int64)
    before = np.zeros(1, np.int64)  # node 0 continues the model's own hidden state
    for depth in range(int(tree.depths.max())):
        children = np.flatnonzero(tree.depths == depth + 1)
        nodes = np.unique(parents[children])
        above = np.searchsorted(before, parents[nodes]) if depth else before
        levels.append(
            _Level(
                nodes=upload(nodes, device),
                parents=upload(above, device),
                children=upload(children, device),
                owners=upload(np.searchsorted(nodes, parents[children]), device),
                ranks=upload(ranks[children], device),
                candidates=int(ranks[children].max()) + 1,
            )
        )
        before = nodes
    return levels


# Loading heads from a folder, and choosing a tree for their accuracies.

OFFSETS = "d2t"  # id of each drafted token in the model, minus its own
MEDUSA_FILE = "medusa_lm_head.safetensors"  # saved by Medusa's training code
# Assumed accuracies of heads without measured ones; they fall with depth and rank.
_FIRST, _DEEPER, _NEXT_RANK, _RANKS = 0.6, 0.8, 0.3, 8


def load_medusa(
    folder: Path, model: EngineNetwork, sizes: tuple[int, int], parts: PlatformParts
) -> MedusaHeads:
    """Load Medusa heads from a folder.

    Args:
        sizes: hidden size and vocabulary of the model.

    Raises:
        ModelError: the folder has no such heads, or they are for another model.
    """
    spec, builder = _open(folder, MEDUSA, sizes, parts)
    with torch.inference_mode():
        heads = MedusaHeads(
            builder,
            heads=spec.depth,
            layers=spec.layers,
            hidden=spec.hidden_size,
            vocab=spec.vocab_size,
            logits=None if spec.own_logits else model.logits,
        )
        _load(builder)
    return heads


def load_eagle(folder: Path, sizes: tuple[int, int], parts: PlatformParts) -> EagleLayer:
    """Load an EAGLE layer. Arguments and errors as in `load_medusa`."""
    spec, builder = _open(folder, EAGLE, sizes, parts)
    with torch.inference_mode():
        layer = EagleLayer(builder, hidden=spec.hidden_size, inner=spec.inner_size)
        _load(builder)
    return layer


def drafted_tokens(folder: Path, count: int) -> tuple[int, ...] | None:
    """Return the model's id of each token that an EAGLE-3 head drafts; None: the ids are the same.

    Raises:
        ModelError: the tensor of ids is malformed.
    """
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.entries.get(OFFSETS)
    if entry is None:
        return None
    if entry.shape != (count,) or entry.dtype not in ("I64", "I32"):
        raise ModelError("spec_model", f"tensor {OFFSETS} must have {count} integers")
    (run,) = checkpoint.runs({OFFSETS: WHOLE})
    return tuple((run.values.long() + torch.arange(count)).tolist())


def tree_of(spec: HeadsSpec, drafts: int, *, chain: bool = False) -> DraftTree:
    """Return the tree of at most `drafts` drafts with the most expected accepted drafts.

    Args:
        chain: it has no branches, as a model with states needs.

    Raises:
        ModelError: all accuracies of the heads are zero.
    """
    guessed = [
        [_FIRST * _DEEPER**depth * _NEXT_RANK**rank for rank in range(_RANKS)]
        for depth in range(spec.depth)
    ]
    most_ranks = 1 if chain else spec.vocab_size
    accuracies = [ranks[:most_ranks] for ranks in spec.accuracies or guessed]
    tree = DraftTree.best(accuracies, min(drafts, MAX_NODES - 1))
    if not tree.drafts:
        raise ModelError(
            "spec_model", "has heads that are never right, according to accuracies in config.json"
        )
    return tree


def _open(
    folder: Path, kind: str, sizes: tuple[int, int], parts: PlatformParts
) -> tuple[HeadsSpec, Builder]:
    spec = heads_for(folder, kind, *sizes)
    parameters = Parameters(
        parts.ops, dtype=parts.dtype, device=parts.device, checkpoint=_checkpoint(folder)
    )
    return spec, Builder(parameters, parts.backend, (), max_model_len=1)  # without positions


def _checkpoint(folder: Path) -> FolderCheckpoint:
    path = folder / MEDUSA_FILE
    if path.is_file() and not (folder / SINGLE).is_file():
        return FolderCheckpoint(((path, read_header(path)),))
    return open_checkpoint(folder)


def _load(builder: Builder) -> None:
    assert builder.parameters.checkpoint is not None
    load_weights(builder.declared, builder.parameters.checkpoint)

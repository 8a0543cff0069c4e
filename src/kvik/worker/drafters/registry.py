"""The table of drafting methods, and the construction of their drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvik.config.config import ResolvedConfig
from kvik.config.speculative import EAGLE3, FORCED, MTP, ResolvedSpeculation
from kvik.config.step_memory import SAMPLER_BYTES
from kvik.kernels.ops import Ops
from kvik.models.gemma4 import ASSISTANT
from kvik.models.model_spec import ModelSpec
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import Drafter
from kvik.worker.drafters.draft_model import DraftModel, DraftNetwork, DraftSampling, Vocabulary
from kvik.worker.drafters.heads import (
    EagleDrafter,
    MedusaDrafter,
    drafted_tokens,
    load_eagle,
    load_medusa,
    tree_of,
)
from kvik.worker.drafters.lookup import NgramDrafter, SuffixDrafter
from kvik.worker.drafters.readers import AssistantDrafter, CachedHeadDrafter, CachedHeadNetwork
from kvik.worker.graphs import EngineNetwork, Graph, RowFunction, RowGraph
from kvik.worker.loading import head_groups, load_network, of_drafts
from kvik.worker.platforms import Platform
from kvik.worker.request_table import RequestTable
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.step_inputs import StepInputs, StepSizes
from kvik.worker.warm_up import IdleWork


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """Parts that a drafter may be built from."""

    speculation: ResolvedSpeculation
    config: ResolvedConfig
    table: RequestTable
    sampling: SamplingTable
    network: EngineNetwork  # the target's
    platform: Platform
    # Preparations for idle time, to which the drafter adds its own.
    idle_work: list[IdleWork] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.config.model.vocab_size

    @property
    def device(self) -> torch.device:
        return self.platform.parts.device

    def drawn_by(self, ops: Ops) -> DraftSampling:
        """Return what draws drafts with some operations."""
        return DraftSampling(Sampler(ops), self.sampling, SAMPLER_BYTES[self.device.type])

    def rows(self, function: RowFunction, more: Sequence[Tensor] = ()) -> RowGraph:
        """Return the graph that runs draft heads.

        Args:
            function: of hidden states [rows, hidden], and of inputs like `more`.
        """
        width, chosen = self.config.model.hidden_size, self.platform.parts
        hidden = torch.zeros(1, width, dtype=chosen.dtype, device=chosen.device)
        like = (hidden, *more)
        graph = self.platform.rows(function, like)
        self.idle_work.extend((chosen.warm_ups.heads(function, like), graph))
        return graph

    def steps(
        self, network: EngineNetwork, spec: ModelSpec, sizes: StepSizes
    ) -> tuple[Graph, StepInputs]:
        """Return how the forwards of a network that drafts run, and where their inputs are put."""
        with torch.inference_mode():
            graph, inputs = self.platform.graph(network, sizes, drafts=True)
        self.idle_work.extend((self.platform.parts.warm_ups.steps(network, spec, sizes), graph))
        return graph, inputs


def _ngram(parts: DrafterParts) -> Drafter:
    chosen = parts.speculation
    return NgramDrafter(parts.table, chosen.ngram_min, chosen.ngram_max)


def _suffix(parts: DrafterParts) -> Drafter:
    return SuffixDrafter(parts.table, parts.speculation.shared)


def _medusa(parts: DrafterParts) -> Drafter:
    folder, (model, sizes) = Path(parts.speculation.source.path), _target(parts)
    heads = load_medusa(folder, model, sizes, parts.platform.parts)
    return MedusaDrafter(heads, _tree(parts), parts.device, parts.rows)


def _eagle(parts: DrafterParts) -> Drafter:
    folder, (model, sizes) = Path(parts.speculation.source.path), _target(parts)
    layer = load_eagle(folder, sizes, parts.platform.parts)
    ids = torch.zeros(1, dtype=torch.int64, device=parts.device)
    rows = partial(parts.rows, more=(ids, ids))
    return EagleDrafter(layer, model, parts.table, _tree(parts), parts.device, rows)


def _tree(parts: DrafterParts) -> DraftTree:
    chosen, config = parts.speculation, parts.config
    assert chosen.source.heads is not None
    # Kept queries have one place for each position, as states do.
    chain = bool(config.model.states) or any(group.budgeted for group in config.cache.groups)
    return tree_of(chosen.source.heads, chosen.num_draft_tokens, chain=chain)


def _target(parts: DrafterParts) -> tuple[EngineNetwork, tuple[int, int]]:
    return parts.network, (parts.config.model.hidden_size, parts.vocab_size)


def _draft_model(parts: DrafterParts) -> Drafter:
    chosen, config = parts.speculation, parts.config
    spec, step = chosen.source.spec, chosen.draft_step
    assert spec is not None and step is not None
    groups = head_groups(config)
    network = load_network(
        config,
        parts.platform,
        spec,
        Path(chosen.source.path),
        groups,
        chosen.quantization,
        drafts=True,
    )
    sizes = StepSizes.of(step.max_num_batched_tokens, step.max_num_seqs)
    graph, inputs = parts.steps(network, spec, sizes)
    draft = DraftNetwork(
        graph,
        inputs,
        Vocabulary(parts.vocab_size, spec.vocab_size, chosen.source.meanings, parts.device),
        parts.table.view(chosen.draft_group, len(groups)),
        step.max_num_batched_tokens,
        spec.max_context,
        network.states,
    )
    sampling = parts.drawn_by(network.ops)
    return DraftModel(draft, sampling, config.cache.pool_size, chosen.num_draft_tokens)


def _cached_head(parts: DrafterParts) -> Drafter:
    """Return the drafter of a head that reads the hidden states of all tokens."""
    speculation, config, drafting = parts.speculation, parts.config, parts.network.drafting
    assert drafting is not None
    spec, meanings, group = speculation.source.spec, None, speculation.draft_group
    if spec is None:  # the model's own head, whose keys and values are those of a layer
        spec, groups = config.model, config.cache.groups
        group = next(i for i, each in enumerate(groups) if spec.num_layers in each.layers)
    elif config.runner.load_format != "random":
        meanings = drafted_tokens(Path(speculation.source.path), spec.vocab_size)
    sizes = StepSizes.of_drafting(config)
    reading = CachedHeadNetwork(
        drafting,
        *parts.steps(drafting, spec, sizes),
        Vocabulary(parts.vocab_size, spec.vocab_size, meanings, parts.device),
        parts.table.view(group, len(drafting.groups)),
        sizes.tokens,
        spec.max_context,
    )
    ops = parts.network.ops
    return CachedHeadDrafter(reading, parts.drawn_by(ops), ops.largest)


def _assistant(parts: DrafterParts) -> Drafter:
    drafting, spec = parts.network.drafting, parts.speculation.source.spec
    assert drafting is not None and spec is not None
    return AssistantDrafter(
        drafting,
        *parts.steps(drafting, spec, StepSizes.of_drafting(parts.config)),
        parts.table,
        parts.drawn_by(drafting.ops),
    )


# Constructors of drafters by method.
DRAFTERS: Mapping[str, Callable[[DrafterParts], Drafter]] = {
    "draft_model": _draft_model,
    "ngram": _ngram,
    "suffix": _suffix,
    FORCED: lambda parts: Drafter(),
    "medusa": _medusa,
    "eagle": _eagle,
    MTP: _cached_head,
    EAGLE3: _cached_head,
    ASSISTANT: _assistant,
}


def build_drafter(parts: DrafterParts) -> Drafter:
    """Build the drafter of the configured method.

    Raises:
        ModelError: the files of `spec_model` are missing, damaged or do not match their config.
    """
    with of_drafts():
        return DRAFTERS[parts.speculation.method](parts)

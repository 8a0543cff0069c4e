"""A draft model without an engine; the test plays the scheduler and the target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from helpers.configs import config
from helpers.paged_model import PagedModel
from torch import Tensor

from kvik.config.memory import DRAFT_STATES
from kvik.core.plan import NewRequest
from kvik.core.sampling_params import SamplingParams
from kvik.kernels.reference.ops import REFERENCE
from kvik.models.model_spec import ModelSpec
from kvik.nn.kv_formats import allocate_kv, allocate_states
from kvik.worker.drafters.base import DraftRows, Drafts
from kvik.worker.drafters.draft_model import DraftModel, DraftNetwork, DraftSampling, Vocabulary
from kvik.worker.graphs import Eager, EngineNetwork, StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.request_table import RequestTable
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.step_inputs import FreshInputs

CPU = torch.device("cpu")
SLOTS, LENGTH, BLOCK, BLOCKS, VOCAB = 4, 48, 4, 64, 40
SPEC = ModelSpec.from_config(
    config(
        "Qwen2ForCausalLM",
        vocab=VOCAB, hidden=16, inner=24, layers=3, heads=2, kv_heads=1, positions=64,
        # A second KV group, with the same blocks.
        use_sliding_window=True, sliding_window=6, max_window_layers=2,
    )
)  # fmt: skip
WITH_STATES = ModelSpec.from_config(
    config(
        "Qwen3_5ForCausalLM",
        vocab=VOCAB, hidden=16, inner=24, layers=3, heads=2, kv_heads=1, head_dim=16, positions=64,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=4,
    )
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0)
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 60)]


def plain_model(*, states: bool = False) -> PagedModel:
    """Return the draft model with an empty cache."""
    spec = WITH_STATES if states else SPEC
    return PagedModel(None, spec=spec, block_size=BLOCK, num_blocks=BLOCKS, seed=3)


@cache
def loaded(*, states: bool = False) -> EngineNetwork:
    model = plain_model(states=states)
    kv = allocate_kv(model.groups, BLOCKS, BLOCK, torch.float32, CPU, separate=True)
    kept = allocate_states(model.spec.states, DRAFT_STATES * SLOTS, CPU)
    return EngineNetwork(model.model, REFERENCE, model.backend, model.groups, kv, kept)


def continuation(tokens: Sequence[int], count: int, *, states: bool = False) -> list[int]:
    """Return the next `count` tokens of a plain greedy run."""
    model, found = plain_model(states=states), list(tokens)
    logits = model.step({0: found})[0]
    for _ in range(count):
        found.append(int(logits[-1].argmax()))
        logits = model.step({0: found[-1:]})[0]
    return found[len(tokens) :]


class Watched:
    """Runs the model, and records which token of which slot was computed at which position."""

    def __init__(self, network: EngineNetwork) -> None:
        self.eager = Eager(network)
        self.computed: list[tuple[int, int, int]] = []
        self.sizes: list[int] = []
        self.broken = 0  # forwards until one fails

    def prepare(self) -> None:
        pass

    def run(self, batch: InputBatch) -> StepOutput:
        if self.broken:
            self.broken -= 1
            if not self.broken:
                raise RuntimeError("the model broke")
        owners = np.repeat(batch.slots, np.diff(batch.starts)).tolist()
        ids = batch.tensors.input_ids.tolist()
        self.computed += zip(owners, batch.tensors.positions.tolist(), ids, strict=True)
        self.sizes.append(len(ids))
        return self.eager.run(batch)


class World:
    """Plays scheduler and target to a draft model, whose layers may keep states."""

    def __init__(
        self,
        *,
        max_tokens: int = 64,
        max_context: int = 64,
        room: int = 1 << 30,
        states: bool = False,
    ) -> None:
        self.network = network = loaded(states=states)
        for tensor in (network.states.pool, *(t for kv in network.kv.layers for t in kv.tensors)):
            tensor.fill_(torch.nan)  # reading what was not computed gives NaN
        self.graph = Watched(network)
        self.table = RequestTable(SLOTS, LENGTH, 2, BLOCK)
        self.sampling = SamplingTable(SLOTS, VOCAB, CPU)
        draft = DraftNetwork(
            self.graph,
            FreshInputs(CPU),
            Vocabulary(VOCAB, VOCAB, None, CPU),
            self.table.view(1, len(network.groups)),  # not the target's first group
            max_tokens,
            max_context,
            network.states,
        )
        sampling = DraftSampling(Sampler(REFERENCE), self.sampling, room)
        self.drafter = DraftModel(draft, sampling, BLOCKS, 7)

    def enter(
        self,
        slot: int,
        tokens: Sequence[int],
        blocks: Sequence[int],
        cached: int = 0,
        params: SamplingParams = GREEDY,
    ) -> None:
        new = NewRequest(
            slot=slot,
            token_ids=list(tokens),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=cached,
            block_ids=[[0] * len(blocks), list(blocks)],
            params=params,
            stop_ids=frozenset(),
            seed=slot,
        )
        self.table.add(new)
        self.sampling.set(slot, params, new.seed, new.token_ids, [], frozenset())
        self.drafter.enter(slot)

    def deliver(self, slot: int, *tokens: int) -> None:
        """Append the target's tokens."""
        rows = np.full(len(tokens), slot)
        self.table.append_runs(np.array([slot]), np.array([len(tokens)]), np.array(tokens))
        self.sampling.append(rows, np.array(tokens))

    def propose(self, limits: dict[int, int]) -> Drafts:
        slots = np.array(list(limits), np.int64)
        self.graph.computed.clear()
        self.graph.sizes.clear()
        most = np.array(list(limits.values()), np.int64)
        rows = DraftRows(slots, most, lambda: torch.empty(len(slots), 0))
        found = self.drafter.propose(rows)
        assert len(set(self.graph.computed)) == len(self.graph.computed), "computed twice"
        return found

    def drafts(self, limits: dict[int, int]) -> list[list[int]]:
        return self.propose(limits).by_row()

    def positions(self, slot: int) -> list[int]:
        """Return the positions that the last proposal computed."""
        return [position for owner, position, _ in self.graph.computed if owner == slot]

    def known(self, slot: int) -> list[int]:
        return self.table.token_ids[slot, : self.table.num_tokens[slot]].tolist()

    def stored(self, slot: int, count: int) -> list[Tensor]:
        """Return K and V of a slot's first tokens, by layer."""
        places = np.arange(count)
        blocks = torch.from_numpy(self.table.block_tables[1][slot, places // BLOCK]).long()
        at = (blocks, torch.from_numpy(places % BLOCK))
        return [tensor[at] for layer in self.network.kv.layers for tensor in layer.tensors]


def expected_stored(tokens: Sequence[int]) -> list[Tensor]:
    model = plain_model()
    model.step({0: list(tokens)})
    found = []
    for group, layers in enumerate(model.groups):
        table = torch.tensor(model._tables[0][group])
        places = torch.arange(len(tokens))
        for layer in layers.layers:
            kv = model.kv[layer]
            found += [(layer, i, t[table[places // BLOCK], places % BLOCK])
                      for i, t in enumerate(kv.tensors)]  # fmt: skip
    return [tensor for _, _, tensor in sorted(found, key=lambda item: item[:2])]


def assert_stored(world: World, slot: int, count: int) -> None:
    expected = expected_stored(world.known(slot)[:count])
    for found, wanted in zip(world.stored(slot, count), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

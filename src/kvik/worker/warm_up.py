"""Steps without requests that an idle engine runs, so that no request waits for a compiler.

Triton compiles a kernel when it is first launched, for the types and constants of that launch, and
caches it on disk: seconds once on a machine, some hundredths in each process after that. So while
the engine is idle, it runs one step for each class of lengths that launches different kernels, of
the model and of the model that drafts for it; the tokens are stored nowhere. Then it samples one
token by each set of rules that launches different kernels, the most common rules first. A request
that arrives waits for one of these at most, which compiles what the request would have compiled
itself. An engine without idle time (`LLM`) compiles only what its requests need.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvik.attention.base import AttentionBackend
from kvik.attention.layout import StepLayout
from kvik.config.config import ResolvedConfig
from kvik.config.graph_sizes import heads_sizes
from kvik.config.speculative import ResolvedSpeculation
from kvik.core.sampling_params import TRUNCATIONS, SamplingParams
from kvik.kernels.ops import Ops
from kvik.kernels.upload import upload
from kvik.kernels.weights import DTYPES
from kvik.models.model_spec import ModelSpec
from kvik.options import Integer
from kvik.worker.graphs import EngineNetwork, RowFunction
from kvik.worker.input_batch import StepTensors
from kvik.worker.joined import Joined
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_batch import Guesses, Offers, Supposed
from kvik.worker.sampling_table import DRAFT, SamplingTable
from kvik.worker.step_inputs import StepSizes

log = logging.getLogger(__name__)


class IdleWork(Protocol):
    def idle_step(self) -> bool:
        """See `Graph.idle_step`."""
        ...


class WarmUp:
    """Calls that an idle engine makes, one at a time."""

    def __init__(
        self,
        calls: Sequence[Callable[[], object]],
        jointly: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """
        Args:
            jointly: returns a context in which the other processes of a group make the same call;
                as in any step, the group is lost if one of them fails.
        """
        self._calls = deque(calls)
        self._jointly = jointly

    def next(self) -> None:
        """Make the next call."""
        self._calls.popleft()()

    def idle_step(self) -> bool:
        if self._calls:
            try:
                with self._jointly():
                    self.next()
            except Exception:  # nothing depends on it; a request that fails reports the cause
                self._calls.clear()
                log.warning("kernels are compiled when they are first needed", exc_info=True)
        return bool(self._calls)


NOTHING = WarmUp(())


class WarmUps:
    """Makes the warm-ups that the kernels of a platform need. This class is for kernels that are
    compiled ahead of time."""

    def steps(self, network: EngineNetwork, spec: ModelSpec, sizes: StepSizes) -> WarmUp:
        """Return the warm-up of a network's forwards; it runs before `Graph.idle_step`.

        Args:
            sizes: see `Platform.graph`.
        """
        return NOTHING

    def heads(self, function: RowFunction, like: Sequence[Tensor]) -> IdleWork:
        """Return the warm-up of draft heads. Arguments as in `Platform.rows`."""
        return NOTHING

    def rules(self) -> IdleWork:
        """Return the warm-up of sampling, which runs last."""
        return NOTHING


class TritonWarmUps(WarmUps):
    """`WarmUps` that compile the kernels for the lengths, heads and rules of a configuration."""

    def __init__(
        self,
        config: ResolvedConfig,
        ops: Ops,
        backend: AttentionBackend,
        device: torch.device,
        joined: Joined | None,
    ) -> None:
        """
        Args:
            joined: the group, whose processes make the calls of `steps` together.
        """
        self._config = config
        self._ops = ops
        self._backend = backend
        self._device = device
        self._joined = joined

    def steps(self, network: EngineNetwork, spec: ModelSpec, sizes: StepSizes) -> WarmUp:
        # Only machines with a GPU need Triton.
        from kvik.attention.triton import TritonAttention
        from kvik.kernels.triton.attention_shapes import SHORT, lengths
        from kvik.kernels.triton.matrix_shapes import tokens_of_experts

        if not isinstance(self._backend, TritonAttention):
            return NOTHING  # other backends plan each step on the host
        context, block_size = self._config.scheduler.max_model_len, self._config.cache.block_size
        max_length = min(sizes.tokens, spec.max_context, context)
        routers = {layer.experts.router for layer in spec.layers if layer.experts}
        by_expert = [tokens_of_experts(router.experts, router.active) for router in routers]
        if adapters := self._config.runner.max_adapters:
            by_expert.append(tokens_of_experts(adapters, 1))
        attending = [layer for layer in spec.layers if layer.attends]
        heads = {(spec.query_heads(layer), spec.heads(layer)[0]) for layer in attending}
        classes = lengths(heads, max_length, set().union(*by_expert))
        nodes = [length for length in classes if sizes.trees and length <= SHORT]
        dtype, device = DTYPES[self._config.runner.dtype], self._device

        def entered(length: int) -> list[Tensor]:
            shape = length, spec.residual_width
            return [torch.zeros(shape, dtype=dtype, device=device)] * network.entering

        calls = forwards(network, classes, sizes, block_size, context, nodes, entered)
        jointly = nullcontext if self._joined is None else self._joined.peers(network).warming_up
        return WarmUp(calls, jointly)

    def heads(self, function: RowFunction, like: Sequence[Tensor]) -> IdleWork:
        if self._config.runner.draft_graph_sizes:
            return NOTHING  # they are compiled when they are captured
        sizes = [size.rows for size in heads_sizes(self._config.scheduler.max_num_seqs)]
        return heads(function, like, sizes)

    def rules(self) -> IdleWork:
        config = self._config
        return rules(self._ops, config.model.vocab_size, self._device, config.speculation)


def forwards(
    network: EngineNetwork,
    lengths: Sequence[int],
    sizes: StepSizes,
    block_size: int,
    max_context: int,
    trees: Sequence[int] = (),
    entered: Callable[[int], Sequence[Tensor]] = lambda length: (),
) -> list[Callable[[], object]]:
    """Return calls that run steps of one request, without cached tokens and after as many cached
    tokens as possible, since the choice of kernels depends on that. The last call copies blocks.

    Args:
        lengths: tokens of the steps; none exceeds max_context.
        sizes: of the largest step.
        trees: lengths of requests in steps that hold trees of drafts.
        entered: returns what a stage reads from the one before, for a step of some length.
    """
    int32 = partial(torch.full, dtype=torch.int32, device=network.device)
    int64 = partial(torch.full, dtype=torch.int64, device=network.device)

    def forward(length: int, context: int, tree: bool) -> None:
        """Run a forward for a request whose cached tokens were never written: it attends to block
        0, which is never allocated, and only planning on the host uses the context. As many of its
        tokens as possible have logits, as with drafts."""
        none = int32((1,), 0)
        layout = StepLayout(
            query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=network.device),
            seq_lens=int32((1,), length),
            block_table=int32((1, -(-max_context // block_size)), 0),
            slot_mapping=int64((length,), -1),
            num_scheduled=(length,),
            contexts=(context,),
            block_size=block_size,
            tree=int64((length,), 0) if tree else None,
            state_rows=int32((1,), -1),
            state_pending=none if sizes.logs else None,
            state_drafts=none if sizes.logs else None,
            adapters=int64((length,), 0) if sizes.adapters else None,
        )
        cut = replace(layout, first_keys=none)
        network.forward(
            StepTensors(
                int64((length,), 0),
                torch.arange(length, device=network.device),
                tuple(cut if group.budgeted else layout for group in network.groups),
                torch.arange(max(0, length - sizes.samples), length, device=network.device),
                entered(length),
            )
        )

    steps = [(length, False) for length in lengths] + [(length, True) for length in trees]
    return [
        *(
            partial(forward, length, context, tree)
            for length, tree in steps
            for context in sorted({length, max_context})
        ),
        partial(_copy_blocks, network),
    ]


def _copy_blocks(network: EngineNetwork) -> None:
    """Copy one block and then two: the target of a single pair is aligned differently."""
    for count in (1, 2):
        pairs = upload(np.zeros((count, 2), np.int64), network.device)
        source, target = pairs.unbind(1)
        for storage in network.kv.storages:
            network.ops.copy_blocks(storage, source, target)


def heads(function: RowFunction, like: Sequence[Tensor], sizes: Sequence[int]) -> WarmUp:
    """Return a call for each number of rows of draft heads that are not captured.

    Args:
        function, like: see `CapturedRows`. sizes: numbers of rows.
    """
    return WarmUp(
        [
            partial(function, *(x.new_zeros(size, *x.shape[1:]) for x in like))
            for size in sorted(sizes, reverse=True)
        ]
    )


# A value for each truncation.
_DROPPING = {one.name: 20 if isinstance(one.kind, Integer) else 0.5 for one in TRUNCATIONS}
_USUAL = ((), ("top_p",), ("top_k", "top_p"))
_EVERY = tuple(names for n in range(len(_DROPPING) + 1) for names in combinations(_DROPPING, n))


def _by(*names: str) -> SamplingParams:
    """Return parameters with some truncations."""
    return SamplingParams(**{name: _DROPPING[name] for name in names})  # type: ignore[arg-type]


# A request for each set of rules that launches different kernels, the most common rules first.
SAMPLED_PARAMS = (
    *(_by(*names) for names in _USUAL),
    SamplingParams(temperature=0.0, presence_penalty=0.5),
    SamplingParams(temperature=0.0, logprobs=1),
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}, bad_words=((0,),), allowed_token_ids=(0,)),
    *(_by(*names) for names in _EVERY if names not in _USUAL),
)


_SLOTS, _PLACES = np.zeros(1, np.int64), np.ones(1, np.int64)  # one row


def rules(
    ops: Ops, vocab_size: int, device: torch.device, speculation: ResolvedSpeculation | None
) -> WarmUp:
    """Return calls that sample from a row of equal logits by each of `SAMPLED_PARAMS`.

    If drafts are sampled or checked by probability, this includes calls that check drafts."""
    sampler = Sampler(ops, checks_at_once=False)

    def set_up(params: SamplingParams) -> tuple[SamplingTable, Tensor]:
        table = SamplingTable(1, vocab_size, device)
        table.set(0, params, 0, [0], [], frozenset())
        return table, torch.zeros(1, vocab_size, device=device)

    def sample(params: SamplingParams) -> None:
        table, logits = set_up(params)
        for supposed in (Supposed(_SLOTS[:0], _SLOTS[:0]), Supposed(_SLOTS, _SLOTS)):
            sampler.sample(logits, table.batch(_SLOTS, _PLACES, supposed))

    def judge(params: SamplingParams, options: ResolvedSpeculation) -> None:
        """Check a draft by rejection sampling, and one by typical acceptance."""
        table, logits = set_up(params)
        if options.draws:
            guess = sampler.guess(logits, table.batch(_SLOTS, _PLACES, stream=DRAFT))
            assert guess.probs is not None
            judged = Guesses(_SLOTS, _SLOTS, guess.probs)
            sampler.sample(logits, table.batch(_SLOTS, _PLACES, judged=judged))
        if options.typical is not None:
            offers = Offers(_SLOTS, _SLOTS, options.typical)
            sampler.sample(logits, table.batch(_SLOTS, _PLACES, judged=offers))

    calls = [partial(sample, params) for params in SAMPLED_PARAMS]
    if speculation is not None and (speculation.draws or speculation.typical is not None):
        random = (params for params in SAMPLED_PARAMS if not params.greedy)
        calls += [partial(judge, params, speculation) for params in random]
    return WarmUp(calls)

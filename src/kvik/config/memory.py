"""Bytes of each part of the engine, planned before anything is loaded.

The plan covers the peak resident memory of the engine's process, as the system counts it (VmHWM on
Linux): memory that it writes, pages of libraries that it runs, and mapped pages of an engine
folder. Files of a checkpoint are read and not mapped, so they are not included, nor are log
probabilities on their way to the caller: 120 to 160 bytes for each token that is reported.
Reserved memory does not count until it is written: each part is planned as if all of it were.

The figures are upper bounds derived from the shapes of one step: a few blocks fewer are better than
a process killed for memory during a request. They are also close, because unused planned memory
holds no tokens; `tests/test_memory_plan.py` measures both. `step_memory.py` has the tensors of a
step; this file adds what drafts with it, several processes, weights and the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvik.config.draft_heads import HeadsFootprint
from kvik.config.graph_sizes import (
    POOL_BYTES,
    GraphSize,
    catching_up_sizes,
    decoding_sizes,
    drafting_sizes,
    graph_bytes,
    heads_sizes,
    num_decoding_sizes,
)
from kvik.config.step_memory import StepFootprint, StepSize
from kvik.config.units import MIB
from kvik.core.config import RESERVED_BLOCKS
from kvik.models.model_spec import ModelSpec
from kvik.spec.kv import STATE_BYTES, KVGroup, block_bytes
from kvik.spec.model import LOGIT_BYTES
from kvik.spec.shares import TILE, PipelineStage, cut_groups, stage_groups

# Quantised weights as floats, for products with many tokens (kernels/triton/matrix_shapes.py).
# Counted for all formats, also for those whose products do not need it.
TRITON_WIDENED = 128 * MIB
CHECKPOINTS_EACH = 2  # checkpoints of states, for each request of the largest step
DRAFT_STATES = 2  # of a draft model, for each request: of its known tokens, and with drafts
# Interpreter, torch, kvik and the pages of libraries that loading and a step touch: 250 to 275 MiB
# with Python 3.11 and torch 2.13, and a tenth more for other versions. On a GPU the CUDA context
# and the workspaces of cuBLAS.
TRANSFORMERS_BYTES = 128 * MIB  # its modules, if a model runs through transformers
RUNTIME_BYTES: Mapping[str, int] = {"cpu": 300 * MIB, "cuda": 768 * MIB}
CUDA_BUILD_BYTES = 320 * MIB  # additional host memory of a CUDA build of torch, GPU or not
RANK_BYTES = 350 * MIB  # each further process of a tensor parallel group or pipeline
# On a CPU: stack and scratch of a thread; memory that torch's kernels keep between calls.
THREAD_BYTES, TORCH_KERNELS_BYTES = 4 * MIB, 32 * MIB
# Of the vocabulary, in host memory: the tokenizer and what grammars need of it. 1,011 were measured
# for 152,000 tokens of a byte-level BPE, of which reading its file takes 680 for a moment.
TOKENIZER_BYTES_PER_ENTRY = 1024
# Reference count, links, hash and pins of a block in the Python block pool.
POOL_BYTES_PER_BLOCK = 300
# While weights are loaded: two runs of rows being read, and one being packed.
LOADING_BYTES = 12 * MIB
# Two parts of experts whose rows are columns of the file, where there are experts.
TRANSPOSED_LOADING_BYTES = 16 * MIB
# Scratch of quantising, without the matrices themselves.
QUANTIZED_SCRATCH_BYTES = 12 * MIB
# Hidden states that are pooled together, and bytes of each of their numbers: a copy in fp32 and one
# in double precision.
POOLED_ROWS, POOLED_BYTES = 64, 12
# Bytes of each number of a pooled vector: a sum in double precision, then a Python float.
VECTOR_BYTES = 8 + 32
# Bytes of the counts for penalties of a request, per entry of the vocabulary.
SEEN_BYTES_PER_TOKEN = 5


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes that the engine may plan with, and where the limit comes from."""

    size: int
    source: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part; `total` never exceeds `limit`."""

    limit: int  # what the engine may use
    weights: int
    activations: int  # peak of one step
    kv_cache: int  # and states
    overhead: int  # runtime, tables
    kv_tiers: int = 0  # the memory tier; 0 if the model is in the memory of a GPU

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.kv_cache + self.overhead + self.kv_tiers


def _position_tables(spec: ModelSpec, max_model_len: int) -> int:
    """Return bytes of the tables of `Ops.rotations`, and of the scales of queries."""
    numbers = sum(rope.table_rows(max_model_len) * width for rope, width in spec.rotations)
    return 4 * (numbers + len(spec.query_scales) * max_model_len)


@dataclass(frozen=True)  # without slots, for cached properties
class Footprint(StepFootprint):
    """Bytes of the engine as functions of the step size."""

    runtime: int = field(kw_only=True)  # bytes in use before the model is loaded
    draft: Footprint | None = None  # of its draft model
    taps: int = 0  # residual streams that the draft model reads
    heads: HeadsFootprint | None = None  # of its draft heads
    graph_memory: int | None = None  # see `EngineConfig`
    checkpoints: bool = True  # whether states are kept for prefix cache hits
    ranks: int = 1  # processes that compute layers together
    repeated: int = 0  # bytes of replicated weights, without one copy
    whole_experts: int = 0  # of the layer with fewest, if each belongs to one process
    # Bytes per token in addition to the network's: outputs of experts of other processes until they
    # are summed; all logits if prompts are scored through transformers.
    output_bytes: int = 0
    stage_ends: tuple[int, ...] = ()  # see `RunnerConfig`
    # Weights of each stage if stages are on separate machines, or on separate GPUs, of which the
    # fullest counts. All are planned alike.
    stage_bytes: tuple[int, ...] = ()
    counted: int | None = None  # weights of a model that is only planned

    @cached_property
    def weights(self) -> int:
        added = self.draft.weights if self.draft else 0
        added += self.heads.weights if self.heads else 0
        if self.adapters is not None:
            added += self.adapters.weights * self._ranks_here
        if self.stage_bytes:
            return max(self.stage_bytes) + added
        if self.mapped is not None:
            return self.mapped + added
        num_bytes = self.counted
        if num_bytes is None:
            num_bytes = self.spec.weight_bytes(self.dtype, self.quantization, self.kernels)
        return self.own_share(num_bytes) + added

    def own_share(self, num_bytes: int) -> int:
        """Return the bytes of the fullest device, of weights that a group divides."""
        if not self._one_of_several:
            return num_bytes
        return self.repeated + -(-(num_bytes - self.repeated) * self._largest_share // 1000)

    @property
    def _one_of_several(self) -> bool:
        """Whether each process has its own device; the plan is then for the fullest one."""
        return self.device != "cpu" and self.ranks > 1

    @property
    def _largest_share(self) -> int:
        """Return the largest share of a matrix in a process, in thousandths, if it is divided by KV
        heads, by whole experts or by output tiles, whichever are fewest."""
        heads = (spec.num_kv_heads for group in self.groups for spec in group.specs)
        shared = (count for count in (*heads, self.whole_experts) if count >= self.ranks)
        num_parts = max(self.ranks, min((self.spec.hidden_size // TILE, *shared)))
        return 1000 * -(-num_parts // self.ranks) // num_parts + 1

    @property
    def stored_as(self) -> str:
        """The name of the weights' format."""
        if self.quantization != "none":
            return self.quantization
        return "the checkpoint's format" if self._stored else self.dtype

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block, with the keys and values of a draft model in it."""
        of_ranks = max if self._one_of_several else sum
        stages = [stage_groups(self.groups, stage) for stage in self._stages]
        sizes = [of_ranks(self._rank_bytes(groups)) for groups in stages]
        drafting = self.draft_bytes_per_token * self.block_size
        return (max(sizes) if self.stage_bytes else sum(sizes)) + drafting

    @cached_property
    def draft_bytes_per_token(self) -> int:
        """Bytes of the keys and values of a draft model for a token, in its processes."""
        if (draft := self.draft) is None:
            return 0
        parts = (cut_groups(draft.groups, rank, draft.ranks) for rank in range(draft.ranks))
        each = [sum(group.bytes_per_token for group in groups) for groups in parts]
        return max(each) if draft._one_of_several else sum(each)

    @cached_property
    def _stages(self) -> tuple[PipelineStage, ...]:
        return PipelineStage.all_of(self.stage_ends or (self.spec.num_layers,))

    @cached_property
    def _state_bytes(self) -> int:
        """Bytes of the states of a request, on one machine."""
        if not self.stage_bytes:
            return self.spec.state_bytes
        states = [layer.state.size if layer.state else 0 for layer in self.spec.layers]
        runs = (stage.layers for stage in self._stages)
        return STATE_BYTES * max(sum(states[run.start : run.stop]) for run in runs)

    def _rank_bytes(self, groups: tuple[KVGroup, ...]) -> list[int]:
        """Return the bytes of a block of some groups in each process."""
        parts = (cut_groups(groups, rank, self.ranks) for rank in range(self.ranks))
        return [block_bytes(part, self.block_size) for part in parts]

    @property
    def _processes(self) -> int:
        """Number of processes on a machine."""
        return self._ranks_here * (1 if self.stage_bytes else max(1, len(self.stage_ends)))

    @property
    def _ranks_here(self) -> int:
        """Number of processes of a group whose memory is planned together."""
        return 1 if self._one_of_several else self.ranks

    @property
    def _block_cost(self) -> int:
        """Bytes of a block and its bookkeeping in host memory."""
        return self.block_bytes + (POOL_BYTES_PER_BLOCK if self.device == "cpu" else 0)

    def cache_cost(self, num_blocks: int) -> int:
        """Bytes of a pool with `num_blocks` for requests, and its bookkeeping in host memory."""
        return (num_blocks + RESERVED_BLOCKS) * self._block_cost

    def blocks_within(self, size: int) -> int:
        """Most blocks for requests that a pool of `size` bytes has; the inverse of `cache_cost`."""
        return max(0, size // self._block_cost - RESERVED_BLOCKS)

    def blocks_per_request(self, num_tokens: int, chunk: int) -> int:
        """Most blocks one request of `num_tokens` holds when a step adds at most `chunk`."""
        return sum(g.visible.max_blocks(num_tokens, chunk, self.block_size) for g in self.groups)

    def blocks_of_all(self, size: StepSize) -> int:
        """Return the most blocks that all requests of a step hold together."""
        sizes = size.max_num_seqs, size.max_model_len, size.max_num_batched_tokens
        return sum(g.visible.blocks_of_all(*sizes, self.block_size) for g in self.groups)

    def activations(self, size: StepSize) -> int:
        """Peak of one step."""
        peak = self.step(size)
        if self.stage_ends and not self._taped:  # what a stage gets from the one before
            width = self.spec.residual_width + self.taps * self.spec.hidden_size
            peak += size.max_num_batched_tokens * width * self._item
        peak *= self._processes  # counts shared memory once per process
        peak += size.max_num_batched_tokens * self.output_bytes
        drafting = self._drafting(size, self.draft) if self.draft else 0
        drafting += self._predicting(size) if self.spec.predictor else 0
        if self.heads:
            drafting += self.heads.step(min(size.max_num_seqs, size.max_draft_rows))
        return peak + drafting

    def overhead(self, size: StepSize) -> int:
        """Runtime, tables of running requests and of rotary positions, widened weights, loading."""
        spec = self.spec
        longest = size.max_model_len
        entries = -(-longest // self.block_size) * len(self.groups)
        # Tables take memory as tokens arrive. With unbounded texts, the plan is for one request of
        # maximum length, and for others within the model's context.
        alike = size.max_num_seqs
        if self._most_keys is not None and longest > spec.max_context:
            alike = 1 + (size.max_num_seqs - 1) * spec.max_context // longest
        table = alike * (longest + 2 * entries) * 4
        seen = size.max_num_seqs * spec.vocab_size * SEEN_BYTES_PER_TOKEN
        seen = 0 if spec.encoder else seen
        tables = _position_tables(spec, size.max_model_len)
        total = self.runtime + table + seen + tables + self._pooling(size) + self.graphs(size)
        total += (self._processes - 1) * RANK_BYTES
        total += 0 if self._one_of_several else self.repeated
        if self.kernels == "triton" and (self._quantized or (self.draft and self.draft._quantized)):
            total += TRITON_WIDENED
        if self.device == "cpu":
            total += spec.vocab_size * TOKENIZER_BYTES_PER_ENTRY
            total += 0 if self._taped else TORCH_KERNELS_BYTES
        loading = self._loading()
        if self._taped:  # its memory is released before the first step
            loading = max(0, loading - self.activations(size))
        return total + loading

    def graph_sizes(self, size: StepSize) -> tuple[GraphSize, ...]:
        """Sizes of the forwards that may be captured."""
        if not self._captured_steps or self.graph_memory == 0:
            return ()
        return decoding_sizes(size.max_num_seqs) + self._judging_sizes(size)

    def _judging_sizes(self, size: StepSize) -> tuple[GraphSize, ...]:
        if not size.max_draft_rows:
            return ()
        drafts, tree = (size.draft_tokens, size.max_draft_rows), self.heads is not None
        return drafting_sizes(size.max_num_seqs, *drafts, tree=tree)

    def draft_graph_sizes(self, size: StepSize) -> tuple[GraphSize, ...]:
        """Return the same for the draft model or the heads."""
        if self.kernels != "triton" or not size.max_draft_rows or self.graph_memory == 0:
            return ()
        rows, tokens = size.of_draft_model.max_num_seqs, size.of_draft_model.max_num_batched_tokens
        if self.heads is not None:
            return heads_sizes(rows)
        if self.spec.predictor is not None and self._captured_steps:
            return decoding_sizes(rows)
        if self.draft is None or not self.draft._captured_steps:
            return ()
        return decoding_sizes(rows) + catching_up_sizes(rows, tokens)

    def graphs(self, size: StepSize) -> int:
        """Return the bytes of all captured forwards: the option's value, or an estimate."""
        drafting = self.draft_graph_sizes(size)
        if not drafting and not self._captured_steps:
            return 0
        if self.graph_memory is not None:
            return self.graph_memory
        total = POOL_BYTES
        if self._captured_steps:
            judging, rows = self._judging_sizes(size), size.max_num_seqs
            decoding = GraphSize(rows, rows, 1, rows)  # the largest of them
            count = num_decoding_sizes(rows) + len(judging)
            total += self._captured((decoding, *judging), count, size)
        if self.heads is not None and drafting:
            total += self.heads.step(drafting[-1].rows) + len(drafting) * self.heads.graph
        elif drafting:
            total += (self.draft or self)._captured(drafting, len(drafting), size)
        return total

    def _captured(self, sizes: tuple[GraphSize, ...], count: int, size: StepSize) -> int:
        """Return the bytes of captured forwards: each graph, the shared tensors of the largest, and
        their output.

        Args:
            sizes: includes the largest ones. count: number of all sizes.
        """
        spec, tokens = self.spec, max(graph.tokens for graph in sizes)
        largest = replace(size, max_num_batched_tokens=tokens, max_draft_rows=0)
        logits = max(graph.samples for graph in sizes) * spec.vocab_size * LOGIT_BYTES
        shared = self._stream(largest) + max(self._widest(largest), logits)
        output = logits + tokens * spec.hidden_size * self._item
        output += max(graph.samples for graph in sizes) * (4 + 8)
        per_graph = graph_bytes(sum(len(group.layers) for group in self.groups))
        return count * per_graph + shared + output

    def _drafting(self, size: StepSize, draft: Footprint) -> int:
        """Return a step of the draft model, its rotary positions, and the distributions of its
        drafts."""
        tables = _position_tables(draft.spec, size.max_model_len)
        step = size.of_draft_model
        if self.taps:  # it computes the tokens of each step
            step = replace(size, max_draft_rows=0)
            # The residual streams, two and all of them joined, and what the head reads of them; its
            # inputs, their parts and those of some tokens.
            copies = draft._ranks_here * (3 * self.taps + 6)
            copies += 2 * self.taps * (self._processes - draft._ranks_here)  # of earlier stages
            tables += copies * size.max_num_batched_tokens * self.spec.hidden_size * self._item
        return draft.activations(step) + tables + self._drawn(size)

    def _drawn(self, size: StepSize) -> int:
        """Return the distributions of drafts: kept until they are verified, and twice while they
        are concatenated."""
        rows = 2 * size.max_draft_rows + size.of_draft_model.max_num_seqs
        return rows * self.spec.vocab_size * 4

    def _predicting(self, size: StepSize) -> int:
        """Return what the model's own head takes in a step: its inputs and hidden states, its tape,
        and the distributions of its drafts. Its weights, keys and values are those of a layer."""
        states = size.max_num_batched_tokens * self.spec.hidden_size * self._item
        tape = self._tape(replace(size, max_draft_rows=0)) if self._taped else 0
        return self._ranks_here * (6 * states + tape) + self._drawn(size)

    def _pooling(self, size: StepSize) -> int:
        """Vectors of prompts, in host memory."""
        if self.device != "cpu":
            return 0
        rows = min(POOLED_ROWS, size.max_num_batched_tokens)
        return self.spec.hidden_size * (rows * POOLED_BYTES + size.max_num_seqs * VECTOR_BYTES)

    def num_checkpoints(self, size: StepSize) -> int:
        """Return the number of state copies kept in addition to those of running requests: for each
        request, the one at the end of its prompt and the newest."""
        return CHECKPOINTS_EACH * size.max_num_seqs if self.checkpoints else 0

    def states(self, size: StepSize) -> int:
        """Return the bytes of the states of running requests, of all checkpoints, and of the recent
        queries of layers with a budget."""
        rows = size.max_num_seqs + self.num_checkpoints(size)
        states = self._ranks_here * self._state_bytes * rows  # each process has all of them
        if self.draft is not None:
            states += DRAFT_STATES * size.max_num_seqs * self.draft.spec.state_bytes
        return states + size.max_num_seqs * self._recent_queries

    @property
    def _recent_queries(self) -> int:
        """Bytes of the last queries of a request, in all layers with a budget (`LayerKV`)."""
        total = 0
        for group in self.groups:
            for layer, spec in zip(group.layers, group.specs, strict=True):
                if spec.budget is not None:
                    heads = self.spec.query_heads(self.spec.layers[layer])
                    total += 4 * heads * spec.head_dim * spec.budget.last
        return total

    def fixed(self, size: StepSize) -> int:
        """Return the bytes of everything except the blocks of the KV cache."""
        return self.weights + self.activations(size) + self.overhead(size) + self.states(size)

    def plan(self, size: StepSize, num_blocks: int, limit: Limit) -> MemoryPlan:
        """Return the bytes by part, with a KV cache of `num_blocks` for requests."""
        blocks = (num_blocks + RESERVED_BLOCKS) * self.block_bytes
        return MemoryPlan(
            limit=limit.size,
            weights=self.weights,
            activations=self.activations(size),
            kv_cache=blocks + self.states(size),
            overhead=self.overhead(size) + self.cache_cost(num_blocks) - blocks,
        )

    def _loading(self) -> int:
        if self.mapped is not None:
            return 0
        total = LOADING_BYTES
        # Such matrices are read whole, in fp32 at most, the next one while one is packed.
        total += 2 * self.spec.transposed_numbers * 4
        if self.spec.experts_of_token:
            total += TRANSPOSED_LOADING_BYTES
        if self._quantized:
            total += QUANTIZED_SCRATCH_BYTES
        # Quantised tensors are read whole, the next one while one is converted.
        total += 2 * max((like.stored_bytes for like in self._stored), default=0)
        return total

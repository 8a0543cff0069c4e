"""How many bytes each part of the engine takes, before anything is loaded.

What is planned is the resident memory of the engine's process at its peak, as the system counts it
(VmHWM on Linux): what it wrote itself, the pages of libraries that it ran, and those of an engine
folder, which are mapped. Files of a checkpoint are read and not mapped, so they are not in it.
Memory that is only reserved does not count until it is written: each part is planned as if all of
it were.

The figures are upper bounds taken from the shapes of one step: better a few blocks fewer than a
process killed for memory in the middle of a request. They are near ones too, because what is
planned in vain holds no tokens; `tests/test_memory_plan.py` measures both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from kvik.config.heads_memory import HeadsFootprint
from kvik.config.kv_formats import AUTO
from kvik.config.kv_spec import (
    KVGroup,
    block_bytes,
    group_layers,
    max_blocks,
    stored_as,
)
from kvik.config.model_spec import DTYPE_BYTES, LinearLayers
from kvik.config.quantization import weight_bytes
from kvik.config.step_memory import LOGIT_BYTES, TRITON_BACKENDS, ModelSizes, StepMemory, StepSize
from kvik.config.units import MIB

# Interpreter, torch and kvik, the pages of libraries that loading and a step touch (250 to 275 MiB,
# by how many of them the system has at hand, with
# Python 3.11 and torch 2.13), and a tenth for other versions. On a GPU the CUDA context and cuBLAS
# workspaces.
RUNTIME_BYTES: Mapping[str, int] = {"cpu": 300 * MIB, "cuda": 768 * MIB}
CUDA_BUILD_BYTES = 320 * MIB  # host memory that torch built for CUDA takes more, GPU or not
# On a CPU: of a thread its stack and what its kernels note down; what torch's kernels keep between
# calls where they run.
THREAD_BYTES, TORCH_KERNELS_BYTES = 4 * MIB, 32 * MIB
TOKENIZER_BYTES_PER_ENTRY = 384  # of the vocabulary, in host memory
# Reference count, links and hash of a block in the Python block pool, and its place among pins.
POOL_BYTES_PER_BLOCK = 300
# While weights are loaded: two runs of rows that are read, and one that is made ready to be packed.
LOADING_BYTES = 12 * MIB
# What quantising takes beside the matrices themselves.
QUANTIZED_SCRATCH_BYTES = 12 * MIB
# Hidden states that are pooled at once, and what each number of one takes: a copy in fp32, one in
# double precision.
POOLED_ROWS, POOLED_BYTES = 64, 12
# What a pooled vector takes for each number: a sum in double precision, then a Python float.
VECTOR_BYTES = 8 + 32
# What penalties count of a request, for each entry of the vocabulary.
SEEN_BYTES_PER_TOKEN = 5


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes as functions of the step size, for one model in one dtype on one kind of device."""

    spec: ModelSizes
    dtype: str
    quantization: str
    device: str  # "cpu" or "cuda"
    attention_backend: str
    block_size: int
    runtime: int  # bytes that are gone before the model comes
    kv_format: str = AUTO  # see `EngineConfig.kv_cache_dtype`
    kv_skipped: tuple[int, ...] = ()  # layers that keep the model's dtype
    kernels: str = "torch"  # what multiplies: "native", "triton" or "torch"
    mapped: int | None = None  # bytes of the weights of an engine folder, which are read in place
    draft: Footprint | None = None  # of the draft model beside it
    heads: HeadsFootprint | None = None  # of draft heads
    graph_memory: int | None = None  # see `EngineConfig`

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        specs = self.spec.kv_specs(DTYPE_BYTES[self.dtype])
        return group_layers(stored_as(specs, self.kv_format, self.kv_skipped))

    @property
    def weights(self) -> int:
        drafting = self.draft.weights if self.draft else 0
        drafting += self.heads.weights if self.heads else 0
        if self.mapped is not None:
            return self.mapped + drafting
        return weight_bytes(self.spec, self.dtype, self.quantization, self.kernels) + drafting

    @property
    def stored_as(self) -> str:
        """In what, in a word."""
        if self.quantization != "none":
            return self.quantization
        return "the checkpoint's format" if self._stored else self.dtype

    @property
    def _stored(self) -> list[LinearLayers]:
        """What the checkpoint stores quantised."""
        return [like for like in self.spec.linear_layers() if any(like.stored)]

    @property
    def block_bytes(self) -> int:
        """With a draft model's keys and values, which lie beside the model's in it."""
        drafting = 0
        if self.draft is not None:
            drafting = sum(group.bytes_per_token for group in self.draft.groups) * self.block_size
        return block_bytes(self.groups, self.block_size) + drafting

    @property
    def block_cost(self) -> int:
        """Bytes of a block and of its bookkeeping in host memory."""
        return self.block_bytes + (POOL_BYTES_PER_BLOCK if self.device == "cpu" else 0)

    def blocks_per_request(self, num_tokens: int, chunk: int) -> int:
        """Most blocks one request of `num_tokens` holds when a step adds at most `chunk`."""
        return sum(max_blocks(g.spec, num_tokens, chunk, self.block_size) for g in self.groups)

    @property
    def _item(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def _step(self) -> StepMemory:
        return StepMemory(
            spec=self.spec,
            item=self._item,
            device=self.device,
            attention_backend=self.attention_backend,
            block_size=self.block_size,
            quantization=self.quantization,
            quantized=self.quantization != "none" or bool(self._stored) or self.mapped is not None,
            converted=self.kv_format != AUTO,
            num_groups=len(self.groups),
        )

    @property
    def _taped(self) -> bool:
        """A step runs as a tape of native kernels, none of torch's."""
        return self.attention_backend == "cpu"

    def activations(self, size: StepSize) -> int:
        """Peak of one step."""
        own = self._step.tape(size) if self._taped else self._step.eager(size)
        drafting = self._drafting(size, self.draft) if self.draft else 0
        if self.heads:
            drafting += self.heads.step(min(size.max_num_seqs, size.max_draft_rows))
        return own + drafting

    def overhead(self, size: StepSize) -> int:
        """Runtime, the tables of running requests and of rotary positions, what loading takes."""
        spec = self.spec
        entries = -(-size.max_model_len // self.block_size) * len(self.groups)
        table = size.max_num_seqs * (size.max_model_len + 2 * entries) * 4
        seen = size.max_num_seqs * spec.vocab_size * SEEN_BYTES_PER_TOKEN
        rotation = size.max_model_len * spec.head_dim * 4 if spec.rope else 0
        total = self.runtime + table + seen + rotation + self._pooling(size) + self.graphs(size)
        if self.device == "cpu":
            total += spec.vocab_size * TOKENIZER_BYTES_PER_ENTRY
            total += 0 if self._taped else TORCH_KERNELS_BYTES
        loading = self._loading()
        if self._taped:  # what it took is released before the first step
            loading = max(0, loading - self.activations(size))
        return total + loading

    @property
    def _captured_steps(self) -> bool:
        """Whether forwards are captured: other attention backends plan each on the host."""
        return self.kernels == "triton" and self.attention_backend in TRITON_BACKENDS

    def graph_sizes(self, size: StepSize) -> tuple[GraphSize, ...]:
        """Of the forwards that may be captured."""
        if not self._captured_steps or self.graph_memory == 0:
            return ()
        return decoding_sizes(size.max_num_seqs) + self._judging_sizes(size)

    def _judging_sizes(self, size: StepSize) -> tuple[GraphSize, ...]:
        if not size.max_draft_rows:
            return ()
        drafts, tree = (size.draft_tokens, size.max_draft_rows), self.heads is not None
        return drafting_sizes(size.max_num_seqs, *drafts, tree=tree)

    def draft_graph_sizes(self, size: StepSize) -> tuple[GraphSize, ...]:
        """The same of the draft model, or of the heads."""
        if self.kernels != "triton" or not size.max_draft_rows or self.graph_memory == 0:
            return ()
        rows, tokens = size.of_draft_model.max_num_seqs, size.of_draft_model.max_num_batched_tokens
        if self.heads is not None:
            return heads_sizes(rows)
        if self.draft is None or not self.draft._captured_steps:
            return ()
        return decoding_sizes(rows) + catching_up_sizes(rows, tokens)

    def graphs(self, size: StepSize) -> int:
        """Of all that may be captured, as asked for, or as it is expected to take."""
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
        elif self.draft is not None and drafting:
            total += self.draft._captured(drafting, len(drafting), size)
        return total

    def _captured(self, sizes: tuple[GraphSize, ...], count: int, size: StepSize) -> int:
        """Captured forwards: each by itself, the tensors of the largest, whose memory all share,
        and the output that they write to.

        Args:
            sizes: the largest are among them. count: of all of them.
        """
        spec, tokens = self.spec, max(each.tokens for each in sizes)
        largest = replace(size, max_num_batched_tokens=tokens, max_draft_rows=0)
        logits = max(each.samples for each in sizes) * spec.vocab_size * LOGIT_BYTES
        shared = self._step.stream(largest) + max(self._step.widest(largest), logits)
        output = logits + tokens * spec.hidden_size * self._item
        output += max(each.samples for each in sizes) * (4 + 8)
        each = graph_bytes(sum(len(group.layers) for group in self.groups))
        return count * each + shared + output

    def _drafting(self, size: StepSize, draft: Footprint) -> int:
        """A draft model's step, its rotary positions, and what drafts were drawn from: until they
        are judged, and twice while they are put together."""
        small = size.of_draft_model
        rotation = size.max_model_len * draft.spec.head_dim * 4 if draft.spec.rope else 0
        drawn = (2 * size.max_draft_rows + small.max_num_seqs) * self.spec.vocab_size * 4
        return draft.activations(small) + rotation + drawn

    def _pooling(self, size: StepSize) -> int:
        """Vectors of prompts, in host memory."""
        if self.device != "cpu":
            return 0
        rows = min(POOLED_ROWS, size.max_num_batched_tokens)
        return self.spec.hidden_size * (rows * POOLED_BYTES + size.max_num_seqs * VECTOR_BYTES)

    def fixed(self, size: StepSize) -> int:
        """Everything beside the KV cache."""
        return self.weights + self.activations(size) + self.overhead(size)

    def _loading(self) -> int:
        if self.mapped is not None:
            return 0
        total = LOADING_BYTES
        if not self.spec.gated_mlp:  # GPT-2: stored transposed, so matrices come whole, in fp32
            total += 2 * self.spec.intermediate_size * self.spec.hidden_size * 4
        if self.quantization != "none" or self._stored:
            total += QUANTIZED_SCRATCH_BYTES
        # quantised tensors come whole, and the next one is read meanwhile
        total += 2 * max((like.stored_bytes for like in self._stored), default=0)
        return total

"""How many bytes each part of the engine takes, before anything is loaded.

The figures are upper bounds taken from the shapes of one step: better a few blocks fewer than a
process killed for memory in the middle of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvik.config.kv_spec import KVGroup, block_bytes, group_layers, max_blocks
from kvik.config.model_spec import DTYPE_BYTES, ModelSpec
from kvik.config.quantization import weight_bytes

MIB = 1 << 20
GIB = 1 << 30

# Interpreter, torch, thread stacks; on a GPU the CUDA context and cuBLAS workspaces.
RUNTIME_BYTES: Mapping[str, int] = {"cpu": 384 * MIB, "cuda": 768 * MIB}
CUDA_BUILD_BYTES = 320 * MIB  # host memory that torch built for CUDA takes more, GPU or not
# Reference count, links and hash of a block in the Python block pool.
POOL_BYTES_PER_BLOCK = 160
# While weights are loaded: two runs of rows that are read, and one that is made ready to be packed.
LOADING_BYTES = 40 * MIB
# What quantising, and multiplying with quantised weights, takes beside the matrices themselves.
QUANTIZED_SCRATCH_BYTES = 64 * MIB
LOGIT_BYTES = 4  # of the model's, whatever its dtype
# One logit in the sampler with every rule on: fp32 copies and penalties, then in double precision
# its share, its distance from the entropy, their order and two running sums.
SAMPLER_BYTES_PER_LOGIT = 116
SAMPLED_LOGITS = 1 << 22  # logits that go through the sampler at once
# Rows of logits held at once while the logprobs of a prompt are read, and fp32 copies of each.
PROMPT_LOGPROB_ROWS, PROMPT_BYTES_PER_LOGIT = 64, 16
# What penalties count of a request, for each entry of the vocabulary.
SEEN_BYTES_PER_TOKEN = 5
# Keys that the sdpa backend gathers for one batch of decoding rows, however many rows there are.
GATHERED_KEYS = 16384
# Keys of a split in the cpu backend, and requests of the longest context that decode side by side.
SPLIT_KEYS, LONG_CONTEXTS = 512, 8


@dataclass(frozen=True, slots=True)
class StepSize:
    """What bounds the tensors of one step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes as functions of the step size, for one model in one dtype on one kind of device."""

    spec: ModelSpec
    dtype: str
    quantization: str
    device: str  # "cpu" or "cuda"
    attention_backend: str
    block_size: int
    runtime: int  # bytes that are gone before the model comes

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return group_layers(self.spec.kv_specs(DTYPE_BYTES[self.dtype]))

    @property
    def weights(self) -> int:
        return weight_bytes(self.spec, self.dtype, self.quantization)

    @property
    def stored_as(self) -> str:
        """In what, in a word."""
        return self.dtype if self.quantization == "none" else self.quantization

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.groups, self.block_size)

    @property
    def block_cost(self) -> int:
        """Bytes of a block and of its bookkeeping in host memory."""
        return self.block_bytes + (POOL_BYTES_PER_BLOCK if self.device == "cpu" else 0)

    def blocks_per_request(self, num_tokens: int, chunk: int) -> int:
        """Most blocks one request of `num_tokens` holds when a step adds at most `chunk`."""
        return sum(max_blocks(g.spec, num_tokens, chunk, self.block_size) for g in self.groups)

    def activations(self, size: StepSize) -> int:
        """Peak of one step: the widest point of a layer, or the sampler, whichever is larger, over
        a residual stream that lives all the time. Operations run in fp32 inside."""
        spec, item = self.spec, DTYPE_BYTES[self.dtype]
        tokens = size.max_num_batched_tokens
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        stream = tokens * spec.hidden_size * 3 * item  # residual, normed, the next residual
        norm = tokens * spec.hidden_size * 16
        qkv = tokens * (queries + 2 * keys) * item
        rotary = qkv + tokens * ((queries + keys) * item + queries * 16)
        attended = qkv + tokens * (3 * queries + keys) * item + self._attention_scratch(size)
        mlp = tokens * spec.intermediate_size * (3 * item + 20)
        sampling = min(size.max_num_seqs, tokens)
        sampled = min(sampling, max(1, SAMPLED_LOGITS // spec.vocab_size))
        logits = spec.vocab_size * max(
            sampling * LOGIT_BYTES + sampled * SAMPLER_BYTES_PER_LOGIT,
            min(PROMPT_LOGPROB_ROWS, tokens) * (LOGIT_BYTES + PROMPT_BYTES_PER_LOGIT),
        )
        widest = max(norm, rotary, attended, mlp, logits, self._quantized_product(size))
        return stream + widest + self._masks(size)

    def overhead(self, size: StepSize) -> int:
        """Runtime, the tables of running requests and of rotary positions, what loading takes."""
        spec = self.spec
        entries = -(-size.max_model_len // self.block_size) * len(self.groups)
        table = size.max_num_seqs * (size.max_model_len + entries) * 4
        seen = size.max_num_seqs * spec.vocab_size * SEEN_BYTES_PER_TOKEN
        rotation = size.max_model_len * spec.head_dim * 4 if spec.rope else 0
        return self.runtime + table + seen + rotation + self._loading()

    def fixed(self, size: StepSize) -> int:
        """Everything beside the KV cache."""
        return self.weights + self.activations(size) + self.overhead(size)

    def _loading(self) -> int:
        total = LOADING_BYTES
        if not self.spec.gated_mlp:  # GPT-2: stored transposed, so matrices come whole, in fp32
            total += 2 * self.spec.intermediate_size * self.spec.hidden_size * 4
        if self.quantization != "none":
            total += QUANTIZED_SCRATCH_BYTES
        return total

    def _quantized_product(self, size: StepSize) -> int:
        """x and its rounded copy, y before and after its activation, in fp32 if weights are
        quantised."""
        if self.quantization == "none":
            return 0
        spec, item = self.spec, DTYPE_BYTES[self.dtype]
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        inputs = max(spec.hidden_size, queries, spec.intermediate_size)
        outputs = max(spec.hidden_size, queries + 2 * keys, 3 * spec.intermediate_size)
        return size.max_num_batched_tokens * (8 * inputs + (4 + item) * outputs)

    def _attention_scratch(self, size: StepSize) -> int:
        """K and V gathered from the cache in one layer, and scores where they are written out."""
        spec, item = self.spec, DTYPE_BYTES[self.dtype]
        if self.attention_backend == "reference":
            # in fp32 for every query head, beside the gathered ones; scores, masked, softmax
            gathered = 2 * size.max_model_len * spec.num_heads * spec.head_dim * (4 + 4 + item)
            return gathered + self._pairs(size) * (3 * spec.num_heads * 4)
        if self.attention_backend == "cpu":  # partial results of the splits of long contexts
            splits = size.max_num_seqs + LONG_CONTEXTS * -(-size.max_model_len // SPLIT_KEYS)
            return splits * spec.num_heads * (spec.head_dim + 32) * 5
        keys = max(size.max_model_len + self.block_size, GATHERED_KEYS)
        return 2 * keys * spec.num_kv_heads * spec.head_dim * item

    def _masks(self, size: StepSize) -> int:
        """Masks of all prefilling sequences, per KV group; they live as long as the step."""
        if self.attention_backend == "cpu":
            return 0
        return self._pairs(size) * (1 + 1 + 4) * len(self.groups)

    def _pairs(self, size: StepSize) -> int:
        """Most (query, key) pairs of a step."""
        return size.max_num_batched_tokens * size.max_model_len

"""Peak of the tensors of one step, from their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvik.config.kv_spec import KVCacheSpec
from kvik.config.quantization import Weighed
from kvik.config.units import MIB

LOGIT_BYTES = 4  # of the model's, whatever its dtype
# What sampling may take beside the logits; a batch that would take more is sampled in parts. On a
# GPU every part is some fifty launches, so there are fewer.
SAMPLER_BYTES: Mapping[str, int] = {"cpu": 48 * MIB, "cuda": 512 * MIB}
# One logit in torch's way to draw with every rule on: in double precision its share, its distance
# from the entropy, their order and two running sums. And before that, in a copy for the rules.
DRAW_BYTES, RULES_BYTES = 96, 4
# Rows of logits held at once while the logprobs of a prompt are read, how many of them are copied
# at a time, and what a copy and comparisons with it take for each logit.
PROMPT_ROWS, PROMPT_COPIED_ROWS, PROMPT_BYTES_PER_LOGIT = 32, 8, 24
# Tokens of a step in which a draft model makes up for what it has not computed.
CATCH_UP_TOKENS = 512
# Keys that the sdpa backend gathers for one batch of decoding rows, however many rows there are.
GATHERED_KEYS = 16384
# Copies in fp32 of a number of K or V that torch rounds for the cache, or gathers from it.
STORED_COPIES, GATHERED_COPIES = 6, 3
# Partial results of split contexts in the triton backend, which takes sequences in parts rather
# than more (kernels/triton/attention_paged.py).
TRITON_WORKSPACE = 64 * MIB
# Triton's attention, and torch's for whole prompts, which are lengthened by less than so many
# tokens (attention/fresh_prompts.py); cuDNN's library and workspace (an estimate).
TRITON_SDPA = "triton+sdpa"
TRITON_BACKENDS = ("triton", TRITON_SDPA)
PROMPT_PADDING = 1024
CUDNN_BYTES = 256 * MIB
# Keys of a split in the cpu backend, and requests of the longest context that decode side by side.
SPLIT_KEYS, LONG_CONTEXTS = 512, 8


class ModelSizes(Weighed, Protocol):
    """What a footprint reads of a model. A `ModelSpec` is one; a model that kvik does not run can
    be described by another: experts then count with the width that serves one token, and what the
    cache holds, one copy for all heads perhaps, is told by `kv_specs`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def rope(self) -> object | None:
        """None: positions are learned, or there are none."""
        ...

    @property
    def gated_mlp(self) -> bool: ...

    def kv_specs(self, dtype_bytes: int) -> list[KVCacheSpec]:
        """What each layer stores of a token, at `dtype_bytes` for each number."""
        ...


@dataclass(frozen=True, slots=True)
class StepSize:
    """What bounds the tensors of one step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_rows: int = 0  # drafts of a step, each a row of logits
    draft_tokens: int = 0  # of one request

    @property
    def of_draft_model(self) -> StepSize:
        """What a draft model computes at once beside this step."""
        rows = max(1, min(self.max_num_seqs, self.max_draft_rows))
        tokens = max(rows, min(CATCH_UP_TOKENS, self.max_num_batched_tokens))
        return StepSize(self.max_model_len, rows, tokens)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes as functions of the step size, for one model on one kind of device.

    Attributes:
        item: bytes of a number that the model computes with.
        quantization: see `EngineConfig`.
        quantized: whether any weights are, by the engine or in the checkpoint.
        converted: whether keys and values are stored in another format than the model's.
        num_groups: of layers that cache alike.
    """

    spec: ModelSizes
    item: int
    device: str
    attention_backend: str
    block_size: int
    quantization: str
    quantized: bool
    converted: bool
    num_groups: int

    @property
    def _queries(self) -> int:
        """Width of the queries of all heads."""
        return self.spec.num_heads * self.spec.head_dim

    @property
    def _qkv(self) -> int:
        return self._queries + 2 * self.spec.num_kv_heads * self.spec.head_dim

    def tape(self, size: StepSize) -> int:
        """Buffers of a tape, which stay for good, and the scratch of its kernels. In a layer three
        times the residual stream (before, normalised, after) lives beside Q, K and V (twice where
        they are normalised, but then they make room for others), what attention gives, and the
        inner activations; kernels make themselves a copy of the inputs of a product."""
        spec, tokens = self.spec, size.max_num_batched_tokens
        widths = 3 * spec.hidden_size + self._qkv + self._queries + spec.intermediate_size
        normalised = self._qkv
        rotation = spec.head_dim * 4 if spec.rope else 0
        buffers = tokens * ((widths + normalised) * self.item + rotation)
        inputs = max(spec.hidden_size, self._queries, spec.intermediate_size)
        rounded = self.quantization in ("int8", "int4")  # to a byte, and scales of groups
        copied = tokens * (inputs + inputs // 4 if rounded else inputs * self.item)
        return buffers + copied + self._attention_scratch(size) + self._logits(size)

    def eager(self, size: StepSize) -> int:
        """The widest point of a layer, or the sampler, whichever is larger, over a residual stream
        that lives all the time. Operations run in fp32 inside."""
        widest = max(self.widest(size), self._logits(size))
        return self.stream(size) + widest + self._masks(size)

    def stream(self, size: StepSize) -> int:
        """Residual, normed, the next residual."""
        return size.max_num_batched_tokens * self.spec.hidden_size * 3 * self.item

    def widest(self, size: StepSize) -> int:
        spec, item, tokens = self.spec, self.item, size.max_num_batched_tokens
        queries, keys = self._queries, spec.num_kv_heads * spec.head_dim
        norm = tokens * spec.hidden_size * 16
        qkv = tokens * self._qkv * item
        rotary = qkv + tokens * ((queries + keys) * item + queries * 16)
        attended = qkv + tokens * (3 * queries + keys) * item + self._attention_scratch(size)
        mlp = tokens * spec.intermediate_size * (3 * item + 20)
        return max(norm, rotary, attended, mlp, self._quantized_product(size))

    def _logits(self, size: StepSize) -> int:
        """Of the rows that sample, and what sampling takes, or reading those of a prompt, whichever
        is larger."""
        vocab, tokens = self.spec.vocab_size, size.max_num_batched_tokens
        rows = min(size.max_num_seqs + size.max_draft_rows, tokens)
        beside = vocab * (DRAW_BYTES + RULES_BYTES)  # of a row
        at_once = max(beside, min(rows * beside, SAMPLER_BYTES[self.device]))
        prompt_rows, copied = min(PROMPT_ROWS, tokens), min(PROMPT_COPIED_ROWS, tokens)
        prompt = vocab * (prompt_rows * LOGIT_BYTES + copied * PROMPT_BYTES_PER_LOGIT)
        return rows * vocab * LOGIT_BYTES + max(at_once, prompt)

    def _quantized_product(self, size: StepSize) -> int:
        """x and its rounded copy, y before and after its activation, in fp32 if weights are
        quantised."""
        if not self.quantized:
            return 0
        spec, item = self.spec, self.item
        inputs = max(spec.hidden_size, self._queries, spec.intermediate_size)
        outputs = max(spec.hidden_size, self._qkv, 3 * spec.intermediate_size)
        return size.max_num_batched_tokens * (8 * inputs + (4 + item) * outputs)

    def _attention_scratch(self, size: StepSize) -> int:
        """K and V gathered from the cache in one layer, and scores where they are written out."""
        spec, item = self.spec, self.item
        if self.attention_backend == "reference":
            # in fp32 for every query head, beside the gathered ones; scores, masked, softmax
            gathered = 2 * size.max_model_len * spec.num_heads * spec.head_dim * (4 + 4 + item)
            scores = self._pairs(size) * (3 * spec.num_heads * 4)
            return gathered + scores + self._converted_kv(size)
        if self.attention_backend == "triton":
            return TRITON_WORKSPACE
        if self.attention_backend == TRITON_SDPA:  # copies of q, k and v, and what comes of them
            width = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
            copies = (size.max_num_batched_tokens + PROMPT_PADDING) * width * item
            return TRITON_WORKSPACE + CUDNN_BYTES + copies
        if self.attention_backend == "cpu":  # partial results of the splits of long contexts
            splits = size.max_num_seqs + LONG_CONTEXTS * -(-size.max_model_len // SPLIT_KEYS)
            return splits * spec.num_heads * (spec.head_dim + 32) * 5
        keys = max(size.max_model_len + self.block_size, GATHERED_KEYS)
        heads = spec.num_kv_heads + (spec.num_heads if self.device == "cuda" else 0)
        return 2 * keys * heads * spec.head_dim * item + self._converted_kv(size)

    def _converted_kv(self, size: StepSize) -> int:
        """Where torch stores keys and values in another format than the model's: copies in fp32 of
        what it rounds, and of what it gathers."""
        if not self.converted:
            return 0
        keys = max(size.max_model_len + self.block_size, GATHERED_KEYS)
        numbers = 2 * self.spec.num_kv_heads * self.spec.head_dim
        copies = size.max_num_batched_tokens * STORED_COPIES + keys * GATHERED_COPIES
        return 4 * numbers * copies

    def _masks(self, size: StepSize) -> int:
        """Masks of all prefilling sequences, per KV group; they live as long as the step."""
        if self.attention_backend in ("cpu", *TRITON_BACKENDS):
            return 0
        return self._pairs(size) * (1 + 1 + 4) * self.num_groups

    def _pairs(self, size: StepSize) -> int:
        """Most (query, key) pairs of a step."""
        return size.max_num_batched_tokens * size.max_model_len

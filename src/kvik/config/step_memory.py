"""Bytes of the tensors of one step, as upper bounds from their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kvik.config.adapter_memory import AdaptersFootprint
from kvik.config.units import MIB
from kvik.models.model_spec import ModelSpec
from kvik.spec.declare import RELU2, XIELU
from kvik.spec.kv import AUTO, COPIED, SCORES, IndexSpec, KVGroup, group_layers, stored_as
from kvik.spec.model import DTYPE_BYTES, LOGIT_BYTES, LinearLayers

# Limit of the memory that sampling takes in addition to the logits; a batch that needs more is
# sampled in parts. On a GPU each part costs about fifty launches, so the parts are larger.
SAMPLER_BYTES: Mapping[str, int] = {"cpu": 48 * MIB, "cuda": 512 * MIB}
# Bytes per logit when torch samples with all rules: probability, distance from the entropy, their
# order and two running sums, in double precision; and bytes of the copy that the rules change.
DRAW_BYTES, RULES_BYTES = 96, 4
# While logprobs of a prompt are read: rows of logits in memory, rows copied at a time, and bytes
# per logit of a copy and its comparisons.
PROMPT_ROWS, PROMPT_COPIED_ROWS, PROMPT_BYTES_PER_LOGIT = 32, 8, 24
# Tokens of a step in which a draft model computes skipped tokens.
CATCH_UP_TOKENS = 512
# Keys that the sdpa backend gathers for one batch of decoding rows.
GATHERED_KEYS = 16384
# fp32 copies of each number of K or V while torch rounds it for the cache or gathers it.
STORED_COPIES, GATHERED_COPIES = 6, 3
# Partial results of split contexts in the triton backend, which splits a batch that would need more
# (kernels/triton/attention_paged.py).
TRITON_WORKSPACE = 64 * MIB
# Triton's attention, and torch's for whole prompts, which are padded by fewer than PROMPT_PADDING
# tokens (attention/fresh_prompts.py); cuDNN's library and workspace (an estimate).
TRITON_SDPA = "triton+sdpa"
TRITON_BACKENDS = ("triton", TRITON_SDPA)
PROMPT_PADDING = 1024
CUDNN_BYTES = 256 * MIB
# Bytes per row of the lists that sort a step's rows by expert (csrc/experts.hpp,
# kernels/triton/expert_rows.py), and of the router's results.
EXPERT_ROW_BYTES = 24
# Keys of a split in the cpu backend, and requests of the longest context that decode together.
SPLIT_KEYS, LONG_CONTEXTS = 512, 8
# Numbers per key while layers with a budget select tokens: sums, means, their order, places.
CHOOSING_NUMBERS = 16
# Queries whose scores are kept at a time while an indexer chooses keys: those of a short step, and
# one of each thread, twice.
INDEX_ROWS = 3 * 64


@dataclass(frozen=True, slots=True)
class StepSize:
    """Sizes that bound the tensors of one step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_rows: int = 0  # drafts of a step, each a row of logits
    draft_tokens: int = 0  # of one request

    @property
    def of_draft_model(self) -> StepSize:
        """The largest step of a draft model next to this step of its target."""
        rows = max(1, min(self.max_num_seqs, self.max_draft_rows))
        tokens = max(rows, min(CATCH_UP_TOKENS, self.max_num_batched_tokens))
        return StepSize(self.max_model_len, rows, tokens)


def _chosen(top: int, keys: int, tokens: int) -> int:
    """Return the bytes of scores, and of the places of the keys that tokens read, on a GPU."""
    return 4 * (min(SCORES, tokens * keys) + tokens * (min(top, keys) + 1))


@dataclass(frozen=True)  # without slots, for cached properties
class StepFootprint:
    """Bytes of a step of one process as functions of its size, for one model in one dtype on one
    kind of device."""

    spec: ModelSpec
    dtype: str
    quantization: str
    device: str  # "cpu" or "cuda"
    attention_backend: str
    block_size: int
    kv_cache_dtype: str = AUTO  # see `EngineConfig.kv_cache_dtype`
    kv_cache_dtype_skip_layers: tuple[int, ...] = ()  # layers that keep the model's dtype
    kernels: str = "torch"  # "native", "triton" or "torch"
    mapped: int | None = None  # bytes of the mapped weights of an engine folder
    adapters: AdaptersFootprint | None = None  # from which requests choose

    @cached_property
    def groups(self) -> tuple[KVGroup, ...]:
        specs = self.spec.kv_specs(DTYPE_BYTES[self.dtype])
        return group_layers(stored_as(specs, self.kv_cache_dtype, self.kv_cache_dtype_skip_layers))

    @cached_property
    def _stored(self) -> list[LinearLayers]:
        """Linear layers that the checkpoint stores quantised."""
        return [like for like in self.spec.linear_layers if any(like.stored)]

    @property
    def _item(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def _most_keys(self) -> int | None:
        """Largest number of keys that a query sees if all layers have windows; otherwise None."""
        windows = [group.spec.window for group in self.groups]
        if not windows or None in windows:
            return None
        return max(window.max_keys for window in windows if window is not None)

    @property
    def _quantized(self) -> bool:
        """Whether any weights are quantised, by the engine or in the checkpoint."""
        return self.quantization != "none" or bool(self._stored) or self.mapped is not None

    @property
    def _taped(self) -> bool:
        """Whether a step runs as a tape of native kernels, without torch's."""
        unfused = self.adapters is not None and self.adapters.experts
        return self.attention_backend == "cpu" and not unfused

    @property
    def _captured_steps(self) -> bool:
        """Whether forwards are captured; other attention backends need the host in each step."""
        return self._on_device and not any(index.span for index in self._indexes)

    @property
    def _on_device(self) -> bool:
        """Whether attention reads the step's layout on the device."""
        return self.kernels == "triton" and self.attention_backend in TRITON_BACKENDS

    @property
    def _indexes(self) -> tuple[IndexSpec, ...]:
        return tuple(layer.index for layer in self.spec.layers if layer.index is not None)

    def step(self, size: StepSize) -> int:
        """Return the peak of one step in one process, without what drafts."""
        peak = self._tape(size) if self._taped else self._eager(size)
        peak += self._choosing(size) + self._indexing(size) + self._compressing(size)
        if self.adapters is not None:
            lists = size.max_num_batched_tokens * EXPERT_ROW_BYTES  # of rows by adapter
            peak += self.adapters.step(size.max_num_batched_tokens, self._item) + lists
        return peak

    def _choosing(self, size: StepSize) -> int:
        """Return the bytes while a layer with a budget selects tokens: all its keys of a request,
        and of each query head its weights, three times if processes exchange them, and the scores
        of one (attention/budget.py)."""
        largest = 0
        for group in self.groups:
            budget, heads = group.spec.budget, group.spec.num_kv_heads
            if budget is not None:
                weights = 3 * self.spec.num_heads + 2 * budget.last
                width = (heads + 1) * group.spec.head_dim + weights
                largest = max(largest, 4 * size.max_model_len * (width + CHOOSING_NUMBERS))
        return largest

    def _indexing(self, size: StepSize) -> int:
        """Return the bytes of what the indexer of a layer computes in a step, and of what it takes
        while it chooses keys. In a tape: a bit for each key of each token, or of each KV head, and
        the scores of some queries (csrc/indexer.hpp). On a GPU: rotated queries in fp32, scores,
        and places of keys (kernels/triton/indexer.py). Else: the keys of a request, as stored and
        in fp32, their products with one query, and the places of the chosen ones; and copies of
        their latent vectors, or keys and values (attention/indexed.py)."""
        top, item, keys = self.spec.indexed, self._item, size.max_model_len
        tokens, indexes = size.max_num_batched_tokens, self._indexes
        if not indexes:
            return 0
        lists = max(index.heads if index.span else 1 for index in indexes)  # of a token
        computed = max(index.heads * (index.dim + 1) + index.stored for index in indexes)
        total = tokens * computed * item
        if keys <= top:
            return total
        if self._taped:
            return total + lists * tokens * -(-keys // 8) + INDEX_ROWS * keys * 4
        if self._captured_steps:
            places = max(index.most for index in indexes)
            return total + 3 * tokens * computed * 4 + _chosen(places, keys, tokens)
        numbers = max(2 * index.stored + index.heads for index in indexes) + CHOOSING_NUMBERS
        total += keys * 4 * numbers
        width = self.spec.key_width * (1 if self.spec.latent else 2)
        copies = COPIED * (top + self.block_size) * width * (8 + 3 * item)
        return total + 8 * lists * top * tokens + copies

    def _compressing(self, size: StepSize) -> int:
        """Return the bytes that attention over entries takes in a layer in addition to other
        attention (attention/compressed.py): what entries are made of, and queries of the indexer.
        Native kernels also take a bit for each entry of each token, and the scores of some queries;
        Triton's a copy of what is stored, scores, and places of entries; torch copies of what
        entries are made of, queries and results in fp32, the places of all tokens, and keys of the
        indexer, and entries, in fp32."""
        largest, keys, tokens = 0, size.max_model_len, size.max_num_batched_tokens
        dim, native = self.spec.head_dim, self.attention_backend == "cpu"
        for of in {layer.compressed for layer in self.spec.layers if layer.compressed}:
            index, entries, inputs = of.index, keys // (of.every or 1), of.inputs(dim)
            queries = index.heads * (index.dim + 1) if index else 0
            total = tokens * (2 * inputs + queries) * self._item
            if native:
                total += tokens * -(-entries // 8) + INDEX_ROWS * entries * 4 if index else 0
            elif self._on_device:
                total += tokens * (dim + inputs) * self._item
                total += _chosen(index.top, entries, tokens) if index else 0
            else:
                total += tokens * 4 * (6 * self.spec.query_width + dim + 8 * inputs) + keys * 8 * 4
                if of.every:
                    of_index = (index.dim + index.heads) * (4 + self._item) if index else 0
                    read = min(entries, index.top) if index else entries
                    total += entries * (of_index + CHOOSING_NUMBERS * 4) + read * dim * 3 * 4
            largest = max(largest, total)
        return largest

    def _keys(self, size: StepSize) -> int:
        """Largest number of keys that the queries of a sequence read in a step."""
        if self._most_keys is None:
            return size.max_model_len
        return min(size.max_model_len, self._most_keys + size.max_num_batched_tokens)

    @property
    def _qkv(self) -> int:
        return self.spec.query_width + 2 * self.spec.key_width

    def _tape(self, size: StepSize) -> int:
        """Return the permanent buffers of a tape and the scratch of its kernels. In a layer there
        are copies of the residual stream (`_stream_width`), Q, K and V (twice if
        they are normalised, but then they replace others), the output of attention, and the inner
        activations, before and after xIELU. Kernels copy the inputs of a product."""
        spec, tokens = self.spec, size.max_num_batched_tokens
        widths = self._stream_width + self._qkv + spec.query_width + spec.inner_width
        widths += max(0, spec.state_width - self._qkv - spec.query_width)
        widths += spec.inner_width if spec.activation == XIELU else 0
        sparse = any(layer.sparsity for layer in spec.layers)
        if sparse or (spec.gated_mlp and spec.activation == RELU2):  # gate, up and their product
            widths += 2 * spec.inner_width
        widths += 5 * spec.limited_width  # gate and up, both with limits, and one before
        normalised = self._qkv
        rotation = 4 * sum(rope.of_token * width for rope, width in spec.rotations)
        buffers = tokens * ((widths + normalised) * self._item + rotation)
        experts = spec.experts_of_token  # each has a copy of a token's inputs
        inputs = max(spec.hidden_size * max(1, experts), spec.query_width, spec.inner_width)
        rounded = self.quantization in ("int8", "int4", "mxfp4")  # to a byte, and scales of groups
        copied = tokens * (inputs + inputs // 4 if rounded else inputs * self._item)
        copied += experts * tokens * EXPERT_ROW_BYTES
        return buffers + copied + self._attention_scratch(size) + self._logits(size)

    def _eager(self, size: StepSize) -> int:
        """Return the residual stream, plus the peak of a layer or the sampler, whichever is larger.
        Operations compute in fp32."""
        widest = max(self._widest(size), self._logits(size))
        return self._stream(size) + widest + self._masks(size)

    def _stream(self, size: StepSize) -> int:
        """Return the residual stream and its copies."""
        return size.max_num_batched_tokens * self._stream_width * self._item

    @property
    def _stream_width(self) -> int:
        """Numbers of a token in the residual stream before a layer, normalised, and after it; in
        several streams, while they are made, predicted, corrected and added up; in the output of
        experts that is a shortcut past a layer; and in the inputs that layers read of the token
        alone, while they are computed."""
        several = 7 * self.spec.residual_width if self.spec.streams else 0
        inputs = 5 * sum(layer.token_input for layer in self.spec.layers)
        kept = 4 if any(layer.shortcut for layer in self.spec.layers) else 3
        return kept * self.spec.hidden_size + several + inputs

    def _widest(self, size: StepSize) -> int:
        spec, item, tokens = self.spec, self._item, size.max_num_batched_tokens
        queries, keys = spec.query_width, spec.key_width
        norm = tokens * spec.hidden_size * 16
        qkv = tokens * self._qkv * item
        rotary = qkv + tokens * ((queries + keys) * item + queries * 16)
        attended = qkv + tokens * (3 * queries + keys) * item + self._attention_scratch(size)
        # Triton's kernels make no copies in fp32. For floats they remain as a margin: an 8B model
        # used all but 5 % of what was planned (docs/performance-gpu.md).
        copies = 0 if self._quantized and self.kernels == "triton" else 20
        mlp = tokens * spec.inner_width * (3 * item + copies)
        # inner activations of each expert, and its inputs and outputs for a token
        routed = tokens * spec.experts_of_token * (2 * spec.hidden_size * item + EXPERT_ROW_BYTES)
        routed += tokens * spec.inner_width * 2 * item
        states = tokens * spec.state_width * (item + 4)
        return max(norm, rotary, attended, mlp, routed, states, self._quantized_product(size))

    def _logits(self, size: StepSize) -> int:
        """Logits of the rows that sample, and the larger of sampling and of reading logprobs of a
        prompt."""
        if self.spec.encoder:
            return 0
        vocab, tokens = self.spec.vocab_size, size.max_num_batched_tokens
        rows = min(size.max_num_seqs + size.max_draft_rows, tokens)
        row = vocab * (DRAW_BYTES + RULES_BYTES)
        at_once = max(row, min(rows * row, SAMPLER_BYTES[self.device]))
        prompt_rows, copied = min(PROMPT_ROWS, tokens), min(PROMPT_COPIED_ROWS, tokens)
        prompt = vocab * (prompt_rows * LOGIT_BYTES + copied * PROMPT_BYTES_PER_LOGIT)
        return rows * vocab * LOGIT_BYTES + max(at_once, prompt)

    def _quantized_product(self, size: StepSize) -> int:
        """Return x and its rounded copy, and y before and after its activation, if weights are
        quantised; in fp32, except with Triton's kernels."""
        if not self._quantized:
            return 0
        spec, item = self.spec, self._item
        inputs = max(spec.hidden_size, spec.query_width, spec.inner_width)
        outputs = max(spec.hidden_size, self._qkv, 3 * spec.inner_width)
        if self.kernels == "triton":
            return size.max_num_batched_tokens * (2 * inputs + outputs) * item
        return size.max_num_batched_tokens * (8 * inputs + (4 + item) * outputs)

    def _attention_scratch(self, size: StepSize) -> int:
        """K and V gathered from the cache in one layer, and scores if they are materialised."""
        spec, item = self.spec, self._item
        if self.attention_backend == "reference":
            # fp32 copies for every query head and the gathered ones; scores, masked, softmax
            gathered = 2 * self._keys(size) * spec.query_width * (4 + 4 + item)
            scores = self._pairs(size) * (3 * spec.num_heads * 4)
            return gathered + scores + self._converted_kv(size)
        if self.attention_backend == "triton":
            return TRITON_WORKSPACE
        if self.attention_backend == TRITON_SDPA:  # copies of q, k and v, and the output
            width = 2 * (spec.query_width + spec.key_width)
            if spec.latent is not None:  # keys and values of all heads, and widened ones
                head_width = spec.latent.query + max(spec.latent.query, spec.latent.value)
                width = spec.num_heads * (3 * head_width + spec.latent.nope + spec.latent.value)
            copies = (size.max_num_batched_tokens + PROMPT_PADDING) * width * item
            return TRITON_WORKSPACE + CUDNN_BYTES + copies
        if self.attention_backend == "cpu":  # partial results of the splits of long contexts
            splits = size.max_num_seqs + LONG_CONTEXTS * -(-self._keys(size) // SPLIT_KEYS)
            return splits * (spec.query_width + 32 * spec.num_heads) * 5
        keys = max(self._keys(size) + self.block_size, GATHERED_KEYS)
        width = spec.key_width + (spec.query_width if self.device == "cuda" else 0)
        biases = 0
        if any(layer.distances for layer in spec.layers):  # in fp32, rounded and masked
            biases = spec.num_heads * self._keys(size) ** 2 * (4 + 2 * item)
        return 2 * keys * width * item + self._converted_kv(size) + biases

    def _converted_kv(self, size: StepSize) -> int:
        """Return the fp32 copies that torch makes to round for the cache and to gather from it, if
        its format is not the model's."""
        if self.kv_cache_dtype == AUTO:
            return 0
        keys = max(self._keys(size) + self.block_size, GATHERED_KEYS)
        numbers = 2 * self.spec.key_width
        copies = size.max_num_batched_tokens * STORED_COPIES + keys * GATHERED_COPIES
        return 4 * numbers * copies

    def _masks(self, size: StepSize) -> int:
        """Masks of all prefilling sequences, per KV group, which live as long as the step."""
        if self.attention_backend in ("cpu", *TRITON_BACKENDS):
            return 0
        return self._pairs(size) * (1 + 1 + 4) * len(self.groups)

    def _pairs(self, size: StepSize) -> int:
        """Largest number of (query, key) pairs of a step."""
        return size.max_num_batched_tokens * self._keys(size)

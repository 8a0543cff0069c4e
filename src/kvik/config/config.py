"""What the user asked for (`EngineConfig`) and what was decided (`ResolvedConfig`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvik.config.graph_sizes import GraphSize
from kvik.config.kv_spec import AUTO, KVGroup
from kvik.config.model_spec import ModelSpec
from kvik.config.speculative import ResolvedSpeculation


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Wishes of the user. None (or "auto") lets `resolve` decide and say why.

    Attributes:
        model: folder in Hugging Face format, GGUF file, hub id, or "" for the bundled model.
        dtype: "auto", "float32", "bfloat16" or "float16".
        quantization: of the weights as they are loaded: "none" (as stored), "int8" (activations
            too), "int8-weight-only", "int4" or "fp8".
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_model_len: longest prompt + output of a request, in tokens.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: token budget of one step.
        block_size: tokens per KV block.
        num_blocks: KV blocks; None: as many as memory and use allow.
        memory_utilization: share of the memory limit the engine may plan with, in [0.01, 1].
        kv_cache_memory: bytes for the KV cache; None: planned.
        graph_memory: bytes for CUDA graphs, which replay what a step computes; 0: steps are not
            captured; None: planned, and none where no request would fit beside them.
        kv_cache_dtype: of keys and values: "auto" (the model's dtype), "fp32", "bf16", "fp16",
            "fp8", "int8" or "int4"; "fp8_e4m3" and "bfloat16" are other names of two of them.
        kv_cache_dtype_skip_layers: layers, counted from 0, that keep the model's dtype.
        enable_prefix_caching: keep full blocks of finished requests for equal prefixes.
        policy: who is served first: "fcfs", "priority" (smaller `priority` of a request first; the
            other policies do not read it), "shortest-prefill-first", "longest-prefix-match",
            "static" or "dynamic".
        batch_size: requests per batch of the static and dynamic policies.
        max_wait: seconds the dynamic policy waits for a batch to fill.
        ageing: seconds of waiting that weigh as much as one level of priority ("priority"), as a
            thousand tokens ("shortest-prefill-first"), as any match ("longest-prefix-match").
        max_queued_requests, max_queued_tokens: waiting work beyond which requests are refused.
        kernels: "auto", "native" (C++, on a CPU), "triton" (on a GPU) or "torch".
        attention_backend: "auto", "cpu" (of the native kernels), "triton", "triton+sdpa" (torch's
            for long prompts), "sdpa" or "reference".
        threads: CPU threads; None: the cores this process may use.
        load_format: "safetensors", or "random" for weights drawn from `seed`, or from 0 without it
            (for benchmarks).
        seed: what requests that bring no seed draw from; None: drawn at each start, and shown among
            the decisions, so that a run can be repeated with it.
        speculative_config: speculative decoding as one JSON object, such as {"method": "ngram",
            "num_speculative_tokens": 8}; its keys are the fields of `SpeculativeConfig`. Output
            keeps its distribution, unless "typical_acceptance": true gives that up for speed.
        spec_method: what guesses tokens ahead: "draft_model", "ngram", "suffix", "medusa", "eagle"
            or "off".
        spec_model: folder, GGUF file or hub id of the draft model, or folder of the heads.
        spec_tokens: most tokens guessed for a request in one step.
    """

    model: str = ""
    dtype: str = "auto"
    quantization: str = "none"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    graph_memory: int | None = None
    kv_cache_dtype: str = AUTO
    kv_cache_dtype_skip_layers: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    batch_size: int = 8
    max_wait: float = 0.05
    ageing: float = 10.0
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_194_304
    kernels: str = "auto"
    attention_backend: str = "auto"
    threads: int | None = None
    load_format: str = "safetensors"
    seed: int | None = None
    speculative_config: Mapping[str, object] | None = None
    spec_method: str | None = None
    spec_model: str | None = None
    spec_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: one pool of blocks shared by all groups. Block 0 is never handed out.

    `pinned_share`: of the blocks, may be pinned by all tenants together; `tenant_pinned_share`: by
    one of them.
    """

    block_size: int
    num_blocks: int
    groups: tuple[KVGroup, ...]
    enable_prefix_caching: bool = True
    pinned_share: float = 0.75
    tenant_pinned_share: float = 0.5


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`num_lookahead_tokens`: places in the KV cache that a decoding request is given beyond its
    step, where there are blocks to spare."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    batch_size: int = 8
    max_wait: float = 0.05
    ageing: float = 10.0
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_194_304
    num_lookahead_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What the compute trunk needs to know. `torch_prompts`: from how many tokens on fresh prompts
    are torch's beside Triton's attention; None: they are not. `seed`: of random weights."""

    model_path: str
    dtype: str
    device: str
    attention_backend: str
    threads: int
    torch_prompts: int | None = None
    kernels: str = "torch"
    load_format: str = "safetensors"
    quantization: str = "none"
    seed: int = 0
    graph_sizes: tuple[GraphSize, ...] = ()  # of forwards that may be captured on a GPU
    draft_graph_sizes: tuple[GraphSize, ...] = ()  # of the draft model's, or the heads'
    graph_memory: int = 0  # bytes that all of them together may take


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of what was decided: `name` = `value`, because `reason`."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part; `total` never exceeds `limit`."""

    limit: int  # what the engine may use
    weights: int
    activations: int  # peak of one step
    kv_cache: int
    overhead: int  # runtime, tables

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.kv_cache + self.overhead


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    model: ModelSpec
    cache: CacheConfig
    scheduler: SchedulerConfig
    runner: RunnerConfig
    memory: MemoryPlan
    seed: int
    decisions: tuple[Decision, ...]
    speculation: ResolvedSpeculation | None = None  # None: off

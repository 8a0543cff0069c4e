"""Options of the engine (`EngineConfig`) and the decisions (`ResolvedConfig`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from kvik.config.graph_sizes import GraphSize
from kvik.config.memory import MemoryPlan
from kvik.config.speculative import (
    MAX_DRAFT_TOKENS,
    METHODS,
    ResolvedSpeculation,
    SpeculativeConfig,
    merge_speculation,
)
from kvik.core.config import POLICIES, CacheConfig, SchedulerConfig
from kvik.errors import ConfigError, shown
from kvik.models.model_spec import ModelSpec
from kvik.options import (
    TAKES_SEVERAL,
    Flag,
    Integer,
    Integers,
    JsonObject,
    Kind,
    Number,
    OneOf,
    Text,
    TextList,
    bad_value,
    normalised,
    option,
)
from kvik.spec.adapters import ADAPTER_NAME, ADAPTER_RANK, MAX_ADAPTERS, Adapter
from kvik.spec.fields import MAX_LAYERS
from kvik.spec.kv import AUTO, KV_FORMATS, SYNONYMS
from kvik.spec.rope import MAX_POSITIONS
from kvik.spec.shares import MAX_RANKS, MAX_REPLICAS, MAX_STAGES, PipelineStage
from kvik.spec.stored_weights import METHODS as STORED_METHODS
from kvik.spec.weights import SCHEMES

EXAMPLE = "memory:4GiB,disk:/var/cache/kvik:200GiB"
MAX_BYTES = 1 << 50
_UNITS = {"": 0, "KIB": 10, "K": 10, "MIB": 20, "M": 20, "GIB": 30, "G": 30, "TIB": 40, "T": 40}


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Requested tiers of the KV cache."""

    memory: int = 0  # bytes of the memory tier; 0: none
    disk: int = 0  # bytes of the disk tier; 0: none
    folder: str | None = None  # folder of the disk tier
    peers: bool = False  # whether pages are fetched from other engines
    lends: bool = False  # whether other engines may fetch pages


@dataclass(frozen=True)
class Tiers(Kind):
    """Tiers, each with its size, such as `EXAMPLE`."""

    expects = f"tiers such as {EXAMPLE}"
    metavar = "TIERS"

    def parse(self, text: str) -> str:
        return text

    def checked(self, value: object) -> str:
        if not isinstance(value, str):
            raise bad_value(f"such as {EXAMPLE}", value)
        read_tiers(value)
        return value


def read_tiers(text: str) -> TierOptions:
    """Read the option.

    Raises:
        ValueError: the text is invalid; the message says what is allowed.
    """
    memory, disk, folder = 0, 0, None
    for part in text.split(","):
        kind, _, rest = part.strip().partition(":")
        if "\0" in part:
            raise _bad("a path must not contain NUL")
        if kind == "memory" and not memory:
            memory = _bytes(rest, part)
        elif kind == "disk" and not disk:
            folder, _, size = rest.rpartition(":")
            if not folder:
                raise _bad(f"{shown(part.strip())} lacks its folder or its size")
            disk = _bytes(size, part)
        elif kind in ("memory", "disk"):
            raise _bad(f"{kind} is given twice")
        else:
            raise _bad(f"{shown(kind)} is not a tier (known: memory, disk)")
    return TierOptions(memory, disk, folder)


def _bytes(text: str, part: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise _bad(f"{shown(text)} of {shown(part.strip())} is not a size (such as 512MiB or 4GiB)")
    size = int(float(match[1]) * (1 << unit))
    if not 0 < size <= MAX_BYTES:
        raise _bad(f"the size of {shown(part.strip())} must be from 1 byte to 1024 TiB")
    return size


def _bad(problem: str) -> ValueError:
    return ValueError(f"must be such as {EXAMPLE}: {problem}")


@dataclass(frozen=True)
class NamedFolders(Kind):
    """Folders, each after a name; also given as a mapping."""

    metavar = "NAME=DIR"
    repeats = True

    def checked(self, value: object) -> tuple[object, ...]:
        if isinstance(value, Mapping):
            value = tuple(f"{name}={os.fspath(folder)}" for name, folder in value.items())
        entries = TextList(Text(self.metavar, rf"{ADAPTER_NAME}=[^\0]+")).checked(value)
        names = {str(entry).partition("=")[0] for entry in entries}
        if len(names) < len(entries) or len(names) > MAX_ADAPTERS:
            raise ValueError(f"must be at most {MAX_ADAPTERS} folders with different names")
        return entries


ROLES = ("both", "prefill", "decode")
LISTEN = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine options of the user. None (or "auto") lets `resolve` decide and give the reason."""

    model: str = option(
        "",
        Text("a folder or a hub id"),
        "folder in Hugging Face format, GGUF file, hub id (OWNER/NAME:TYPE for a GGUF file), or "
        '"" for the bundled model',
    )
    revision: str | None = option(
        None,
        Text("a branch, tag or commit", r"[^\0]+", "REV"),
        "branch, tag or commit of a model on the hub; None: its main branch",
    )
    lora: str | None = option(
        None,
        Text("a folder or a hub id", r"[^\0]+", "DIR"),
        "folder or hub id of a LoRA adapter, as PEFT writes it; it is merged into the weights at "
        "load",
    )
    adapters: tuple[str, ...] = option(
        (),
        NamedFolders(),
        "LoRA adapters from which each request chooses, by the name that it gives as its model",
        {TAKES_SEVERAL: True},
    )
    max_adapters: int | None = option(
        None,
        Integer(1, MAX_ADAPTERS),
        "most adapters that are loaded at once, at least those of `adapters`; others can be loaded "
        "while the engine runs; None: the number of `adapters`",
    )
    max_adapter_rank: int | None = option(
        None,
        Integer(1, 1024),
        "largest rank of an adapter, for which memory is reserved in each layer except experts; "
        f"None: {ADAPTER_RANK} with max_adapters, else the largest rank of `adapters`",
    )
    chat_template: str | None = option(
        None,
        Text("a file", r"[^\0]+", "FILE"),
        "Jinja file with the chat template, in place of the model's own",
    )
    engine_cache: str | None = option(
        None,
        Text("a folder", r"[^\0]+", "DIR"),
        "folder that caches loaded weights in their memory layout, so that the next start maps "
        "them; an entry that does not match is rebuilt; None: weights are loaded every time",
    )
    dtype: str = option(
        "auto",
        OneOf(("auto", "float32", "bfloat16", "float16"), {"half": "float16", "float": "float32"}),
        "dtype of activations and of weights that are not quantised",
    )
    quantization: str = option(
        "none",
        OneOf((*SCHEMES, *(method for method in STORED_METHODS if method not in SCHEMES))),
        "rounding of the weights at load; none: as stored; int8: activations too; a stored format "
        "(awq, gptq, ...): checks that the files have it",
    )
    device: str = option(
        "auto",
        Text("auto, cpu, cuda or cuda:N", r"auto|cpu|cuda(:\d{1,3})?"),
        "auto, cpu, cuda or cuda:N",
    )
    max_model_len: int | None = option(
        None,
        Integer(1, 1 << 24),
        "longest prompt + output of a request, in tokens; None: the model's context, or less if "
        "memory is short",
    )
    window: int | None = option(
        None,
        Integer(1, MAX_POSITIONS),
        "number of most recent tokens that a token sees, including itself; with attention_sinks, "
        "generation is unbounded; None: all, or as the model defines",
    )
    attention_sinks: int = option(
        0,
        Integer(0, MAX_POSITIONS),
        "first tokens that a token sees in addition to the window; 4 are enough; 0: a plain "
        "window, beyond which most models fail",
    )
    kv_budget: str | None = option(
        None,
        Text("a file", r"[^\0]+", "FILE"),
        "file saved by kvik kv-budget with the number of tokens of a request that each layer "
        "keeps, which changes answers; None: all",
    )
    max_num_seqs: int | None = option(
        None, Integer(1, 65_536), "requests that run at the same time; None: planned"
    )
    max_num_batched_tokens: int | None = option(
        None, Integer(1, 1 << 20), "token budget of one step; None: planned"
    )
    block_size: int = option(16, Integer(1, 1024), "tokens per KV block")
    num_blocks: int | None = option(
        None,
        Integer(1, (1 << 31) - 2),  # ids are int32, from 1
        "KV blocks that requests can use; None: as many as memory and use allow",
    )
    memory_utilization: float = option(
        0.9, Number(0.01, 1), "share of the memory limit that the engine may use"
    )
    kv_cache_memory: int | None = option(
        None,
        Integer(1, 1 << 50),
        "bytes for the KV cache; None: planned, at most what max_num_seqs requests can use",
    )
    graph_memory: int | None = option(
        None,
        Integer(0, 1 << 50),
        "bytes for CUDA graphs, which replay captured steps; 0: steps are not captured; "
        "None: planned, and none if no request would fit next to them",
    )
    kv_cache_dtype: str = option(
        AUTO,
        OneOf(
            (AUTO, *KV_FORMATS),
            SYNONYMS,
            {
                "fp8_e5m2": "must be fp8 (E4M3) or int8, not fp8_e5m2: with a scale for each "
                "vector, its larger range has no use, and its numbers have one bit less"
            },
        ),
        "format of the keys and values in the cache; auto: the model's dtype",
    )
    kv_cache_dtype_skip_layers: tuple[int, ...] = option(
        (),
        Integers(Integer(0, MAX_LAYERS - 1), "layers"),
        "layers, counted from 0, that keep the model's dtype",
    )
    kv_tiers: str | None = option(
        None,
        Tiers(),
        "tiers that keep evicted KV blocks, such as memory:4GiB,disk:DIR:200GiB; None: "
        "evicted blocks are computed again",
    )
    role: str = option(
        "both",
        OneOf(ROLES),
        "what a server does; prefill: computes prompts for servers with the role decode, which "
        "fetch the KV blocks; both: computes and decodes its own requests",
    )
    kv_listen: str = option(
        "127.0.0.1",
        Text(
            "an address of this machine, such as 10.0.0.1 or 10.0.0.1:9000", LISTEN, "HOST[:PORT]"
        ),
        "address at which other engines fetch KV blocks; a free port unless given",
    )
    enable_prefix_caching: bool = option(
        True, Flag(), "keep full blocks of finished requests for equal prefixes"
    )
    policy: str = option(
        "fcfs",
        OneOf(POLICIES, {"continuous": "fcfs"}),
        "which waiting request is served first; priority: the one with the smallest `priority`",
    )
    batch_size: int | None = option(
        None,
        Integer(1, 65_536),
        "requests per batch of the static and dynamic policies; None: 8, or fewer if a step has "
        "room for fewer",
    )
    max_wait: float | None = option(
        None,
        Number(0, 3600),
        "seconds that a batch of the static and dynamic policies waits to fill, if more requests "
        "may come; default: static 5, dynamic 0.05; 0 with static: until it is full",
    )
    ageing: float = option(
        10.0,
        Number(0.001, 1e9),
        'seconds of waiting that weigh as much as one level of priority ("priority"), as a '
        'thousand tokens ("shortest-prefill-first"), as any match ("longest-prefix-match")',
    )
    max_queued_requests: int = option(
        4096, Integer(1, 1 << 31), "waiting requests beyond which requests are refused"
    )
    max_queued_tokens: int = option(
        4_194_304,
        Integer(1, 1 << 40),
        "tokens of waiting requests beyond which requests are refused",
    )
    kernels: str = option(
        "auto",
        OneOf(("auto", "native", "triton", "torch")),
        "kernels that compute; native: C++, on a CPU; triton: on a GPU; torch: torch's own",
    )
    attention_backend: str = option(
        "auto",
        OneOf(("auto", "cpu", "triton", "triton+sdpa", "sdpa", "reference")),
        "kernels of attention; cpu: the native ones; triton+sdpa: Triton's, and torch's for long "
        "prompts",
    )
    threads: int | None = option(
        None, Integer(1, 1024), "CPU threads; None: the cores this process may use"
    )
    tensor_parallel_size: int = option(
        1,
        Integer(1, MAX_RANKS),
        "processes among which matrices and heads are divided; they share the threads",
    )
    pipeline_parallel_size: int = option(
        1,
        Integer(1, MAX_STAGES),
        "stages among which layers are divided, each of tensor_parallel_size processes",
    )
    data_parallel_size: int = option(
        1,
        Integer(1, MAX_REPLICAS),
        "engines of a server, each with the whole model, in separate processes; on a CPU they "
        "divide threads and memory, on GPUs each has its own",
    )
    expert_parallel: bool = option(
        False,
        Flag(),
        "give each process of tensor_parallel_size some whole experts, not a part of each",
    )
    tensor_parallel_cut: str = option(
        "auto",
        OneOf(("auto", "exact", "fast")),
        "how matrices are divided; exact: by outputs, so that no sum is divided; fast: with half "
        "the exchanges, the default on GPUs",
    )
    distributed_executor_backend: str = option(
        "mp",
        OneOf(("mp", "ray")),
        "where stages run: mp: on this machine; ray: on machines of a Ray cluster, except the last "
        "one",
    )
    load_format: str = option(
        "safetensors",
        OneOf(("safetensors", "random"), {"auto": "safetensors", "dummy": "random"}),
        "where weights come from; random: drawn from `seed`, or from 0 without it, for benchmarks",
    )
    fallback: str = option(
        "none",
        OneOf(("none", "transformers")),
        "what runs a model that kvik does not implement; transformers: that library, slowly",
    )
    seed: int | None = option(
        None,
        Integer(-(1 << 63), (1 << 63) - 1),
        "seed of requests without one; None: random at each start, and shown among the "
        "decisions, so that a run can be repeated with it",
    )
    speculative_config: Mapping[str, object] | None = option(
        None,
        JsonObject("{'method': 'ngram'}"),
        'speculative decoding as one JSON object, such as {"method": "ngram", '
        '"num_speculative_tokens": 8}; docs/speculation.md lists its keys. Output '
        'keeps its distribution, unless "typical_acceptance": true gives that up for speed',
    )
    spec_method: str | None = option(None, OneOf(METHODS), "method that drafts tokens")
    spec_model: str | None = option(
        None,
        Text("a folder or a hub id"),
        "folder, GGUF file or hub id of the draft model, or folder of the heads",
    )
    spec_tokens: int | None = option(
        None,
        Integer(1, MAX_DRAFT_TOKENS),
        "most drafts of a request in one step; None: depends on the method",
    )


def batch_size(config: EngineConfig) -> int:
    """Return the number of requests in a batch of the static and dynamic policies."""
    return config.batch_size or min(8, config.max_num_seqs or 8, config.max_num_batched_tokens or 8)


def check_config(config: EngineConfig) -> EngineConfig:
    """Check the options that need neither the model nor the machine.

    Returns:
        The same options, with one name for each format.

    Raises:
        ConfigError: one is out of range, or contradicts another.
    """
    config = replace(config, **normalised(config, ConfigError))
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is not None and tokens is not None and seqs > tokens:
        text = f"must be at most max_num_batched_tokens ({tokens}), not {seqs}"
        raise ConfigError("max_num_seqs", f"{text}: a step decodes a token of each request")
    batch = batch_size(config)
    if config.policy in ("static", "dynamic") and tokens is not None and batch > tokens:
        text = f"must be at most max_num_batched_tokens ({tokens}), not {batch}"
        raise ConfigError("batch_size", text)
    requested_speculation(config)
    if config.attention_sinks and config.window is None:
        raise ConfigError(
            "attention_sinks", f"must be 0 without a window, not {config.attention_sinks}"
        )
    if config.kv_budget is not None and config.window is not None:
        raise ConfigError("window", "must be left out with kv_budget")
    if config.num_blocks is not None and config.kv_cache_memory is not None:
        raise ConfigError("kv_cache_memory", "must be left out when num_blocks is given")
    return config


def requested_speculation(config: EngineConfig) -> SpeculativeConfig | None:
    """Return the requested speculative decoding; None if it is off. Raises ConfigError if the
    request is impossible."""
    return merge_speculation(
        config.speculative_config, config.spec_method, config.spec_model, config.spec_tokens
    )


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Settings of the compute trunk."""

    model_path: str
    dtype: str
    device: str
    attention_backend: str
    threads: int
    # Whether the native kernels use fewer threads while other processes keep the cores busy.
    adapt_threads: bool = False
    # CPU time in cores to spread evenly over the steps; None: no quota.
    cpu_quota: float | None = None
    # Length from which torch's attention, not Triton's, computes fresh prompts; None: never.
    torch_prompts: int | None = None
    kernels: str = "torch"
    load_format: str = "safetensors"
    quantization: str = "none"
    seed: int = 0  # seed of random weights
    lora: str | None = None  # folder of an adapter that is merged; None: there is none
    adapters: tuple[Adapter, ...] = ()  # from which requests choose, each in the slot of its index
    max_adapters: int = 0  # number of slots
    # Of each slot, by names of layers from their block on.
    adapter_ranks: dict[str, int] = field(default_factory=dict)
    graph_sizes: tuple[GraphSize, ...] = ()  # sizes of forwards that may be captured on a GPU
    draft_graph_sizes: tuple[GraphSize, ...] = ()  # the same for the draft model or the draft heads
    graph_memory: int = 0  # bytes that all captured forwards together may take
    engine_cache: str | None = None
    kv_folder: str | None = None  # folder of the disk tier; None: there is none
    kv_listen: str | None = None  # address at which other engines fetch pages; None: they cannot
    ranks: int = 1  # processes that compute layers together, with `threads` each
    stage_ends: tuple[int, ...] = ()  # end of the layers of each stage; () for a single stage
    backend: str = "mp"  # see `distributed_executor_backend`
    expert_parallel: bool = False  # see `EngineConfig`
    fast_cut: bool = False  # see `tensor_parallel_cut`
    replicas: int = 1  # number of engines with these settings in a server
    role: str = "both"  # see `EngineConfig`

    def device_of(self, process: int) -> str:
        """Return the device of a process: consecutive GPUs, one for each process."""
        kind, _, index = self.device.partition(":")
        return f"{kind}:{int(index) + process}" if index else kind

    def of_stage(self, stage: PipelineStage) -> RunnerConfig:
        """Return the settings of a stage. The last one has the first GPUs, as it is the engine's
        process, and each other stage of this machine the next ones. Ray gives GPUs to stages on
        other machines."""
        kind, _, index = self.device.partition(":")
        device = self.device_of((stage.number + 1) % stage.count * self.ranks)
        if index and self.backend == "ray":
            device = f"{kind}:0"
        return replace(self, device=device)

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages among which layers are divided; () for a single stage."""
        return PipelineStage.all_of(self.stage_ends)


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision: `name` = `value`, because `reason`."""

    name: str
    value: str
    reason: str


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
    chat_template: str | None = None  # a file; None: the model's own

    def with_adapters(self, adapters: tuple[Adapter, ...]) -> ResolvedConfig:
        """Return the same with other adapters from which requests choose."""
        return replace(self, runner=replace(self.runner, adapters=adapters))

    def adapter_digest(self, name: str) -> str:
        """Return the digest of the adapter that a new request with this name gets; "": none."""
        digests = {adapter.name: adapter.digest for adapter in self.runner.adapters}
        return digests.get(name, "")

    @property
    def state_rows(self) -> int:
        """Rows of the state pool: running requests first, then checkpoints."""
        return self.scheduler.max_num_seqs + (self.cache.checkpoints or 0)


ASKED = "as asked"

_T = TypeVar("_T")


class Notes:
    """Decisions in the order they were made.

    `settled` has the reasons of decisions that were already fixed.
    """

    def __init__(self, settled: Mapping[str, str] = MappingProxyType({})) -> None:
        self.decisions: list[Decision] = []
        self._settled = settled

    def add(self, name: str, value: _T, reason: str) -> _T:
        self.decisions.append(Decision(name, str(value), self._settled.get(name, reason)))
        return value

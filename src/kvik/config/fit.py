"""Sizes that fit into memory: requests, tokens and drafts of a step, the longest request, blocks of
the KV cache; and the error if nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvik.config.adapter_memory import AdaptersFootprint
from kvik.config.compute import LANES, MAX_HEAD_DIM, TRANSFORMERS, Compute, check_draft
from kvik.config.config import ASKED, EngineConfig, Notes, batch_size, requested_speculation
from kvik.config.draft_heads import HeadsFootprint
from kvik.config.hardware import Hardware
from kvik.config.memory import (
    CUDA_BUILD_BYTES,
    RUNTIME_BYTES,
    THREAD_BYTES,
    TRANSFORMERS_BYTES,
    Footprint,
    Limit,
)
from kvik.config.speculative import (
    CACHING_METHODS,
    DEFAULT_TOKENS,
    DIVIDED_METHODS,
    OFF,
    DraftSource,
    ResolvedSpeculation,
    SpeculativeConfig,
    Typical,
)
from kvik.config.step_memory import TRITON_BACKENDS, StepSize
from kvik.config.units import GIB, show_bytes
from kvik.errors import CapacityError, ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.spec.adapters import ADAPTER_RANK, Adapter
from kvik.spec.experts import MAX_EXPERTS
from kvik.spec.kv import AUTO, KVGroup
from kvik.spec.visible_keys import ALL_KEYS

MAX_NUM_SEQS = 256
CPU_BUDGET, GPU_BUDGET = 2048, 8192  # tokens of a step; larger steps are bound by arithmetic
CHUNKS_EACH = 2  # steps per stage into which a pipeline divides these tokens
MIN_BUDGET = 64  # smallest useful number of tokens in a step
MIN_CONTEXT = 256  # shortest useful context
STREAMED_CONTEXT = 1 << 20  # longest request with a window, which the model does not limit
# On a CPU, where other programs need memory too, the KV cache takes by default at most this share
# of the memory left, and at most this multiple of the weights.
CPU_KV_SHARE = 0.5
CPU_KV_PER_WEIGHTS, CPU_KV_FLOOR = 2, GIB
# Drafts of a step beyond which it is bound by arithmetic, so that a rejected draft costs as much as
# an accepted one gains. Each is a row of logits.
MAX_DRAFT_ROWS: Mapping[str, int] = {"cpu": 128, "cuda": 512}
FEWER_BITS = ("int8", "int4")
NO_GRAPHS = "no request would fit into memory beside them; decoding takes longer"


@dataclass(frozen=True, slots=True)
class Fit:
    """Fits an engine into memory."""

    config: EngineConfig  # the options
    footprint: Footprint  # the engine's memory
    limit: Limit

    def decide(self, notes: Notes) -> tuple[Footprint, StepSize, int]:
        """Choose the largest step that fits, its longest request, and the blocks of the KV cache.

        Returns:
            The footprint, without captured steps if they do not fit; the step size; the blocks.

        Raises:
            CapacityError: not even one request fits.
            ConfigError: an option contradicts the model or another option.
        """
        fit = self._captured_if_it_fits()
        size = fit.sizes(notes)
        num_blocks = fit.num_blocks(size, notes)
        size = fit.cut_seqs(size, num_blocks, notes)
        fit.note_graphs(size, notes)
        return fit.footprint, size, num_blocks

    def _captured_if_it_fits(self) -> Fit:
        """Return a fit without captured steps if no request fits next to them, unless the options
        request them."""
        if self.footprint.device == "cpu" or self.config.graph_memory is not None:
            return self
        try:
            self.sizes(Notes())
        except CapacityError:
            return replace(self, footprint=replace(self.footprint, graph_memory=0))
        return self

    def sizes(self, notes: Notes) -> StepSize:
        """Choose the size of a step and the longest request."""
        size = self.step_size(notes)
        return replace(size, max_model_len=self._max_model_len(size, notes))

    def step_size(self, notes: Notes) -> StepSize:
        """Choose requests and tokens of a step, so that its tensors take at most a quarter of the
        memory that the weights leave. `max_model_len` of the result is only a first estimate."""
        config, footprint = self.config, self.footprint
        context = self._context
        default = GPU_BUDGET if footprint.device == "cuda" else CPU_BUDGET
        # On CPUs otherwise most stages would wait for the one with the prompt.
        if footprint.stage_ends and footprint.device == "cpu":
            default //= CHUNKS_EACH * len(footprint.stage_ends)
        requested = requested_speculation(config)
        # Tokens of a decoding request, and additional tokens for drafts.
        per_request, drafts = (1, 0) if requested is None else (2, 2 * draft_tokens(requested))
        batch = batch_size(config) if config.policy in ("static", "dynamic") else 0
        required = max(config.block_size, batch, (config.max_num_seqs or 0) + drafts)
        if footprint.spec.encoder:  # a step has whole prompts
            required = max(required, config.max_model_len or context)
            self._check_encoder()
        size = StepSize(
            max_model_len=config.max_model_len or min(context, 4096),
            max_num_seqs=config.max_num_seqs
            or max(
                1, min(MAX_NUM_SEQS, (config.max_num_batched_tokens or GPU_BUDGET) // per_request)
            ),
            max_num_batched_tokens=config.max_num_batched_tokens or max(default, required),
        )
        if batch:
            if config.max_num_seqs is None:
                size = replace(size, max_num_seqs=max(size.max_num_seqs, batch))
            elif batch > config.max_num_seqs:
                raise ConfigError(
                    "batch_size",
                    f"must be at most max_num_seqs ({config.max_num_seqs}), not {batch}",
                )
        size = with_draft_rows(requested, size, footprint.device)
        largest = size
        limit = (self.limit.size - footprint.weights - footprint.overhead(size)) // 4
        floor = max(MIN_BUDGET, required)
        while footprint.activations(size) + footprint.states(size) > limit:
            smaller = []
            if config.max_num_batched_tokens is None and size.max_num_batched_tokens // 2 >= floor:
                tokens = size.max_num_batched_tokens // 2
                max_seqs = max(tokens // per_request, config.max_num_seqs or batch or 1)
                seqs = min(size.max_num_seqs, max_seqs)
                smaller.append(replace(size, max_num_batched_tokens=tokens, max_num_seqs=seqs))
            if config.max_num_seqs is None and size.max_num_seqs > batch_size(config):
                seqs = max(size.max_num_seqs // 2, batch_size(config))
                smaller.append(replace(size, max_num_seqs=seqs))
            if not smaller:
                break
            smaller = [with_draft_rows(requested, trial, footprint.device) for trial in smaller]
            size = min(
                smaller, key=lambda trial: footprint.activations(trial) + footprint.states(trial)
            )
        reason = "enough to keep the arithmetic units busy"
        if size.max_num_batched_tokens < largest.max_num_batched_tokens:
            reason = "a larger step would take over a quarter of the memory left by the weights"
        if config.max_num_batched_tokens is not None:
            reason = ASKED
        notes.add("max_num_batched_tokens", size.max_num_batched_tokens, reason)
        return size

    def _check_encoder(self) -> None:
        """Raise ConfigError if an option is impossible for a model whose steps compute whole
        prompts."""
        config = self.config
        length, tokens = config.max_model_len, config.max_num_batched_tokens
        if length is not None and tokens is not None and tokens < length:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_model_len ({length}), as a step of an encoder has whole "
                f"prompts, not {tokens}",
            )
        if config.kv_cache_dtype != AUTO:
            raise ConfigError(
                "kv_cache_dtype",
                f"must be {AUTO}: an encoder keeps no keys and values after a step",
            )

    def _max_model_len(self, size: StepSize, notes: Notes) -> int:
        """Choose the context: the requested one, otherwise the longest that fits."""
        config = self.config
        context, ends = self._context, config.window is None
        if config.max_model_len is not None and config.max_model_len > context and ends:
            raise ConfigError(
                "max_model_len",
                f"must be at most the model's context of {context}, not {config.max_model_len}",
            )
        requested = config.max_model_len or context
        if self.footprint.spec.encoder and requested > size.max_num_batched_tokens:
            requested = size.max_num_batched_tokens
            reason = "max_num_batched_tokens, as a step of an encoder has whole prompts"
            return notes.add("max_model_len", requested, reason)
        longest = self._longest(lambda length: replace(size, max_model_len=length), requested)
        minimum = requested
        if config.max_model_len is None:
            small_cache = config.num_blocks is not None or config.kv_cache_memory is not None
            minimum = 1 if small_cache else min(requested, MIN_CONTEXT)
        if longest < minimum:
            # The length offered in the error must fit when requested, with a step sized for it.
            offer = self._longest(self._size_with, minimum)
            raise self._capacity_error(replace(size, max_model_len=minimum), offer)
        if config.max_model_len is not None:
            return notes.add("max_model_len", requested, ASKED)
        if longest == requested:
            reason = (
                "the model's context" if ends else "unbounded texts; the longest allowed request"
            )
            return notes.add("max_model_len", requested, reason)
        limiter = "the memory left"
        if config.num_blocks is not None or config.kv_cache_memory is not None:
            limiter = "the KV cache asked for"
        full = f"the model's context of {context}" if ends else f"{context}"
        reason = f"the most that {limiter} holds, of {full}"
        return notes.add("max_model_len", longest, reason)

    @property
    def _context(self) -> int:
        """The longest request by default."""
        if self.config.window is not None:
            return STREAMED_CONTEXT
        return self.footprint.spec.max_context

    def _size_with(self, length: int) -> StepSize:
        """Return the step that results if the options request a context of `length`."""
        trial = replace(self, config=replace(self.config, max_model_len=length))
        return replace(trial.step_size(Notes()), max_model_len=length)

    def _longest(self, size_for: Callable[[int], StepSize], limit: int) -> int:
        """Return a long context, up to `limit`, with which one request fits; 0 if none is found.

        It is the longest one if fitting is monotonic in the length, as with steps of a fixed size.
        """

        def fits(length: int) -> bool:
            trial = size_for(length)
            num_blocks = self.footprint.blocks_per_request(length, trial.max_num_batched_tokens)
            enough = self._cache_bytes(trial) >= self.footprint.cache_cost(num_blocks)
            return enough and self._needed(trial) <= self.limit.size

        if fits(limit):
            return limit
        low, high = 0, limit  # fits(low) or low == 0; not fits(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        # Round down to whole blocks.
        rounded = low - low % self.footprint.block_size
        return rounded if rounded and fits(rounded) else low

    def num_blocks(self, size: StepSize, notes: Notes) -> int:
        """Choose the number of blocks: at least one request of `max_model_len`, at most all."""
        config, footprint = self.config, self.footprint
        if config.num_blocks is not None:
            return notes.add("num_blocks", config.num_blocks, ASKED)
        if footprint.spec.encoder:
            full = -(-size.max_num_batched_tokens // footprint.block_size)
            count = full + size.max_num_seqs  # the last block of each prompt is not full
            return notes.add("num_blocks", count, "the prompts of one step, in one layer")
        per_request = footprint.blocks_per_request(size.max_model_len, size.max_num_batched_tokens)
        within = footprint.blocks_within
        if config.kv_cache_memory is not None:
            requested = show_bytes(config.kv_cache_memory)
            count, reason = within(config.kv_cache_memory), f"kv_cache_memory of {requested}"
        else:
            free = self.limit.size - footprint.fixed(size)
            bounds = [(within(free), "all memory left")]
            if footprint.device == "cpu":
                proportion = max(CPU_KV_FLOOR, CPU_KV_PER_WEIGHTS * footprint.weights)
                bounds += [
                    (within(int(free * CPU_KV_SHARE)), f"{CPU_KV_SHARE:.0%} of the memory left"),
                    (within(proportion), f"{show_bytes(proportion)}, in proportion to the weights"),
                ]
            count, reason = min(bounds)
            if count < per_request:
                count, reason = per_request, "one request of max_model_len"
        useful = footprint.blocks_of_all(size)
        # More blocks only keep prefixes of requests that ended. That memory is not taken unasked.
        keeps_more = config.enable_prefix_caching and config.kv_cache_memory is not None
        if count >= useful and not keeps_more:
            count = useful
            reason = f"all that {size.max_num_seqs} requests of max_model_len can use"
        tokens = count * footprint.block_size // len(footprint.groups)
        notes.add("num_blocks", count, f"{reason}; {tokens} tokens")
        return count

    def cut_seqs(self, size: StepSize, num_blocks: int, notes: Notes) -> StepSize:
        """Limit the requests of a step to the number of blocks."""
        if self.config.max_num_seqs is not None:
            notes.add("max_num_seqs", self.config.max_num_seqs, ASKED)
            return size
        count = min(size.max_num_seqs, num_blocks)
        reason = "more requests would wait for memory or arithmetic"
        if count < size.max_num_seqs:
            reason = "at least one block for each"
        elif count < MAX_NUM_SEQS:
            reason = "sampling for more would need too much memory, or more tokens than a step has"
        notes.add("max_num_seqs", count, reason)
        size = replace(size, max_num_seqs=count)
        return with_draft_rows(requested_speculation(self.config), size, self.footprint.device)

    def note_graphs(self, size: StepSize, notes: Notes) -> None:
        """Note which forwards are captured, if any can be."""
        config, footprint = self.config, self.footprint
        able = replace(footprint, graph_memory=None)
        sizes, drafting = able.graph_sizes(size), able.draft_graph_sizes(size)
        if footprint.graph_memory == 0 and (sizes or drafting):
            notes.add("cuda_graphs", "none", ASKED if config.graph_memory == 0 else NO_GRAPHS)
        elif sizes or drafting:
            of_heads = footprint.heads or footprint.spec.predictor
            draft_graphs = f"{len(drafting)} of the {'heads' if of_heads else 'draft model'}"
            value, replayed = draft_graphs, "drafts are made by replaying them"
            if sizes:
                value = f"{len(sizes)} sizes up to {max(graph.rows for graph in sizes)} requests"
                value += f", {draft_graphs}" if drafting else ""
                verifying = " and verifying" if size.max_draft_rows else ""
                replayed = f"decoding{verifying} steps replay them"
            memory = show_bytes(footprint.graphs(size))
            planned = "are planned" if footprint.graph_memory is None else "were asked for"
            notes.add("cuda_graphs", value, f"{replayed}; {memory} {planned} for all of them")

    def _cache_bytes(self, size: StepSize) -> int:
        """Return the bytes of the requested KV cache, otherwise of the smallest for one request."""
        config, footprint = self.config, self.footprint
        if config.kv_cache_memory is not None:
            return config.kv_cache_memory
        blocks = config.num_blocks
        if blocks is None:
            length, chunk = size.max_model_len, size.max_num_batched_tokens
            blocks = footprint.blocks_per_request(length, chunk)
        return footprint.cache_cost(blocks)

    def _needed(self, size: StepSize) -> int:
        return self.footprint.fixed(size) + self._cache_bytes(size)

    def _capacity_error(self, size: StepSize, longest: int) -> CapacityError:
        """Return the error for a `size` that does not fit.

        Args:
            longest: the longest context that would fit with the other options unchanged; 0 if none.
        """
        config, footprint = self.config, self.footprint
        length = size.max_model_len
        enough = footprint.blocks_per_request(length, size.max_num_batched_tokens)
        if config.num_blocks is not None and config.num_blocks < enough:
            return CapacityError(
                "num_blocks",
                f"must be at least {enough} to hold {length} tokens, not {config.num_blocks}",
            )
        enough_bytes = footprint.cache_cost(enough)
        if config.kv_cache_memory is not None and config.kv_cache_memory < enough_bytes:
            return CapacityError(
                "kv_cache_memory",
                f"must be at least {enough_bytes} bytes to hold {length} tokens, "
                f"not {config.kv_cache_memory}",
            )
        needed = self._needed(size)
        allowed = f"{show_bytes(self.limit.size)} are allowed: {self.limit.source}"
        if config.max_model_len is not None and longest > 0:
            return CapacityError(
                "max_model_len",
                f"{length} tokens need {show_bytes(needed)}, {allowed}; up to {longest} would fit",
            )
        graphs = footprint.graphs(size)
        captured = (f"{show_bytes(graphs)} for CUDA graphs",) if graphs else ()
        parts = ", ".join(
            (
                f"{show_bytes(footprint.weights)} of weights in {footprint.stored_as}",
                f"{show_bytes(footprint.activations(size))} for a step",
                f"{show_bytes(self._cache_bytes(size))} of KV cache",
                *captured,
                f"{show_bytes(footprint.overhead(size) - graphs)} for the runtime",
            )
        )
        text = f"{show_bytes(needed)} are needed ({parts}), {allowed}"
        return CapacityError("memory", f"{text}; {self._what_would_fit(size)} would fit")

    def _what_would_fit(self, size: StepSize) -> str:
        """Return the smallest change that would make it fit."""
        config = replace(self.config, num_blocks=None, kv_cache_memory=None)
        free = replace(self, config=config)
        half = replace(free, footprint=replace(self.footprint, dtype="bfloat16"))
        eager = replace(self.footprint, graph_memory=0)
        small = replace(size, max_num_seqs=1, max_num_batched_tokens=MIN_BUDGET)
        one_by_one = f"max_num_seqs=1 with max_num_batched_tokens={MIN_BUDGET}"
        also = "" if config == self.config else " and a smaller KV cache"
        for advice, fit, trial in (
            ("a smaller KV cache", free, size),
            ("a smaller graph_memory", replace(self, footprint=eager), size),
            (f"a smaller graph_memory{also}", replace(free, footprint=eager), size),
            (f"{one_by_one}{also}", free, small),
            (f"dtype=bfloat16{also}", half, size),
            (f"dtype=bfloat16, {one_by_one}{also}", half, small),
        ):
            if fit._needed(trial) <= self.limit.size:
                return advice
        needed, share = self._needed(size), self.config.memory_utilization
        if needed * share <= self.limit.size:
            return "a higher memory_utilization"
        if self.footprint.mapped is None:  # weights can be rounded at load
            for scheme in FEWER_BITS:  # most accurate first
                rounded = replace(self.footprint, quantization=scheme)
                if rounded.weights >= self.footprint.weights:
                    continue
                fit = replace(free, footprint=rounded)
                for trial, steps in ((size, ""), (small, f", {one_by_one}")):
                    if fit._needed(trial) <= self.limit.size:
                        return f"quantization={scheme}{steps}{also}"
        return f"a smaller model, or {show_bytes(int(needed / share))} of memory,"


def footprint_of(
    config: EngineConfig,
    model: ModelSpec,
    hardware: Hardware,
    compute: Compute,
    mapped: int | None,
) -> Footprint:
    """Return the engine's memory without drafters.

    Args:
        mapped: bytes of weights that are mapped; None if they are loaded.
    """
    runtime = RUNTIME_BYTES[compute.kind]
    if compute.kind == "cpu":
        runtime += THREAD_BYTES * (config.threads or hardware.threads)
        runtime += CUDA_BUILD_BYTES if hardware.cuda_build else 0
        runtime += TRANSFORMERS_BYTES if compute.kernels == TRANSFORMERS else 0
    return Footprint(
        model,
        compute.dtype,
        config.quantization,
        compute.kind,
        compute.attention,
        config.block_size,
        config.kv_cache_dtype,
        config.kv_cache_dtype_skip_layers,
        compute.kernels,
        mapped=mapped,
        runtime=runtime,
        graph_memory=config.graph_memory,
        checkpoints=config.enable_prefix_caching,
        ranks=config.tensor_parallel_size,
    )


def draft_tokens(options: SpeculativeConfig) -> int:
    """Return the maximum number of drafts of a request in one step."""
    return options.num_speculative_tokens or DEFAULT_TOKENS[options.method]


def with_draft_rows(options: SpeculativeConfig | None, size: StepSize, device: str) -> StepSize:
    """Return the step with a useful number of drafts. Half of the tokens that decoding requests
    leave are reserved for prompts, which could starve otherwise.

    Args:
        device: "cpu" or "cuda".
    """
    if options is None:
        return size
    tokens, seqs = size.max_num_batched_tokens, size.max_num_seqs
    rows = min(seqs * draft_tokens(options), (tokens - seqs) // 2, MAX_DRAFT_ROWS[device])
    rows = max(0, rows)
    return replace(size, max_draft_rows=rows, draft_tokens=min(rows, draft_tokens(options)))


def with_drafter(
    footprint: Footprint, options: SpeculativeConfig | None, source: DraftSource
) -> Footprint:
    """Return the engine's memory with its draft model or heads. Raises ConfigError if the draft
    model cannot run with the target."""
    if options is not None and source.heads is not None:
        heads = HeadsFootprint(source.heads, footprint.dtype, draft_tokens(options))
        return replace(footprint, heads=heads)
    if options is None or source.spec is None:
        return footprint
    _shared_group(footprint.groups)
    if source.spec.compressed:
        reason = f"must name a model of another kind, not {source.spec.architecture}"
        raise ConfigError("spec_model", f"{reason}: it keeps entries that sum up tokens")
    dim, backend = max(source.spec.head_dims), footprint.attention_backend
    large = dim > MAX_HEAD_DIM and backend in ("cpu", *TRITON_BACKENDS)
    if large or (backend == "cpu" and dim % LANES):
        raise ConfigError(
            "spec_model", f"its heads of {dim} need attention_backend sdpa, for both models"
        )
    built = source.spec.built
    if built is not None:
        check_draft(built, footprint.dtype, footprint.kernels, options.quantization)
    draft = replace(
        footprint,
        spec=source.spec,
        quantization=built.quantization if built else options.quantization,
        runtime=0,
        kv_cache_dtype=AUTO,
        kv_cache_dtype_skip_layers=(),
        mapped=built.weight_bytes if built else None,
        # In the last stage; whole in its first process, or in all shares of its group.
        stage_ends=(),
        stage_bytes=(),
        ranks=footprint.ranks if options.method in DIVIDED_METHODS else 1,
        repeated=0,
        counted=None,
    )
    return replace(footprint, draft=draft, taps=len(source.taps))


def with_adapters(
    footprint: Footprint, config: EngineConfig, adapters: Sequence[Adapter], notes: Notes
) -> Footprint:
    """Return the engine's memory with the adapters from which requests choose.

    Raises:
        ConfigError: there is a rank, and no adapter; or experts cannot be adapted.
    """
    slots, rank = max(config.max_adapters or 0, len(adapters)), config.max_adapter_rank
    if not slots:
        if rank is not None:
            raise ConfigError("max_adapter_rank", "must be left out, or max_adapters be given")
        return footprint
    if rank is None:
        rank = 0 if config.max_adapters is None else ADAPTER_RANK
    files = [adapter.sizes() for adapter in adapters]
    sizes = AdaptersFootprint.of(footprint.spec, slots, files, rank, footprint.dtype)
    if sizes.experts and footprint.kernels == "native":
        for option in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(config, option) > 1:
                raise ConfigError(option, "must be 1 with adapters that change experts")
        if slots * sizes.experts > MAX_EXPERTS:
            limit = MAX_EXPERTS // sizes.experts
            reason = f"they change {sizes.experts} experts of a layer"
            raise ConfigError("max_adapters", f"must be at most {limit}, not {slots}: {reason}")
    shown = show_bytes(sizes.weights)
    notes.add("adapters", len(adapters), f"{shown} for {slots}: requests choose one as their model")
    return replace(footprint, adapters=sizes)


def _shared_group(groups: tuple[KVGroup, ...]) -> int:
    """Return the index of the target's KV group whose layers see every key."""
    for index, group in enumerate(groups):
        if group.visible == ALL_KEYS:
            return index
    owner = "kv_budget leaves" if any(group.budgeted for group in groups) else "there are"
    raise ConfigError(
        "spec_method",
        f"must be a method without keys of its own, as ngram: {owner} no layers that see every key",
    )


def choose_speculation(
    options: SpeculativeConfig | None,
    size: StepSize,
    groups: tuple[KVGroup, ...],
    source: DraftSource,
    notes: Notes,
) -> ResolvedSpeculation | None:
    """Decide on speculative decoding.

    Args:
        size: size of a step, including drafts.
        groups: groups of the target's KV cache.

    Raises:
        ConfigError: a step has no room for drafts.
    """
    if options is None:
        notes.add("speculation", OFF, "the default: see spec_method")
        return None
    if size.max_draft_rows == 0:
        raise ConfigError(
            "max_num_batched_tokens",
            f"must be at least {size.max_num_seqs + 2} for {size.max_num_seqs} requests and their "
            f"drafts, not {size.max_num_batched_tokens}",
        )
    limit = min(draft_tokens(options), size.max_draft_rows)
    reason = ASKED if options.num_speculative_tokens else f"{ASKED}, with the method's default"
    notes.add(
        "speculation", options.method, f"{reason}: up to {limit} tokens of a request in a step"
    )
    rows = f"{size.max_draft_rows} drafts"
    notes.add("max_draft_rows", rows, "of all requests in a step, with room left for prompts")
    typical = None
    if options.typical_acceptance:
        typical = Typical(options.typical_epsilon, options.typical_delta)
        effect = "lossy: changes the distribution of requests that sample without a seed"
        notes.add("typical_acceptance", "on", f"{effect}; {ASKED}")
    return ResolvedSpeculation(
        method=options.method,
        num_draft_tokens=limit,
        max_draft_rows=size.max_draft_rows,
        adaptive=options.adaptive,
        # Drafts are written ahead in blocks shared with the target.
        num_lookahead_tokens=limit if options.method in CACHING_METHODS else 0,
        source=source,
        draft_step=size.of_draft_model,
        draft_group=_shared_group(groups) if source.spec is not None else 0,
        quantization=options.quantization,
        ngram_min=options.ngram_min,
        ngram_max=options.ngram_max,
        shared=options.shared,
        typical=typical,
    )

"""Resolution is pure and total: a plan that fits, or an error that names what would fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from helpers.configs import PUBLIC
from helpers.planned import decision
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import Gpu, Hardware
from kvik.config.kv_budget import KVBudgets
from kvik.config.memory import CUDA_BUILD_BYTES
from kvik.config.resolve import resolve
from kvik.config.speculative import DraftSource
from kvik.errors import CapacityError, ConfigError, KvikError
from kvik.models.model_spec import ModelSpec
from kvik.spec.layers import QueryScale
from kvik.spec.stored_weights import StoredQuantization
from kvik.spec.visible_keys import Window

GIB = 1 << 30
PC = Hardware("PC", 8, 16 * GIB, "RAM available", frozenset({"avx2", "avx512_bf16"}))
OLD_PC = replace(PC, isa=frozenset({"avx2"}))
H100 = Gpu(0, "H100", 80 * GIB, 78 * GIB, (9, 0))
SERVER = replace(PC, gpus=(H100,))
TWO_GPUS = replace(PC, native=True, gpus=(H100, replace(H100, index=1)))


def llama(**changes: object) -> ModelSpec:
    """Llama-3.2-1B, or something like it."""
    return ModelSpec.from_config(PUBLIC["llama-3.2-1b"] | changes)


TINY = llama(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
)
SMALL = llama()
LARGE = ModelSpec.from_config(PUBLIC["llama-3.1-8b"])
WINDOWED = ModelSpec.from_config(PUBLIC["mistral-7b-v0.1"] | {"num_hidden_layers": 4})
LEARNED = ModelSpec.from_config(PUBLIC["gpt2"] | {"n_layer": 2, "n_positions": 128})
STATES = ModelSpec.from_config(PUBLIC["Qwen3.5-9B"])
AWQ = replace(SMALL, quantization=StoredQuantization("awq", ()))
SPECS = (TINY, SMALL, LARGE, WINDOWED, LEARNED, STATES)


def plan(spec: ModelSpec = SMALL, hardware: Hardware = PC, **options: Any) -> ResolvedConfig:
    return resolve(EngineConfig(**options), spec, hardware, "/models/x")


def test_the_quantization_of_the_files_may_be_named() -> None:
    assert plan(AWQ, quantization="awq").runner.quantization == "none"


def test_states_of_running_requests_and_checkpoints_are_planned() -> None:
    each, pc = STATES.state_bytes, replace(PC, memory_limit=64 * GIB)
    assert each == 24 * 4 * (32 * 128 * 128 + 3 * 8192)
    with_copies = plan(STATES, pc, max_num_seqs=4, num_blocks=4096)
    without = plan(STATES, pc, max_num_seqs=4, num_blocks=4096, enable_prefix_caching=False)
    assert (with_copies.cache.checkpoints, without.cache.checkpoints) == (8, 0)
    assert (with_copies.state_rows, without.state_rows) == (12, 4)
    assert with_copies.memory.kv_cache - without.memory.kv_cache == 8 * each
    assert without.memory.kv_cache - 4 * each == 4097 * 16 * STATES.kv_bytes_per_token(2)
    assert plan(STATES, pc).scheduler.max_num_seqs < plan(LARGE, pc).scheduler.max_num_seqs
    assert plan().cache.checkpoints is None


def test_states_have_room_for_drafts() -> None:
    pc = replace(PC, memory_limit=64 * GIB)
    options = {"max_num_seqs": 4, "num_blocks": 4096, "spec_method": "ngram", "spec_tokens": 3}
    plain = plan(STATES, pc, max_num_seqs=4, num_blocks=4096)
    drafting = plan(STATES, pc, **options)
    # The inputs of the convolution, then its outputs and the gates of 32 heads.
    each = 24 * 4 * 3 * (8192 + 8192 + 2 * 32)
    assert drafting.model.state_bytes - plain.model.state_bytes == each
    assert drafting.memory.kv_cache - plain.memory.kv_cache == 12 * each


def test_a_tier_has_room_for_a_state_in_pages_as_large_as_those_of_blocks() -> None:
    pc = replace(PC, memory_limit=64 * GIB)
    tiers = plan(STATES, pc, kv_tiers="memory:1GiB").cache.tiers
    assert tiers is not None
    block, state = tiers.page_bytes
    assert state <= block and tiers.memory == GIB // block
    assert 0 <= tiers.state_pages * (state - 72) - STATES.state_bytes < tiers.state_pages
    with pytest.raises(CapacityError, match="^kv_tiers: .* for each state"):
        plan(STATES, pc, kv_tiers="memory:50MiB")


def test_states_of_a_draft_model_are_planned() -> None:
    pc, draft = replace(PC, memory_limit=64 * GIB), replace(STATES, vocab_size=SMALL.vocab_size)
    options = {"max_num_seqs": 4, "num_blocks": 4096, "spec_method": "draft_model"}
    found = []
    for wider in (0, 1):
        layers = (
            replace(layer, state=layer.state and replace(layer.state, width=4 + wider))
            for layer in draft.layers
        )
        source = DraftSource(spec=replace(draft, layers=tuple(layers)))
        config = EngineConfig(**options, spec_model="x")
        found.append(resolve(config, SMALL, pc, "/models/x", source).memory.kv_cache)
    assert found[1] - found[0] == 2 * 4 * 24 * 4 * 8192


def check(resolved: ResolvedConfig, config: EngineConfig) -> None:
    """Check the invariants of every plan."""
    cache, scheduler, memory = resolved.cache, resolved.scheduler, resolved.memory
    assert memory.total <= memory.limit
    assert min(memory.weights, memory.activations, memory.overhead, memory.kv_cache) > 0
    assert cache.num_blocks >= 1
    assert 1 <= scheduler.max_model_len <= resolved.model.max_context
    assert scheduler.max_num_seqs >= 1
    assert scheduler.max_num_batched_tokens >= 1
    # A single request of the longest length fits: full attention needs all of its blocks.
    blocks = -(-scheduler.max_model_len // cache.block_size)
    full = sum(group.spec.window is None for group in cache.groups)
    assert cache.num_blocks >= full * blocks
    assert sorted(layer for group in cache.groups for layer in group.layers) == [
        i for i, layer in enumerate(resolved.model.layers) if layer.state is None
    ]
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        wish, value = getattr(config, name), getattr(scheduler, name)
        assert wish is None or wish == value
        assert decision(resolved, name)[0] == str(value)
    assert config.num_blocks in (None, cache.num_blocks)
    if config.kv_cache_memory is not None:
        states = resolved.state_rows * resolved.model.state_bytes
        assert memory.kv_cache - states <= config.kv_cache_memory
    for made in resolved.decisions:
        assert made.name and made.value and made.reason


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw None in three of four cases, so that most examples pass the first checks."""
    return st.one_of(st.none(), st.none(), st.none(), values)


def sizes(most: int) -> st.SearchStrategy[int]:
    """Draw integers up to 2^most, evenly by magnitude."""
    return st.integers(0, most).flatmap(lambda bits: st.integers(1, 1 << bits))


configs = st.builds(
    EngineConfig,
    dtype=st.sampled_from(["auto", "auto", "float32", "bfloat16", "float16"]),
    quantization=st.sampled_from(
        ["none", "none", "int8", "int8-weight-only", "int4", "mxfp4", "fp8"]
    ),
    device=st.sampled_from(["auto", "auto", "auto", "cpu", "cpu", "cuda:1"]),
    max_model_len=maybe(sizes(18)),
    max_num_seqs=maybe(sizes(12)),
    max_num_batched_tokens=maybe(sizes(17)),
    block_size=st.sampled_from([1, 8, 16, 64, 1024]),
    num_blocks=maybe(sizes(20)),
    memory_utilization=st.floats(0.3, 1.0),
    kv_cache_memory=maybe(sizes(36)),
    policy=st.sampled_from(["fcfs", "priority", "static", "dynamic"]),
    batch_size=maybe(sizes(8)),
    attention_backend=st.sampled_from(["auto", "reference", "sdpa"]),
    threads=maybe(st.integers(1, 64)),
)
machines = st.builds(
    Hardware,
    cpu_name=st.just("CPU"),
    cores=st.integers(1, 128),
    memory_limit=st.integers(30, 40).flatmap(lambda bits: st.integers(1 << 29, 2 << bits)),
    memory_reason=st.just("RAM available"),
    isa=st.sets(st.sampled_from(["avx2", "avx512_bf16", "amx_bf16"])).map(frozenset),
    gpus=st.one_of(
        st.just(()),
        st.integers(1 << 30, 1 << 38).map(lambda free: (Gpu(0, "G", 1 << 38, free, (7, 5)),)),
    ),
)


@settings(max_examples=examples(400))
@given(config=configs, spec=st.sampled_from(SPECS), hardware=machines)
def test_a_plan_that_fits_or_an_error(
    config: EngineConfig, spec: ModelSpec, hardware: Hardware
) -> None:
    try:
        resolved = resolve(config, spec, hardware, "/models/x")
    except KvikError as error:
        assert "\n" not in str(error)
        return
    check(resolved, config)
    assert resolved.scheduler.max_num_seqs <= resolved.scheduler.max_num_batched_tokens
    assert resolve(config, spec, hardware, "/models/x") == resolved


@settings(max_examples=examples(150))
@given(
    spec=st.sampled_from(SPECS),
    memory=st.integers(1 << 28, 1 << 38),
    wanted=st.integers(1, 1 << 17),
    block_size=st.sampled_from([1, 16, 64]),
)
def test_the_context_in_an_error_fits(
    spec: ModelSpec, memory: int, wanted: int, block_size: int
) -> None:
    hardware = replace(PC, memory_limit=memory)
    wanted = min(wanted, spec.max_context)
    try:
        plan(spec, hardware, max_model_len=wanted, block_size=block_size)
    except CapacityError as error:
        offer = re.search(r"up to (\d+) would fit", str(error))
        if offer:
            fitting = plan(spec, hardware, max_model_len=int(offer[1]), block_size=block_size)
            assert fitting.memory.total <= fitting.memory.limit


def test_defaults_on_a_computer() -> None:
    resolved = plan()
    check(resolved, EngineConfig())
    assert resolved.runner.device == "cpu"
    assert resolved.runner.dtype == "bfloat16"
    assert resolved.runner.threads == 8
    assert resolved.runner.attention_backend == "sdpa"
    assert resolved.runner.model_path == "/models/x"
    assert resolved.scheduler.max_model_len == 131_072
    assert resolved.memory.limit == int(16 * GIB * 0.9)
    assert "in proportion to the weights" in decision(resolved, "num_blocks")[1]


def test_the_cache_leaves_a_computer_half_of_its_memory() -> None:
    resolved = plan(hardware=replace(PC, memory_limit=10 * GIB), max_model_len=8192)
    assert decision(resolved, "num_blocks")[1].startswith("50% of the memory left")
    rest = resolved.memory.limit - resolved.memory.total + resolved.memory.kv_cache
    assert resolved.memory.kv_cache <= rest // 2 + 1


def test_defaults_on_a_gpu() -> None:
    resolved = plan(LARGE, SERVER)
    check(resolved, EngineConfig())
    assert resolved.runner.device == "cuda:0"
    assert resolved.runner.dtype == "bfloat16"
    assert resolved.memory.limit == int(78 * GIB * 0.9)
    # All of the memory, except less than one block.
    block = resolved.memory.kv_cache // resolved.cache.pool_size
    assert resolved.memory.limit - resolved.memory.total < block
    assert decision(resolved, "device") == ("cuda:0", "H100")


def test_prompts_by_torch_are_planned() -> None:
    """The thresholds measured for the GPU are used, and their memory is planned."""
    spec = replace(llama(), vocab_size=100, intermediate_size=64)  # mostly attention
    plain = replace(SERVER, triton=True)
    faster = replace(plain.gpus[0], torch_prompts=((spec.head_dim, 1024),))
    sizes = {"max_num_seqs": 8, "max_model_len": 4096, "dtype": "bfloat16"}
    alone, beside = plan(spec, plain, **sizes), plan(spec, replace(plain, gpus=(faster,)), **sizes)
    assert (alone.runner.attention_backend, alone.runner.torch_prompts) == ("triton", None)
    assert (beside.runner.attention_backend, beside.runner.torch_prompts) == ("triton+sdpa", 1024)
    assert beside.runner.graph_sizes == alone.runner.graph_sizes
    tokens = beside.scheduler.max_num_batched_tokens + 1023
    least = tokens * (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * 2
    assert beside.memory.activations - alone.memory.activations >= least
    assert "1024 tokens and more" in decision(beside, "attention_backend")[1]


def test_a_draft_model_with_heads_too_large_for_the_kernels_is_refused() -> None:
    asked = EngineConfig(spec_method="draft_model", spec_model="draft", max_model_len=512)
    source = DraftSource("draft", spec=replace(TINY, head_dim=528))
    server = replace(SERVER, triton=True)
    with pytest.raises(ConfigError, match=r"^spec_model: its heads of 528 need attention_"):
        resolve(asked, TINY, server, "", source)
    resolved = resolve(replace(asked, attention_backend="sdpa"), TINY, server, "", source)
    assert resolved.speculation is not None
    resolve(asked, TINY, server, "", DraftSource("draft", spec=replace(TINY, head_dim=80)))


def test_a_tiny_model_does_not_reserve_the_machine() -> None:
    big = replace(PC, memory_limit=1 << 41)
    assert plan(TINY, big).memory.total < 1 * GIB
    tiny = plan(TINY, big, max_num_seqs=4)
    assert tiny.cache.num_blocks == 4 * 512 // 16
    assert "4 requests" in decision(tiny, "num_blocks")[1]


@pytest.mark.parametrize(
    ("spec", "hardware", "dtype", "reason"),
    [
        (TINY, PC, "bfloat16", "half the bytes"),
        (TINY, OLD_PC, "float32", "no bfloat16"),
        (SMALL, PC, "bfloat16", "half the bytes"),
        (SMALL, OLD_PC, "float32", "no bfloat16"),
        (SMALL, replace(OLD_PC, memory_limit=8 * GIB), "bfloat16", "float32 would take"),
        (llama(dtype="float16"), PC, "bfloat16", "half the bytes"),
        (llama(dtype="float16"), OLD_PC, "float32", "no bfloat16"),
        (llama(dtype="float32"), PC, "float32", "the checkpoint's"),
        (llama(dtype="float32"), replace(PC, memory_limit=8 * GIB), "bfloat16", "float32 would"),
        (SMALL, SERVER, "bfloat16", "the checkpoint's"),
        (llama(dtype="float16"), SERVER, "float16", "the checkpoint's"),
        (SMALL, replace(PC, gpus=(replace(H100, capability=(7, 5)),)), "float16", "no bfloat16"),
    ],
)
def test_dtype(spec: ModelSpec, hardware: Hardware, dtype: str, reason: str) -> None:
    value, why = decision(plan(spec, hardware), "dtype")
    assert value == dtype
    assert reason in why


def test_memory_grows_with_each_part() -> None:
    base = plan(max_model_len=4096, max_num_seqs=8, num_blocks=1000)
    assert base.memory.weights == 2 * SMALL.num_parameters
    assert base.memory.kv_cache == 1001 * 16 * 2 * 16 * 8 * 64 * 2
    wider = plan(max_model_len=4096, max_num_seqs=8, num_blocks=1000, max_num_batched_tokens=8192)
    assert wider.memory.activations > base.memory.activations
    more = plan(max_model_len=4096, max_num_seqs=1024, num_blocks=2000)
    assert more.memory.activations > base.memory.activations  # logits
    assert more.memory.overhead > base.memory.overhead  # tables


def test_rotary_positions_are_counted() -> None:
    """A row of head_dim numbers in fp32 per 1,024 positions, in addition to the tables of requests;
    and a number per position that scales queries."""

    def overhead(spec: ModelSpec, length: int) -> int:
        sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "num_blocks": 1000}
        return plan(spec, max_model_len=length, **sizes).memory.overhead

    tokens_and_blocks = 1024 * 4 + 2 * 1024 // 16 * 4  # a step has a copy of the blocks
    more = overhead(SMALL, 2048) - overhead(SMALL, 1024)
    assert more == SMALL.head_dim * 4 + tokens_and_blocks
    assert overhead(LEARNED, 128) - overhead(LEARNED, 64) == 64 * 4 + 2 * 64 // 16 * 4
    scaled = [replace(layer, query_scale=QueryScale(64, 0.1)) for layer in SMALL.layers]
    assert overhead(replace(SMALL, layers=tuple(scaled)), 2048) == overhead(SMALL, 2048) + 2048 * 4


@pytest.mark.parametrize(
    ("quantization", "low", "high"),
    [
        ("none", 2.0, 2.0),
        ("int8", 1.0, 1.01),
        ("int8-weight-only", 1.0, 1.01),
        ("int4", 0.5, 0.67),
        ("fp8", 1.0, 1.01),
    ],
)
def test_quantised_weights_take_less_memory(quantization: str, low: float, high: float) -> None:
    """Bytes per parameter; the tied embedding of Llama-3.2-1B stays at eight bits."""
    resolved = plan(max_model_len=4096, quantization=quantization)
    assert low <= resolved.memory.weights / SMALL.num_parameters <= high
    assert resolved.runner.quantization == quantization
    value, reason = decision(resolved, "quantization")
    assert value == quantization
    assert ("as asked" in reason) == (quantization != "none")


def test_a_quantised_model_fits_where_the_plain_one_does_not() -> None:
    small = replace(PC, memory_limit=10 * GIB)
    with pytest.raises(CapacityError, match="weights in bfloat16"):
        plan(LARGE, small)
    assert plan(LARGE, small, quantization="int4").memory.weights < 6 * GIB
    with pytest.raises(CapacityError, match="of weights in int8"):
        plan(LARGE, replace(PC, memory_limit=8 * GIB), quantization="int8")


def test_the_dtype_depends_on_the_size_of_unquantised_weights() -> None:
    """Small matrices leave room for fp32 on an old computer."""
    assert plan(SMALL, replace(OLD_PC, memory_limit=8 * GIB)).runner.dtype == "bfloat16"
    small = plan(SMALL, replace(OLD_PC, memory_limit=8 * GIB), quantization="int8")
    assert small.runner.dtype == "float32"


def test_the_context_is_cut_to_what_fits() -> None:
    small = replace(PC, memory_limit=4 * GIB)
    resolved = plan(SMALL, small)
    length = resolved.scheduler.max_model_len
    assert 256 <= length < 131_072
    assert "holds" in decision(resolved, "max_model_len")[1]
    with pytest.raises(CapacityError, match=r"^max_model_len: 131072 .*up to \d+ would fit"):
        plan(SMALL, small, max_model_len=131_072)


def test_a_small_cache_bounds_the_context() -> None:
    resolved = plan(num_blocks=4)
    assert resolved.scheduler.max_model_len == 64
    assert resolved.scheduler.max_num_seqs == 4
    one_layer_block = 2 * 16 * 8 * 64 * 2
    resolved = plan(kv_cache_memory=9 * 16 * (one_layer_block + 19))
    assert resolved.scheduler.max_model_len == 128


@pytest.mark.parametrize("caching", [True, False])
def test_more_blocks_than_requests_use_are_for_prefixes_and_on_request(caching: bool) -> None:
    few = {"max_num_seqs": 2, "max_model_len": 256, "enable_prefix_caching": caching}
    planned, asked = plan(**few), plan(**few, kv_cache_memory=GIB)
    assert planned.cache.num_blocks == 2 * 256 // 16
    assert (asked.cache.num_blocks > planned.cache.num_blocks) is caching
    if caching:
        assert 0.99 * GIB < asked.memory.kv_cache <= GIB


@pytest.mark.parametrize(
    ("spec", "memory", "options", "error"),
    [
        (SMALL, 16, {"num_blocks": 3, "max_model_len": 1000}, "num_blocks: .*at least 63 to hold"),
        (SMALL, 16, {"kv_cache_memory": 10, "max_model_len": 16}, "kv_cache_memory: .*at least "),
        (SMALL, 16, {"kv_cache_memory": 10}, "kv_cache_memory: .*at least "),
        (SMALL, 16, {"num_blocks": 1 << 28}, "memory: .*a smaller KV cache would fit"),
        (SMALL, 16, {"max_num_seqs": 65_536, "dtype": "bfloat16"}, "memory: .*max_num_seqs=1 with"),
        (LARGE, 1, {}, "memory: .*a smaller model, or"),
        (LARGE, 12, {}, "memory: .*quantization=int8 would fit"),
        (LARGE, 7, {}, "memory: .*quantization=int4 would fit"),
        (LARGE, 7, {"quantization": "int8"}, "memory: .*quantization=int4 would fit"),
        (
            *(LARGE, 12),
            {"max_num_seqs": 8192, "max_num_batched_tokens": 16_384},
            "memory: .*quantization=int8, max_num_seqs=1",
        ),
        (LARGE, 24, {"dtype": "float32"}, "memory: .*dtype=bfloat16 would fit"),
        (
            *(LARGE, 24),
            {"dtype": "float32", "num_blocks": 1 << 24},
            "memory: .*dtype=bfloat16 and a smaller KV cache would fit",
        ),
        (LARGE, 24, {"memory_utilization": 0.5}, "memory: .*a higher memory_utilization would fit"),
    ],
)
def test_what_does_not_fit_names_what_would(
    spec: ModelSpec, memory: int, options: dict[str, Any], error: str
) -> None:
    """Memory in GiB."""
    with pytest.raises(CapacityError, match=f"^{error}"):
        plan(spec, replace(PC, memory_limit=memory * GIB), **options)


LATENT = {"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 32}
DEEPSEEK = ModelSpec.from_config(PUBLIC["llama-2-7b"] | LATENT)
GEMMA = ModelSpec.from_config(PUBLIC["Gemma-3-1B"])
FIRST, SECOND = TINY.layers
NARROWED, TEMPERED, SCALED, NORMED = (
    replace(TINY, layers=layers)
    for layers in (
        tuple(replace(layer, window=Window(24)) for layer in TINY.layers),
        (replace(FIRST, rope=replace(FIRST.rope, query_beta=0.1)),) * 2,
        (FIRST, replace(SECOND, query_scale=QueryScale(8192, 0.1))),
        (replace(FIRST, rope=replace(FIRST.rope, then_normed=True)),) * 2,
    )
)
TIER = {"kv_tiers": "memory:1GiB"}
WINDOW = {"window": 64, "attention_sinks": 4}
OMIT = "must be left out: .*"


@pytest.mark.parametrize(
    ("spec", "hardware", "options", "error"),
    [
        (AWQ, PC, {"quantization": "gptq"}, "quantization: is gptq, but the files .* as awq"),
        (SMALL, PC, {"max_model_len": 200_000}, "max_model_len: .*context of 131072"),
        (SMALL, PC, {"device": "cuda"}, "device: .*CUDA devices: none"),
        (SMALL, SERVER, {"device": "cuda:1"}, "device: .*CUDA devices: cuda:0"),
        (SMALL, PC, {"policy": "static", "batch_size": 9, "max_num_seqs": 8}, "batch_size: .*most"),
        (SMALL, PC, {"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_seqs: .*at most"),
        (
            *(SMALL, PC),
            {"policy": "static", "batch_size": 9, "max_num_batched_tokens": 4},
            "batch_size: .*at most",
        ),
        (
            *(STATES, PC),
            {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (3, 4)},
            "kv_cache_dtype_skip_layers: must name layers with attention, not 4",
        ),
        (
            *(SMALL, TWO_GPUS),
            {"device": "cuda", "tensor_parallel_size": 2, **TIER},
            f"kv_tiers: {OMIT}of several GPUs",
        ),
        (SMALL, PC, {"enable_prefix_caching": False, **TIER}, f"kv_tiers: {OMIT}enable_prefix_"),
        (DEEPSEEK, PC, WINDOW, f"window: {OMIT} latent vectors"),
        (NARROWED, PC, WINDOW, f"window: {OMIT} all keys"),
        (LEARNED, PC, WINDOW, f"window: {OMIT} learned positions"),
        (TEMPERED, PC, WINDOW, f"window: {OMIT} scales queries"),
        (SCALED, PC, WINDOW, f"window: {OMIT} scales queries"),
        (NORMED, PC, WINDOW, f"window: {OMIT} normalises heads"),
        (TINY, PC, {"attention_sinks": 4}, "attention_sinks: must be 0 without a window, not 4"),
        (TINY, PC, {"window": 509, "attention_sinks": 4}, "window: .*at most 508 with 4 sinks"),
        (TINY, PC, {"window": 513}, "window: .*at most 512 with 0 sinks"),
    ],
)
def test_contradictions(
    spec: ModelSpec, hardware: Hardware, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{error}"):
        plan(spec, hardware, **options)


def test_texts_beyond_a_window_only_take_blocks_of_the_window() -> None:
    """Although a request may be far longer than the trained length."""
    options = {"window": 240, "attention_sinks": 4, "max_num_seqs": 8}
    short = plan(TINY, max_num_batched_tokens=64, **options)
    assert short.scheduler.max_model_len == 1 << 20
    each = 1 + -(-(239 + 64) // 16) + 1
    assert short.cache.num_blocks == 8 * each
    longer = plan(TINY, max_num_batched_tokens=64, max_model_len=1 << 23, **options)
    assert longer.cache.num_blocks == short.cache.num_blocks
    assert longer.memory.activations == short.memory.activations
    dense = plan(TINY, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64)
    # Of one request of the greatest length: its tokens, and its blocks twice.
    million = (1 << 20) * 4 + 2 * (1 << 20) // 16 * 4
    assert short.memory.overhead - dense.memory.overhead < 1.2 * million
    assert {rope.most_keys for rope in short.model.ropes} == {244}
    plain = plan(TINY, window=512)
    assert {w.sinks for w in plain.model.windows if w} == {0}


def test_a_window_is_for_layers_that_see_all_keys() -> None:
    for spec in (GEMMA, STATES):
        large = replace(PC, memory_limit=64 * GIB)
        streamed = plan(spec, large, window=240, attention_sinks=4).model.layers
        for before, after in zip(spec.layers, streamed, strict=True):
            full = before.attends and before.window is None
            assert after.window == (Window(240, sinks=4) if full else before.window)


def test_sinks_are_for_triton_and_not_for_a_draft_model() -> None:
    gpu = plan(SMALL, replace(SERVER, triton=True), window=1024, attention_sinks=4)
    assert (gpu.runner.kernels, gpu.runner.attention_backend) == ("triton", "triton")
    source = DraftSource(spec=SMALL)
    config = EngineConfig(spec_method="draft_model", spec_model="x", window=64, attention_sinks=4)
    with pytest.raises(ConfigError, match="spec_method: .* see every key"):
        resolve(config, SMALL, PC, "/models/x", source)


def budgets(*tokens: int) -> KVBudgets:
    facts = TINY.architecture, "", "entropy", 0.25, 512, "", 0
    return KVBudgets(*facts, scores=(1.0,) * len(tokens), budgets=tokens)


def test_budgets_make_groups_and_their_prompts_are_planned_whole() -> None:
    options = EngineConfig(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64)
    dense = resolve(options, TINY, PC, "/models/x")
    found = resolve(options, TINY, PC, "/models/x", budgets=budgets(64, 128))
    assert [g.spec.budget and g.spec.budget.tokens for g in found.cache.groups] == [64, 128]
    whole = 512 // 16
    assert found.cache.max_blocks(512, 64) == whole + 4 + 1 + whole + 8 + 1
    assert found.cache.max_blocks(60, 64) == 2 * 4
    # One whole prompt, those of two steps, and what the other three requests keep until a cut.
    first, second = whole + 5 + 3 * (20 + 1) + 8, whole + 9 + 3 * (24 + 1) + 8
    assert found.cache.num_blocks == first + second < 4 * found.cache.max_blocks(512, 64)
    ring = 4 * TINY.query_width * 32 * 4 * 2  # of four requests in two layers
    assert found.memory.kv_cache > ring
    assert found.memory.activations > dense.memory.activations


def test_budgets_are_for_gpus_too_and_not_for_every_model() -> None:
    gpu = replace(SERVER, triton=True)
    found = resolve(EngineConfig(), TINY, gpu, "/models/x", budgets=budgets(64, 64))
    assert found.runner.attention_backend == "triton"
    assert [g.spec.budget and g.spec.budget.tokens for g in found.cache.groups] == [64]
    with pytest.raises(ConfigError, match="kv_budget: must be left out: .* all keys"):
        resolve(EngineConfig(), NARROWED, PC, "/models/x", budgets=budgets(64, 64))


def test_a_server_may_use_its_cpu() -> None:
    assert plan(SMALL, SERVER, device="cpu").runner.device == "cpu"


def test_static_batches_fit_the_running_requests() -> None:
    assert plan(policy="static", batch_size=300).scheduler.max_num_seqs >= 300
    assert plan(policy="static").scheduler.batch_size == 8
    for few in ({"max_num_seqs": 4}, {"max_num_batched_tokens": 4}):
        assert plan(policy="static", **few).scheduler.batch_size == 4


def test_torch_built_for_cuda_needs_more_even_on_a_cpu() -> None:
    plain = plan(hardware=PC, max_num_seqs=8).memory.overhead
    cuda = plan(hardware=replace(PC, cuda_build=True), max_num_seqs=8).memory.overhead
    assert cuda == plain + CUDA_BUILD_BYTES


def test_the_memory_tier_of_a_gpu_is_in_the_memory_of_the_host() -> None:
    options = {"device": "cuda", "max_model_len": 4096}
    without = resolve(EngineConfig(**options), SMALL, SERVER, "m")
    tiered = resolve(EngineConfig(kv_tiers="memory:8GiB", **options), SMALL, SERVER, "m")
    assert tiered.memory == without.memory
    assert tiered.cache.num_blocks == without.cache.num_blocks
    assert tiered.cache.tiers.memory
    for more in (
        {"kv_tiers": "memory:16GiB"},
        {"kv_tiers": "memory:8GiB", "data_parallel_size": 2},
    ):
        with pytest.raises(CapacityError, match="kv_tiers: must leave memory for the host"):
            resolve(EngineConfig(**options, **more), SMALL, TWO_GPUS, "m")

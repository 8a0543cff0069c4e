"""The kernels for each machine, and the reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.configs import PUBLIC, small
from helpers.planned import decision

from kvik.config.compute import choose_attention, choose_kernels, settled, torch_prompts
from kvik.config.config import EngineConfig, Notes, ResolvedConfig
from kvik.config.hardware import NATIVE_ISAS, Gpu, Hardware
from kvik.config.memory import TRITON_WIDENED, Footprint
from kvik.config.model_source import find_model
from kvik.config.resolve import resolve
from kvik.config.step_memory import StepSize
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.spec.engine_folder import Built

AVX2 = frozenset(("avx2", "fma"))
LAPTOP = Hardware("CPU", 4, 1 << 34, "RAM", isa=AVX2, native=True)
OLD = replace(LAPTOP, isa=frozenset())
ARM = replace(LAPTOP, isa=frozenset(("asimd",)))
BARE = replace(LAPTOP, native=False)
HOPPER = Gpu(0, "H200", 1 << 37, 1 << 37, (9, 0))
SERVER = replace(LAPTOP, gpus=(HOPPER,), triton=True)
TURING = replace(SERVER, gpus=(replace(HOPPER, name="T4", capability=(7, 5)),))
MODEL = read_model_spec(find_model(""))


@pytest.mark.parametrize(
    ("hardware", "device", "dtype", "kernels", "reason"),
    [
        (LAPTOP, "cpu", "bfloat16", "native", "C++; this CPU has avx2"),
        (LAPTOP, "cpu", "float32", "native", "C++; this CPU has avx2"),
        (ARM, "cpu", "bfloat16", "native", "C++; this CPU has neon"),
        (LAPTOP, "cpu", "float16", "torch", "native kernels have no float16"),
        (SERVER, "cuda:0", "bfloat16", "triton", "compiled for this GPU"),
        (SERVER, "cuda:0", "float16", "triton", "compiled for this GPU"),
        (SERVER, "cpu", "bfloat16", "native", "C++"),
        (replace(SERVER, triton=False), "cuda:0", "bfloat16", "torch", "pip install 'kvik[gpu]'"),
        (TURING, "cuda:0", "float16", "torch", "T4 has capability 7.5"),
        (OLD, "cpu", "bfloat16", "torch", "not known to have AVX2"),
        (BARE, "cpu", "bfloat16", "torch", "was there a C++20 compiler?"),
    ],
)
def test_chosen_by_facts(hardware, device, dtype, kernels, reason) -> None:
    notes = Notes()
    assert choose_kernels(EngineConfig(), hardware, MODEL, device, dtype, notes) == kernels
    assert notes.decisions[0].name == "kernels" and reason in notes.decisions[0].reason


def test_requested_kernels_are_used_even_if_slow() -> None:
    notes = Notes()
    config = EngineConfig(kernels="native")
    assert choose_kernels(config, OLD, MODEL, "cpu", "float32", notes) == "native"
    config = EngineConfig(kernels="torch")
    assert choose_kernels(config, LAPTOP, MODEL, "cpu", "float32", notes) == "torch"
    assert {note.reason for note in notes.decisions} == {"as asked"}


@pytest.mark.parametrize(
    ("kernels", "hardware", "device", "dtype"),
    [
        ("native", BARE, "cpu", "float32"),
        ("native", LAPTOP, "cpu", "float16"),
        ("native", SERVER, "cuda:0", "float32"),
        ("triton", SERVER, "cpu", "bfloat16"),
        ("triton", replace(SERVER, triton=False), "cuda:0", "bfloat16"),
        ("triton", TURING, "cuda:0", "float16"),
    ],
)
def test_asked_for_and_impossible(kernels, hardware, device, dtype) -> None:
    config = EngineConfig(kernels=kernels)
    with pytest.raises(ConfigError, match="^kernels: "):
        choose_kernels(config, hardware, MODEL, device, dtype, Notes())


@pytest.mark.parametrize(
    ("kernels", "block_size", "head_dim", "backend"),
    [
        ("native", 16, 64, "cpu"),
        ("native", 48, 256, "cpu"),
        ("native", 8, 64, "sdpa"),
        ("native", 16, 40, "sdpa"),
        ("native", 16, 528, "sdpa"),
        ("torch", 16, 64, "sdpa"),
    ],
)
def test_the_attention_backend_follows_the_kernels(kernels, block_size, head_dim, backend) -> None:
    spec = replace(read_model_spec(find_model("")), head_dim=head_dim)
    notes = Notes()
    config = EngineConfig(block_size=block_size)
    assert choose_attention(config, spec, kernels, "bfloat16", None, notes) == backend
    asked = replace(config, attention_backend="cpu")
    if backend == "cpu":
        assert choose_attention(asked, spec, kernels, "bfloat16", None, notes) == "cpu"
    else:
        with pytest.raises(ConfigError, match="^attention_backend: "):
            choose_attention(asked, spec, kernels, "bfloat16", None, notes)


MEASURED = replace(HOPPER, torch_prompts=((64, 4096), (128, 1024)))


@pytest.mark.parametrize(
    ("kernels", "gpu", "head_dim", "dtype", "kv", "asked", "expected", "least"),
    [
        ("triton", None, 128, "bfloat16", "auto", "auto", "triton", None),
        ("triton", None, 64, "bfloat16", "int4", "auto", "triton", None),
        ("triton", None, 10, "bfloat16", "int4", "auto", "sdpa", None),
        ("triton", None, 10, "bfloat16", "auto", "auto", "triton", None),
        ("triton", None, 512, "bfloat16", "auto", "auto", "triton", None),
        ("triton", None, 576, "bfloat16", "auto", "auto", "sdpa", None),
        ("triton", None, 128, "bfloat16", "auto", "sdpa", "sdpa", None),
        ("triton", None, 576, "bfloat16", "auto", "triton", ConfigError, None),
        ("triton", None, 128, "bfloat16", "auto", "cpu", ConfigError, None),
        ("torch", None, 128, "bfloat16", "auto", "triton", ConfigError, None),
        ("triton", MEASURED, 128, "bfloat16", "auto", "auto", "triton+sdpa", 1024),
        ("triton", MEASURED, 64, "float16", "fp16", "auto", "triton+sdpa", 4096),
        ("triton", MEASURED, 256, "bfloat16", "auto", "auto", "triton", None),
        ("triton", HOPPER, 128, "bfloat16", "auto", "auto", "triton", None),
        ("triton", MEASURED, 128, "float32", "auto", "auto", "triton", None),
        ("triton", MEASURED, 128, "bfloat16", "fp8", "auto", "triton", None),
        ("triton", MEASURED, 128, "bfloat16", "auto", "triton", "triton", None),
        ("triton", HOPPER, 128, "bfloat16", "bf16", "triton+sdpa", "triton+sdpa", 2048),
        ("triton", HOPPER, 128, "float32", "auto", "triton+sdpa", ConfigError, None),
        ("triton", HOPPER, 128, "bfloat16", "int8", "triton+sdpa", ConfigError, None),
        ("triton", HOPPER, 576, "bfloat16", "auto", "triton+sdpa", ConfigError, None),
    ],
)
def test_attention_on_a_gpu(kernels, gpu, head_dim, dtype, kv, asked, expected, least) -> None:
    """Torch computes prompts where it was measured to be faster."""
    notes, spec = Notes(), replace(MODEL, head_dim=head_dim)
    config = EngineConfig(attention_backend=asked, kv_cache_dtype=kv)
    if expected is ConfigError:
        with pytest.raises(ConfigError, match="^attention_backend: "):
            choose_attention(config, spec, kernels, dtype, gpu, notes)
        return
    assert choose_attention(config, spec, kernels, dtype, gpu, notes) == expected
    assert torch_prompts(expected, spec, gpu) == least


def latent(**changes: object) -> ModelSpec:
    dense = {"first_k_dense_replace": 4, "num_experts_per_tok": 2}
    return ModelSpec.from_config(small(architectures=["DeepseekV2ForCausalLM"], **dense, **changes))


@pytest.mark.parametrize(
    ("spec", "kernels", "kv", "asked", "expected"),
    [
        (latent(), "native", "auto", "auto", "cpu"),
        (latent(), "native", "int8", "auto", "cpu"),
        (latent(kv_lora_rank=40), "native", "auto", "auto", "sdpa"),
        (latent(), "triton", "auto", "auto", "triton+sdpa"),
        (latent(v_head_dim=264), "triton", "auto", "auto", "triton"),
        (latent(v_head_dim=264), "triton", "auto", "triton+sdpa", ConfigError),
        (latent(), "triton", "int8", "auto", "sdpa"),
        (latent(), "triton", "auto", "triton+sdpa", "triton+sdpa"),
    ],
)
def test_attention_over_latent_vectors(spec, kernels, kv, asked, expected) -> None:
    notes, config = Notes(), EngineConfig(kv_cache_dtype=kv, attention_backend=asked)
    if expected is ConfigError:
        with pytest.raises(ConfigError):
            choose_attention(config, spec, kernels, "bfloat16", MEASURED, notes)
        return
    for gpu in (MEASURED, HOPPER):  # measured or not
        assert choose_attention(config, spec, kernels, "bfloat16", gpu, notes) == expected
        least = 1024 if expected == "triton+sdpa" else None
        assert torch_prompts(expected, spec, gpu) == least


def test_latent_vectors_in_fp32_are_not_converted() -> None:
    found = choose_attention(EngineConfig(), latent(), "triton", "float32", HOPPER, Notes())
    assert found == "triton"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("kv_cache_dtype", "int8"), ("block_size", 6), ("spec_method", "medusa")),
        ("window", 64),
    ],
)
def test_what_entries_that_sum_up_tokens_do_not_allow(field: str, value: object) -> None:
    spec = ModelSpec.from_config(PUBLIC["DeepSeek-V4-Flash"])
    more = {"spec_model": "heads"} if field == "spec_method" else {}
    with pytest.raises(ConfigError, match=rf"^{field}: .* entries that sum up tokens"):
        resolve(EngineConfig(**{field: value, **more}), spec, LAPTOP, "somewhere")


def test_keys_in_pools_are_no_nodes_of_trees() -> None:
    spec = ModelSpec.from_config(PUBLIC["GLM-5.3-Flash"])
    config = EngineConfig(spec_method="medusa", spec_model="heads")
    with pytest.raises(ConfigError, match="^spec_method: .* pools that sum up tokens"):
        resolve(config, spec, LAPTOP, "somewhere")


def test_entries_are_read_by_triton() -> None:
    spec = ModelSpec.from_config(PUBLIC["DeepSeek-V4-Flash"])
    found = choose_attention(EngineConfig(), spec, "triton", "bfloat16", HOPPER, Notes())
    assert found == "triton"


def test_latent_vectors_are_not_stored_in_four_bits() -> None:
    with pytest.raises(ConfigError, match="^kv_cache_dtype: int4 cannot store latent vectors"):
        resolve(EngineConfig(kv_cache_dtype="int4"), latent(), LAPTOP, "somewhere")


@pytest.mark.parametrize(("group", "kernels"), [(8, "torch"), (64, "triton")])
def test_small_groups_are_multiplied_by_torch(group: int, kernels: str) -> None:
    stored = {"quant_method": "gptq", "bits": 4, "group_size": group}
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    model = small(torch_dtype="float16", quantization_config=stored, **sizes)
    spec, notes = ModelSpec.from_config(model), Notes()
    config = EngineConfig()
    assert choose_kernels(config, SERVER, spec, "cuda:0", "float16", notes) == kernels
    assert ("groups of 8" in notes.decisions[0].reason) == (group == 8)


def test_memory_of_attention_in_place_does_not_depend_on_the_context() -> None:
    """sdpa gathers keys and makes masks."""

    def activations(backend: str, max_model_len: int) -> int:
        size = StepSize(max_model_len, max_num_seqs=8, max_num_batched_tokens=512)
        footprint = Footprint(
            MODEL, "bfloat16", "none", "cuda", backend, 16, runtime=0, kernels="triton"
        )
        return footprint.activations(size)

    assert activations("triton", 1 << 17) == activations("triton", 1 << 10)
    assert activations("sdpa", 1 << 17) > activations("triton", 1 << 17)


def test_memory_for_widened_weights_is_in_the_plan() -> None:
    size = StepSize(1 << 10, max_num_seqs=8, max_num_batched_tokens=512)

    def overhead(quantization: str, kernels: str) -> int:
        plan = Footprint(
            MODEL, "bfloat16", quantization, "cuda", "sdpa", 16, runtime=0, kernels=kernels
        )
        return plan.overhead(size)

    assert overhead("int4", "triton") == overhead("int4", "torch") + TRITON_WIDENED
    assert overhead("none", "triton") == overhead("none", "torch")


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_products_of_triton_make_no_copies_in_fp32(quantization: str) -> None:
    spec = ModelSpec.from_config(PUBLIC["llama-3.1-8b"])
    size = StepSize(1 << 13, max_num_seqs=8, max_num_batched_tokens=8192)
    # Gate, up, their product, and three copies of the residual stream.
    least = size.max_num_batched_tokens * 3 * (spec.inner_width + spec.hidden_size) * 2

    def activations(kernels: str) -> int:
        plan = Footprint(
            spec, "bfloat16", quantization, "cuda", "triton", 16, runtime=0, kernels=kernels
        )
        return plan.activations(size)

    assert least <= activations("triton") <= 1.6 * least < activations("torch") / 2


def test_an_engine_folder_for_triton_needs_it() -> None:
    built = Built("triton", "gpu-1", "bfloat16", "none", 1 << 20)
    assert settled(EngineConfig(), built, SERVER).kernels == "triton"
    with pytest.raises(ConfigError, match="^kernels: .*Triton is not installed: pip install"):
        settled(EngineConfig(), built, LAPTOP)


def test_the_best_instruction_set_of_a_cpu() -> None:
    for name, flags in NATIVE_ISAS.items():
        assert replace(LAPTOP, isa=flags).native_isa == name
    assert OLD.native_isa == "portable"


GIB = 1 << 30
PC = Hardware("PC", 8, 64 * GIB, "RAM", frozenset({"avx2", "fma", "avx512_bf16"}), native=True)


def llama(head_dim: int = 128) -> ModelSpec:
    """Return Llama-3-8B, or one with other heads."""
    return ModelSpec.from_config(PUBLIC["llama-3-8b"] | {"head_dim": head_dim})


def plan(spec: ModelSpec | None = None, **options: object) -> ResolvedConfig:
    return resolve(EngineConfig(**options), spec or llama(), PC, "somewhere")


@pytest.mark.parametrize(
    ("format", "head_dim", "times"),
    [
        ("fp32", 128, 0.5),
        ("bf16", 128, 1.0),
        ("fp16", 128, 1.0),
        ("fp8", 128, 256 / 130),
        ("int8", 128, 256 / 130),
        ("int8", 64, 128 / 66),
        ("int4", 128, 256 / 66),
        ("int4", 64, 128 / 34),
    ],
)
def test_the_same_memory_holds_more_tokens(format: str, head_dim: int, times: float) -> None:
    """About twice as many in eight bits and four times as many in four, less the scales."""
    room = {"kv_cache_memory": GIB, "max_num_seqs": 256, "max_model_len": 2048}
    plain = plan(llama(head_dim), **room)
    found = plan(llama(head_dim), kv_cache_dtype=format, **room)
    assert found.cache.pool_size / plain.cache.pool_size == pytest.approx(times, rel=2e-3)
    assert found.memory.kv_cache <= GIB


def test_skipped_layers_count_in_full() -> None:
    room = {"num_blocks": 1000, "kv_cache_dtype": "int8"}
    all_small = plan(**room).memory.kv_cache
    two_large = plan(**room, kv_cache_dtype_skip_layers=(0, 31)).memory.kv_cache
    vectors = 1001 * 16 * 2 * 8  # per layer
    assert all_small == 32 * vectors * 130
    assert two_large == all_small + 2 * vectors * (256 - 130)
    every = plan(**room, kv_cache_dtype_skip_layers=tuple(range(32)))
    assert every.memory.kv_cache == plan(num_blocks=1000).memory.kv_cache


def test_the_default_is_the_models_dtype() -> None:
    assert decision(plan(), "kv_cache_dtype") == ("bfloat16", "the model's")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (
            {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (0, 32)},
            "kv_cache_dtype_skip_layers",
        ),
        ({"kv_cache_dtype_skip_layers": (0,)}, "kv_cache_dtype_skip_layers"),
        ({"kv_cache_dtype": "fp16", "attention_backend": "cpu"}, "attention_backend"),
    ],
)
def test_impossible_kv_formats_are_refused(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        plan(**options)


def test_four_bits_need_pairs() -> None:
    odd = replace(llama(), head_dim=5)
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: int4 needs heads of even size, not 5"):
        plan(odd, kv_cache_dtype="int4")


def test_another_backend_serves_formats_that_native_kernels_lack() -> None:
    value, reason = decision(plan(kv_cache_dtype="fp16"), "attention_backend")
    assert value == "sdpa" and "no fp16" in reason
    assert decision(plan(kv_cache_dtype="int4"), "attention_backend")[0] == "cpu"

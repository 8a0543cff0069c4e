"""The part of one of several devices or processes, and their communication."""

from __future__ import annotations

import pytest
from helpers.configs import PUBLIC
from helpers.public_configs import config
from helpers.public_configs import public_shape as shape

from kvik.errors import ConfigError
from kvik.kernels.cut_ops import cuts_inputs
from kvik.planner.families import shape_from_config
from kvik.planner.parallel import (
    can_share,
    check_parallel,
    collectives,
    own_rows,
    shares,
    stage_runs,
    stages,
    together,
    unevenness,
)
from kvik.planner.shape import ModelShape
from kvik.spec.shares import Between


def size(part: ModelShape, role: str) -> tuple[int, int, int]:
    (matrix,) = (m for m in part.matrices if m.role == role)
    return matrix.count, matrix.inputs, matrix.outputs


def fullest(model: ModelShape, tp: int, pp: int = 1, weights: str = "") -> ModelShape:
    """Return the part on the fullest of `tp` times `pp` devices."""
    stored = weights or model.stored
    return max(shares(model, tp, pp, stored), key=lambda part: part.weight_bytes(stored))


def test_a_single_device_has_the_whole_model() -> None:
    whole = shape("llama-3-70b")
    assert fullest(whole, 1) is whole


def test_llama_3_70b_on_eight() -> None:
    part = fullest(shape("llama-3-70b"), 8)
    assert size(part, "qkv") == (80, 8192, 8 * 128 + 2 * 128)  # eight query heads, one KV head
    assert size(part, "o") == (80, 8 * 128, 8192)
    assert size(part, "gate_up") == (80, 8192, 2 * 28672 // 8)
    assert size(part, "down") == (80, 28672 // 8, 8192)
    assert size(part, "head") == (1, 8192, 128256 // 8)
    assert size(part, "embedding") == (1, 8192, 128256)
    matrices = 80 * 8192 * (1280 + 1024 + 3 * 3584) + 8192 * (16032 + 128256)
    norms = 2 * 80 * 8192 + 8192
    assert part.weight_bytes("bf16") == 2 * (matrices + norms)
    assert part.kv_bytes_per_token("bf16") == 327_680 // 8
    assert part.matmul_flops(1, 1) == 2 * (matrices - 8192 * 128256)


def test_kv_heads_are_copied_where_there_are_too_few() -> None:
    part = fullest(shape("llama-3-70b"), 16)
    assert size(part, "qkv") == (80, 8192, 4 * 128 + 2 * 128)
    assert part.kv_bytes_per_token("bf16") == 327_680 // 8
    assert part.kv_bytes_per_token("int8") == 80 * 2 * (128 + 2)


def test_inputs_need_not_divide() -> None:
    """The fullest device has one tile more: 4,864 inner activations on 14 devices."""
    whole = shape("qwen2.5-0.5b")
    (down,) = (m for m in fullest(whole, 14).matrices if m.role == "down")
    assert down.inputs == 11 * 32 and 13 * 352 < 4864 < 14 * 352


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_no_group_of_weights_is_divided(tp: int) -> None:
    """2,880 channels are 90 groups of 32; the format of a part is that of the whole."""
    whole = shape("gpt-oss-20b")
    parts = {m.role: m for m in fullest(whole, tp).matrices}
    kind = whole.kind_of(next(m for m in whole.matrices if m.role == "expert_down"), "mxfp4")
    assert kind is not None
    between = Between(2880, 32)
    most = max(end - first for first, end in (between.of_rank(rank, tp) for rank in range(tp)))
    assert parts["expert_down"].inputs == most == parts["expert_gate_up"].outputs // 2
    assert whole.kind_of(parts["expert_down"], "mxfp4") == kind


def test_heads_that_divide_a_group_divide_outputs() -> None:
    """Seven heads of 64 are three and a half groups of 128."""
    whole = shape("qwen2.5-0.5b")
    (o,) = (m for m in fullest(whole, 2, weights="int4").matrices if m.role == "o")
    assert (o.inputs, o.outputs) == (896, 448)


@pytest.mark.parametrize("ordered", [False, True])
def test_ordered_inputs_are_not_divided(ordered: bool) -> None:
    """As in the engine: inputs in act-order (desc_act of GPTQ) stay together."""
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": ordered}
    whole = shape_from_config({**config("llama-3.1-8b"), "quantization_config": stored}, "m")
    kind = whole.kind_of(next(m for m in whole.matrices if m.role == "o"), "int4")
    between = Between(32, 128, 8, read=True)
    divides = cuts_inputs(kind, 4096, [between.of_rank(rank, 2) for rank in range(2)])
    parts = {m.role: m for m in fullest(whole, 2).matrices}
    assert (parts["o"].inputs, parts["o"].outputs) == ((2048, 4096) if divides else (4096, 2048))
    assert parts["down"].inputs == (7168 if divides else 14_336)
    assert parts["gate_up"].outputs == 14_336


def test_the_latent_of_mla_is_copied_and_its_projections_are_cut() -> None:
    whole = shape("deepseek-v3")
    part = fullest(whole, 8)
    assert part.kv_bytes_per_token("bf16") == whole.kv_bytes_per_token("bf16") == 70_272
    for role in ("q_down", "kv_down", "router"):
        assert size(part, role) == size(whole, role)
    assert size(part, "kv_up") == (61, 512, 16 * 256)
    assert size(part, "expert_down") == (58 * 256, 2048 // 8, 7168)


def test_whole_experts_are_not_divided() -> None:
    """Of 128 experts one of three devices has 43; a token chooses as many of each third."""
    whole = shape("qwen3-30b-a3b")
    (part,) = shares(whole, 3, 1, "bf16", whole_experts=True)
    assert size(part, "expert_down") == (48 * 43, 768, 2048)
    assert size(part, "o") == size(fullest(whole, 3), "o")
    (down,) = (m for m in part.matrices if m.role == "expert_down")
    assert down.active_parameters == 48 * 43 * 8 // 128 * 768 * 2048
    slices, experts = (collectives(whole, exact=True, whole_experts=w) for w in (False, True))
    assert (slices.layer, experts.layer) == (6, 5)  # and their outputs, each in fp32
    assert experts.numbers == slices.numbers - 8 * 768 - 2048 + 2 * 8 * 2048
    for name, tp, message in (
        ("llama-3-70b", 2, "must be left out: LlamaForCausalLM has no experts"),
        ("qwen3-30b-a3b", 1, "needs --tp from 2 to 128, the experts of a layer, not 1"),
        ("mixtral-8x7b-v0.1", 9, "needs --tp from 2 to 8, the experts of a layer, not 9"),
    ):
        with pytest.raises(ConfigError, match=f"^expert_parallel: {message}"):
            check_parallel(shape(name), tp, 1, whole_experts=True)
        assert not can_share(shape(name), tp, whole_experts=True)


def test_stages_have_whole_layers_and_one_end() -> None:
    """Embedding and head are as large as 1.2 layers each, so the middle stage has more layers."""
    parts = shares(shape("llama-3-70b"), 1, 3, "bf16")
    assert [part.num_layers for part in parts] == [26, 28, 26]
    for part, ends in zip(parts, (["embedding"], [], ["head"]), strict=True):
        assert part.kv_bytes_per_token("bf16") == part.num_layers * 2 * 8 * 128 * 2
        assert size(part, "qkv")[0] == part.num_layers
        assert [m.role for m in part.matrices if m.role in ("embedding", "head")] == ends
    assert sum(part.parameters for part in parts) == shape("llama-3-70b").parameters
    assert fullest(shape("llama-3-70b"), 1, 3) == parts[1]


def test_a_stage_of_experts_has_all_of_a_layer() -> None:
    part = fullest(shape("mixtral-8x7b-v0.1"), 1, 4)
    assert size(part, "expert_down")[0] == 8 * 8
    tied = fullest(shape("gemma-2-9b"), 1, 2)
    assert size(tied, "head") == (1, 3584, 256_000)


def test_no_stage_has_more_than_its_share() -> None:
    """61 layers, three of them dense, over eight stages: by bytes, not by number."""
    whole, pp = shape("deepseek-v3"), 8
    parts = shares(whole, 1, pp, "fp8")
    assert sum(part.num_layers for part in parts) == 61 and parts[0].num_layers > 8
    sizes = [part.weight_bytes("fp8") for part in parts]
    assert sum(sizes) == whole.weight_bytes("fp8")
    expert_layer = 256 * 3 * 7168 * 2048
    assert max(sizes) - min(sizes) < 1.1 * expert_layer


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "gemma-2-9b", "gemma-4-31b", "qwen2.5-72b", "gpt2"]
)
def test_stages_together_have_the_whole_model(name: str) -> None:
    """A tied embedding counts twice."""
    whole = shape(name)
    runs = stage_runs(whole, 4, "bf16")
    parts = stages(whole, runs)
    head = sum(m.parameters for m in whole.matrices if m.role == "head")
    assert sum(p.parameters for p in parts) == whole.parameters + whole.tied * head
    assert sum(p.active_parameters for p in parts) == whole.active_parameters
    assert sum(p.kv_bytes_per_token("int8") for p in parts) == whole.kv_bytes_per_token("int8")
    assert unevenness(whole, runs[:1]) == 1.0 < unevenness(whole, runs) < 1.6


def test_caches_count_in_the_division_into_stages() -> None:
    """With caches, the table of 262,208 tokens has less weight."""
    gemma = shape("gemma-3-4b")
    lengths = [len(run) for run in stage_runs(gemma, 4, "int4")]
    cached = [len(run) for run in stage_runs(gemma, 4, "int4", "bf16", 131_072)]
    assert lengths == [2, 15, 15, 2] and cached == [8, 9, 9, 8]


def test_layers_that_share_caches_are_in_one_stage() -> None:
    """The last 20 of 35 layers read the caches of two layers before them."""
    with pytest.raises(ConfigError, match=r"^pp: cannot be 20: 35 layers .* into 14 at most"):
        check_parallel(shape("gemma-4-e2b"), 1, 20)
    runs = stage_runs(shape("gemma-4-e2b"), 2, "bf16")
    assert runs[1].start <= 13


# The exact cut, for processes of a CPU.


@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-0.5b", "deepseek-v2-lite", "gpt2"])
def test_processes_have_each_row_once(name: str, tp: int) -> None:
    """In tiles of 32, so that some have one tile more; tables are whole in each."""
    whole = shape(name)
    for matrix in whole.matrices:
        rows = [own_rows(matrix, whole, rank, tp).outputs for rank in range(tp)]
        if matrix.multiplied:
            assert sum(rows) == matrix.outputs
            piece = matrix.outputs // whole.num_heads if matrix.role == "kv_up" else 32
            assert max(rows) - min(rows) <= piece
        else:
            assert set(rows) == {matrix.outputs}


@pytest.mark.parametrize(
    ("name", "tp", "copies"),
    [
        ("llama-3.2-1b", 2, 1.0),  # eight key heads
        ("llama-3.2-1b", 16, 2.0),
        ("qwen2.5-0.5b", 3, 1.5),  # one of two heads is in two processes
        ("deepseek-v2-lite", 4, 4.0),
    ],
)
def test_key_heads_in_several_processes_are_read_by_each(name: str, tp: int, copies: float) -> None:
    whole = shape(name)
    once, every = (s.kv_bytes_per_token("bf16") for s in (whole, together(whole, tp)))
    assert every == copies * once
    assert together(whole, tp).attention_flops(1, 100) == whole.attention_flops(1, 100)


def test_exchanges_by_hand() -> None:
    """After q, k and v, attention, output, gate with up, and down of each layer; and after the
    head, which also serves as the embedding."""
    found = collectives(shape("llama-3.2-1b"), exact=True)
    assert (found.kind, found.layer, found.count) == ("exchange", 5, 5 * 16 + 2)
    assert found.numbers == 3072 + 2048 + 2048 + 8192 + 2048
    assert collectives(shape("llama-3-70b"), exact=True).count == 5 * 80 + 1  # a separate embedding
    fast = collectives(shape("llama-3-70b"), exact=False)
    assert (fast.kind, fast.layer, fast.count, fast.numbers) == ("all-reduce", 2, 160, 2 * 8192)
    single = shape("nemotron-3-nano-30b-a3b")  # layers of one part
    assert collectives(single, exact=False).count == single.num_layers == 52


@pytest.mark.parametrize(
    ("name", "tp", "pp", "field", "message"),
    [
        ("llama-3-70b", 0, 1, "tp", "must be an integer in"),
        ("llama-3-70b", 1, 81, "pp", "must be at most the 80 layers, not 81"),
        ("gemma-2-9b", 1, -1, "pp", "must be an integer in"),
        ("llama-3-70b", 65, 1, "tp", "must be at most the 64 query heads, not 65"),
    ],
)
def test_impossible_divisions(name: str, tp: int, pp: int, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: .*{message}"):
        check_parallel(shape(name), tp, pp)
    assert not can_share(shape(name), tp, pp)
    assert can_share(shape(name), 2)
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        check_parallel(shape(name), tp, pp, exact=True)


def test_divisions_of_the_engine() -> None:
    """Groups of heads, and layers that choose experts by the token, are not divided."""
    model = shape_from_config(PUBLIC["DeepSeek-V4-Flash"], "v4")
    assert can_share(model, 8, 41) and not can_share(model, 9) and not can_share(model, 1, 42)
    assert stage_runs(model, 41, "bf16")[0] == range(3)


def test_processes_of_one_machine_are_limited() -> None:
    """Heads need not be divisible."""
    check_parallel(shape("llama-3-70b"), 7, 3, exact=True)
    with pytest.raises(ConfigError, match=r"^tp: must be an integer in \[1, 64\]"):
        check_parallel(shape("llama-3-70b"), 65, 1, exact=True)


@pytest.mark.parametrize(
    ("name", "tp", "heads", "kv_heads"),
    [("llama-3-70b", 3, 24, 3), ("llama-3-70b", 12, 8, 1), ("qwen2.5-0.5b", 7, 3, 1)],
)
def test_heads_need_not_divide(name: str, tp: int, heads: int, kv_heads: int) -> None:
    """The fullest device has the share of `HeadShare`, as in the engine."""
    whole = shape(name)
    part = fullest(whole, tp)
    assert (part.num_heads, part.num_kv_heads) == (heads, kv_heads)
    pair = whole.head_dim + whole.v_head_dim
    outputs = heads * whole.head_dim + kv_heads * pair
    assert [m.outputs for m in part.matrices if m.role == "qkv"] == [outputs]
    assert [m.inputs for m in part.matrices if m.role == "o"] == [heads * whole.head_dim]

"""The reference compared with its definitions, written element by element in Python."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.kernel_cases import filled_matrix
from transformers import GptOssConfig
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from kvik.kernels.ops import Penalties
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.rounding import round_int4, round_int8
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import Activation, Weight, float_weight
from kvik.spec.weight_kind import WeightKind


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(x: torch.Tensor, weight: torch.Tensor) -> list[list[float]]:
    return [
        [sum(a * b for a, b in zip(row, w, strict=True)) for w in weight.tolist()]
        for row in x.tolist()
    ]


def test_linear_adds_bias_then_activates_then_adds_the_residual() -> None:
    x, w, bias, residual = normal(3, 5), normal(4, 5, seed=1), normal(4, seed=2), normal(3, 2)
    matrix = filled_matrix(REFERENCE, float_weight(w), bias, "silu_and_mul", torch.float32)
    assert (matrix.spec.inputs, matrix.spec.outputs) == (5, 2)
    found = REFERENCE.linear(x, matrix, residual)
    for row, out, add in zip(product(x, w), found.tolist(), residual.tolist(), strict=True):
        y = [v + b for v, b in zip(row, bias.tolist(), strict=True)]
        for i in range(2):
            gated = y[i] / (1 + math.exp(-y[i])) * y[2 + i]
            assert out[i] == pytest.approx(gated + add[i], rel=1e-5)


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_linear_rounds_once_to_the_matrix_dtype(activation: Activation | None) -> None:
    x, w, residual = (normal(*s, seed=i).bfloat16() for i, s in enumerate(((3, 8), (4, 8), (3, 4))))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = filled_matrix(REFERENCE, float_weight(w), None, activation, dtype)
        found[dtype] = REFERENCE.linear(x, matrix, residual)
        assert found[dtype].dtype == dtype
    y = torch.tensor(product(x, w))
    y = REFERENCE.activate(y, activation) if activation else y
    torch.testing.assert_close(found[torch.float32], y + residual.float())
    assert torch.equal(found[torch.bfloat16], found[torch.float32].bfloat16())


@pytest.mark.parametrize(
    "weight",
    [
        round_int8(normal(6, 64), quantize_activations=False),
        round_int4(normal(6, 64), 32),
        replace(round_int4(normal(6, 64), 32), kind=WeightKind("int4", 32), zeros=None),
    ],
)
def test_quantised_weights_multiply_like_their_dequantised_values(weight: Weight) -> None:
    x = normal(3, 64, seed=1)
    matrix = filled_matrix(REFERENCE, weight, None, None, torch.float32)
    expected = torch.tensor(product(x, weight.dequantized()))
    torch.testing.assert_close(REFERENCE.linear(x, matrix, None), expected, rtol=1e-4, atol=1e-5)
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(
        REFERENCE.matrix_rows(matrix, ids, torch.float32), weight.dequantized()[[5, 0, 5]]
    )


def test_w8a8_rounds_each_token() -> None:
    weight = round_int8(normal(6, 64), quantize_activations=True)
    x = normal(3, 64, seed=1) * torch.tensor([[1.0], [100.0], [0.0]])
    found = REFERENCE.linear(x, filled_matrix(REFERENCE, weight, None, None, torch.float32), None)
    for row, out in zip(x.tolist(), found, strict=True):
        scale = max(map(abs, row)) / 127 or 1.0
        rounded = torch.tensor([[round(v / scale) for v in row]], dtype=torch.float32)
        expected = torch.tensor(product(rounded, weight.dequantized())) * scale
        torch.testing.assert_close(out[None], expected, rtol=1e-4, atol=1e-4)


def test_largest_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf] * 3, [0.0, -1.0, torch.inf]])
    top, ids = REFERENCE.largest(logits.bfloat16())
    assert top.dtype == torch.float32 and ids.dtype == torch.int64
    assert top.tolist() == [3.0, -math.inf, math.inf] and ids.tolist() == [1, 0, 2]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms_round_once(name: str) -> None:
    x, *parts = (
        normal(*shape, seed=i).bfloat16() for i, shape in enumerate(((4, 64), (64,), (64,)))
    )
    parts = parts[: 1 if name == "rms_norm" else 2]
    norm = getattr(REFERENCE, name)
    found = norm(x.float() + 2, *(part.float() for part in parts), 0.1)
    expected = getattr(torch.nn.functional, name)(
        x.double() + 2, [64], *(part.double() for part in parts), eps=0.1
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(norm(x + 2, *parts, 0.1), norm((x + 2).float(), *parts, 0.1).bfloat16())


def test_rotary_matches_transformers() -> None:
    q, k, angle = normal(4, 3, 6), normal(4, 2, 6, seed=1), normal(4, 3, seed=2)
    both = torch.cat((angle, angle), -1)[None]
    rotation = torch.cat((angle.cos(), angle.sin()), -1)
    expected = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], both.cos(), both.sin()
    )
    found = REFERENCE.rotary(q, k, rotation)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b[0].transpose(0, 1))


def test_gates_with_limits_are_those_of_gpt_oss_and_step() -> None:
    gate, up = normal(3, 40) * 5, normal(3, 40, seed=1) * 5
    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=2, intermediate_size=2))
    expected = experts._apply_gate(torch.stack((gate, up), -1).flatten(1))
    sizes = {"n_routed_experts": 1, "hidden_size": 2, "moe_intermediate_size": 2}
    of_step = Step3p7Experts(Step3p7TextConfig(num_hidden_layers=1, **sizes), 7.0)
    joined = torch.cat((gate, up), -1)
    for ops in (REFERENCE, TORCH):
        torch.testing.assert_close(ops.activate(joined, "clamped_swiglu"), expected)
        found = ops.activate(joined, "clipped_swiglu")
        torch.testing.assert_close(found, of_step._apply_gate(joined))
    assert bool((gate > 7).any()) and bool((up.abs() > 7).any())


def test_gelu_tanh_is_near_the_exact_gelu() -> None:
    x = torch.linspace(-6, 6, 101)
    exact = torch.tensor([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()])
    found = REFERENCE.activate(x[None], "gelu_tanh")[0]
    torch.testing.assert_close(REFERENCE.activate(x[None], "gelu")[0], exact)
    assert (found - exact).abs().max() < 5e-4
    assert not torch.equal(found, exact)  # the tanh form, not the erf form
    assert found[80].item() == pytest.approx(
        0.5 * 3.6 * (1 + math.tanh(math.sqrt(2 / math.pi) * (3.6 + 0.044715 * 3.6**3))), rel=1e-5
    )


def test_store_kv_writes_its_positions_and_no_other() -> None:
    k, v = normal(3, 2, 4), normal(3, 2, 4, seed=1)
    caches = torch.zeros(2, 5, 8, 2, 4)
    REFERENCE.store_kv(k, v, caches[0], caches[1], torch.tensor([17, 0, 39]))
    for new, cache in zip((k, v), caches, strict=True):
        expected = torch.zeros(5, 8, 2, 4)
        expected[2, 1], expected[0, 0], expected[4, 7] = new
        assert torch.equal(cache, expected)


def test_copy_blocks_reads_before_it_writes() -> None:
    cache = torch.arange(4.0)[:, None].repeat(1, 3)
    REFERENCE.copy_blocks(cache, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert cache[:, 0].tolist() == [0, 0, 1, 3]


def penalised(
    logits: torch.Tensor, prompt: list[int], output: list[int], **values: float
) -> torch.Tensor:
    """Penalise one row between two that must not change."""
    vocab = logits.shape[0]
    in_prompt = torch.zeros(1, vocab, dtype=torch.bool)
    in_prompt[0, prompt] = True
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab)
    defaults = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
    columns = {k: torch.tensor([v]) for k, v in {**defaults, **values}.items()}
    batch = torch.stack((logits, logits, logits))
    penalties = Penalties(
        rows=torch.tensor([1]),
        seen=torch.tensor([0]),
        in_prompt=in_prompt,
        counts=counts[None].int(),
        **columns,
    )
    REFERENCE.penalize(batch, penalties)
    assert torch.equal(batch[0], logits) and torch.equal(batch[2], logits)
    return batch[1]


def test_repetition_matches_transformers() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0))
    prompt, output = [1, 2, 3, 3], [3, 7, 7, 39]
    for value in (0.5, 1.3, 10.0):
        expected = RepetitionPenaltyLogitsProcessor(value)(
            torch.tensor([prompt + output]), logits[None]
        )
        found = penalised(logits, prompt, output, repetition=value)
        torch.testing.assert_close(found, expected[0])


def test_frequency_and_presence_only_count_the_output() -> None:
    logits = torch.zeros(5)
    assert penalised(logits, [0, 1], [1, 2, 2], frequency=0.5).tolist() == [0, -0.5, -1, 0, 0]
    assert penalised(logits, [0, 1], [1, 2, 2], presence=0.5).tolist() == [0, -0.5, -0.5, 0, 0]


def test_repetition_comes_before_the_subtractions() -> None:
    found = penalised(torch.tensor([4.0, -4.0]), [], [0, 1], repetition=2.0, presence=1.0)
    assert found.tolist() == [1.0, -9.0]


def test_impossible_tokens_stay_impossible() -> None:
    found = penalised(torch.tensor([-torch.inf, 1.0]), [0], [0], repetition=0.5, frequency=-2.0)
    assert found[0] == -torch.inf

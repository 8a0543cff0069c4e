"""Perplexity, divergence and agreement of whole models, compared with transformers and plain
torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.optional_native import NATIVE
from helpers.tiny_models import save_tiny
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

import kvik
from kvik.config.config import EngineConfig
from kvik.errors import ConfigError, ModelError
from kvik.evaluate.quality import Quality, compared, losses, measure_quality
from kvik.evaluate.windows import held_out_texts
from kvik.text.tokenizer import Tokenizer

STORIES = Path(kvik.__file__).parent / "bundled" / "stories"
KERNELS = ("torch", "native") if NATIVE else ("torch",)
CPU = {"device": "cpu", "threads": 1, "dtype": "float32"}
CONTEXT = 48
VOCAB = 96


def save_tokenizer(folder: Path, *, bos: bool) -> None:
    """Save a tokenizer in which words w0, w1, ... are their numbers; token 1 is BOS."""
    words = {f"w{i}": i for i in range(VOCAB)}
    library = Library(models.WordLevel(words, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="w1 $A", special_tokens=[("w1", 1)]
        )
    library.save(str(folder / "tokenizer.json"))


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def drawn(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def logits_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([list(ids)])).logits[0].double()
    return found  # [tokens, vocab]


def logprobs(model: Any, ids: Sequence[int], first: int) -> torch.Tensor:
    """Return the logprobs of ids[first:] given all previous tokens, [tokens, vocab]."""
    return logits_of(model, ids)[first - 1 : -1].log_softmax(-1)


def own(table: torch.Tensor, ids: Sequence[int]) -> list[float]:
    """Return -log probability of the actual tokens."""
    return (-table.gather(1, torch.tensor(list(ids))[:, None])[:, 0]).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny(folder, "Llama", max_position_embeddings=CONTEXT)
    save_tokenizer(folder, bos=False)
    return folder, model


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Path, Any]) -> tuple[Path, Any]:
    """A model similar to the tiny one."""
    folder = tmp_path_factory.mktemp("other")
    model = save_tiny(folder, "Llama", max_position_embeddings=CONTEXT)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    model.save_pretrained(folder)
    save_tokenizer(folder, bos=False)
    return folder, model


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bos")
    model = save_tiny(folder, "Llama", max_position_embeddings=CONTEXT)
    save_tokenizer(folder, bos=True)
    return folder, model


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 5), (CONTEXT, CONTEXT), (7, 1)])
def test_losses_are_those_of_transformers(
    tiny: tuple[Path, Any], kernels: str, window: int, stride: int
) -> None:
    folder, model = tiny
    ids = drawn(100, seed=3)
    expected, end = [], 0
    for start in range(0, len(ids), stride):  # strided windows, in the usual way
        last = min(start + window, len(ids))
        fresh = max(end, start + 1)
        if fresh < last:
            table = logprobs(model, ids[start:last], fresh - start)
            expected += own(table, ids[fresh:last])
        end = last
        if last == len(ids):
            break
    config = EngineConfig(str(folder), kernels=kernels, max_num_batched_tokens=6, **CPU)
    found = measure_quality(config, [words(ids)], window=window, stride=stride)
    np.testing.assert_allclose(found.losses, expected, atol=2e-4)
    assert found.perplexity == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-4)
    assert (found.window, found.stride) == (window, stride)


def test_the_whole_context_can_be_read_at_once(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    ids = drawn(CONTEXT, seed=4)
    found = measure_quality(EngineConfig(str(folder), **CPU), [words(ids)])
    assert (found.window, found.num_scored) == (CONTEXT, CONTEXT - 1)
    np.testing.assert_allclose(found.losses, own(logprobs(model, ids, 1), ids[1:]), atol=2e-4)


def test_texts_are_separate_and_may_be_short(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    texts = [drawn(5, seed=6), [9], drawn(2, seed=7), drawn(30, seed=8)]
    expected = [x for ids in texts if ids[1:] for x in own(logprobs(model, ids, 1), ids[1:])]
    config = EngineConfig(str(folder), **CPU)
    found = measure_quality(config, [words(ids) for ids in texts], window=40)
    np.testing.assert_allclose(found.losses, expected, atol=2e-4)
    with pytest.raises(ConfigError, match="data: has no token to score"):
        measure_quality(config, [words([9])])


def test_every_window_begins_with_bos(with_bos: tuple[Path, Any]) -> None:
    folder, model = with_bos
    ids = drawn(20, seed=9)
    expected = []
    for start in range(0, 20, 7):  # seven and BOS are eight
        part = ids[start : start + 7]
        expected += own(logprobs(model, [1, *part], 1), part)
    found = measure_quality(EngineConfig(str(folder), **CPU), [words(ids)], window=8)
    assert found.num_scored == 20
    np.testing.assert_allclose(found.losses, expected, atol=2e-4)
    with pytest.raises(ConfigError, match="window: must be 2"):
        measure_quality(EngineConfig(str(folder), **CPU), [words(ids)], window=1)


@pytest.mark.parametrize("kernels", KERNELS)
def test_distance_is_that_of_the_whole_distributions(
    tiny: tuple[Path, Any], other: tuple[Path, Any], kernels: str
) -> None:
    ids = drawn(90, seed=10)
    p, q = (
        torch.cat([logprobs(model, ids[i : i + 40], 1) for i in range(0, 90, 40)])
        for _, model in (tiny, other)
    )
    config = EngineConfig(str(other[0]), kernels=kernels, max_num_batched_tokens=9, **CPU)
    reference = replace(config, model=str(tiny[0]), max_num_batched_tokens=16)
    found = measure_quality(config, [words(ids)], window=40, reference=reference)
    assert found.num_scored == len(p) == 87
    assert found.divergence == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert found.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert 0.3 < found.agreement < 1
    alone = measure_quality(config, [words(ids)], window=40)
    assert (alone.divergence, alone.agreement) == (None, None)
    np.testing.assert_allclose(found.losses, alone.losses, atol=2e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_bundled_model(kernels: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    (text,) = held_out_texts()
    ids = Tokenizer.load(STORIES).encode(text)[:600]
    text = Tokenizer.load(STORIES).decode(ids)
    expected = [
        x
        for start in range(0, 600, 256)
        for part in [ids[start : start + 256]]
        for x in own(logprobs(model, part, 1), part[1:])
    ]
    config = EngineConfig(kernels=kernels, **CPU)
    found = measure_quality(config, [text], window=256, reference=config)
    np.testing.assert_allclose(found.losses, expected, atol=1e-3)
    assert found.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)
    assert found.agreement == 1
    assert found.divergence == pytest.approx(0, abs=1e-12)


def test_progress_is_reported(tiny: tuple[Path, Any]) -> None:
    reports: list[tuple[int, int]] = []
    measure_quality(
        EngineConfig(str(tiny[0]), **CPU),
        [words(drawn(25, seed=11))],
        window=10,
        progress=lambda done, total: reports.append((done, total)),
    )
    assert reports == [(9, 22), (18, 22), (22, 22)]


def test_models_with_other_tokens_are_refused(
    tiny: tuple[Path, Any], with_bos: tuple[Path, Any]
) -> None:
    config = EngineConfig(str(tiny[0]), **CPU)
    text = words(drawn(25, seed=12))
    with pytest.raises(ConfigError, match="reference: .* splits the text into other tokens"):
        measure_quality(config, [text], reference=replace(config, model=str(with_bos[0])))
    with pytest.raises(ConfigError, match="reference: .* has 2048 tokens, the other model 96"):
        measure_quality(config, [text], reference=replace(config, model=""))


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        measure_quality(EngineConfig(str(tmp_path), **CPU), ["w5 w6 w7"])


def test_logits_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "Llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(3e38)  # its outputs overflow
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, bos=False)
    with pytest.raises(ModelError, match="weights: .* its logits are NaN"):
        measure_quality(EngineConfig(str(tmp_path), **CPU), ["w5 w6 w7"])


def test_windows_of_several_kv_groups(tmp_path: Path) -> None:
    """Layers with a window and layers without have separate blocks."""
    options = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    model = save_tiny(tmp_path, "Qwen2", max_position_embeddings=CONTEXT, **options)
    save_tokenizer(tmp_path, bos=False)
    kinds = json.loads((tmp_path / "config.json").read_text())["layer_types"]
    assert len(set(kinds)) == 2
    ids = drawn(40, seed=13)
    config = EngineConfig(str(tmp_path), block_size=4, max_num_batched_tokens=8, **CPU)
    found = measure_quality(config, [words(ids)])
    np.testing.assert_allclose(found.losses, own(logprobs(model, ids, 1), ids[1:]), atol=2e-4)


def test_zero_probability_of_a_token_gives_infinite_perplexity() -> None:
    assert Quality(8, 8, np.full(4, 1e4, np.float32)).perplexity == math.inf


# Losses, divergence and agreement compared with torch.


ROWS, VOCAB = 21, 50  # more rows than are widened at a time


@pytest.fixture
def logits() -> torch.Tensor:
    return 4 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def reference(logits: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2))
    return logits + 0.5 * noise


def test_losses(logits: torch.Tensor) -> None:
    ids = torch.arange(ROWS) % VOCAB
    expected = cross_entropy(logits.double(), ids, reduction="none")
    torch.testing.assert_close(losses(logits, ids), expected)


def test_divergence_is_from_the_reference_to_the_model(
    logits: torch.Tensor, reference: torch.Tensor
) -> None:
    divergence, agrees = compared(logits, reference)
    p, q = (x.double().log_softmax(-1) for x in (reference, logits))
    expected = kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(divergence, expected)
    other, _ = compared(reference, logits)
    assert not torch.allclose(divergence, other, rtol=1e-3)
    assert torch.equal(agrees, logits.argmax(-1) == reference.argmax(-1))
    assert 0 < int(agrees.sum()) < ROWS


def test_equal_models_do_not_differ(logits: torch.Tensor) -> None:
    # Softmax ignores a constant, except for rounding.
    divergence, agrees = compared(logits, logits + 3)
    assert float(divergence.abs().max()) < 1e-12
    assert bool(agrees.all())


def test_a_small_divergence_is_not_lost_in_rounding(logits: torch.Tensor) -> None:
    off = torch.zeros(VOCAB)
    off[3] = 1e-4
    found, _ = compared(logits, logits + off)
    p = logits.double().softmax(-1)[:, 3]
    expected = p * (1 - p) * 1e-8 / 2  # to second order
    torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-13)


def test_impossible_tokens(logits: torch.Tensor) -> None:
    masked = logits.clone()
    masked[:, 7] = -torch.inf
    same, _ = compared(masked, masked.clone())
    assert torch.equal(same, torch.zeros(ROWS, dtype=torch.float64))
    lost, _ = compared(masked, logits)  # tokens that the reference allows and the model does not
    assert bool(lost.isinf().all())
    assert bool(compared(logits, masked)[0].isfinite().all())

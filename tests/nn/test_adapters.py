"""LoRA adapters that requests choose, compared with models that have one merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import (
    Pairs,
    adapt_stacks,
    draw_pairs,
    linear_layers,
    write_adapter,
    write_merged,
)
from helpers.gguf_models import save_gguf
from helpers.optional_native import needs_native
from helpers.tiny_encoders import save_encoder
from helpers.tiny_families import ALL
from helpers.tiny_models import (
    GEMMA3N,
    IN_BLOCKS,
    INDEXED,
    LONGCAT,
    MINIMAX,
    ZAMBA2,
    save_tiny,
    tokens,
)
from safetensors.torch import load_file, save_file

from kvik import LLM, SamplingParams
from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.engine.output import RequestOutput
from kvik.errors import KvikError, ParamError
from kvik.files import ADAPTER_FILES
from kvik.launch import resolve_config
from kvik.model_files import model_files
from kvik.nn.checkpoint import SINGLE

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def asked(adapter: str = "", **changes: Any) -> SamplingParams:
    """Return parameters that show what the model computed at each token."""
    greedy = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    return SamplingParams(**{**greedy, "prompt_logprobs": 0, "adapter": adapter, **changes})


def scores(output: RequestOutput) -> torch.Tensor:
    """Return the log probabilities of the prompt's tokens and of the answer's."""
    (completion,) = output.outputs
    assert output.prompt_logprobs and completion.logprobs
    found = [*output.prompt_logprobs[1:], *completion.logprobs]
    return torch.tensor([entry.logprob for entry in found if entry])


def answers(model: Path, *params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """Return the answers to one prompt with several parameters, in one batch."""
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "num_blocks": 64, **options}
    with LLM(str(model), **options) as llm:
        return llm.generate([tokens(20)] * len(params), params)


def two_adapters(model: Path) -> dict[str, Pairs]:
    """Draw an adapter of all layers, and one of larger rank of some."""
    layers = linear_layers(model_files(model).spec())
    stored = load_file(model / SINGLE)
    layers = {name: size for name, size in layers.items() if f"{name}.weight" in stored}
    some = {name: size for i, (name, size) in enumerate(layers.items()) if i % 3 != 1}
    return {"all": draw_pairs(layers, 3), "some": draw_pairs(some, 5, seed=1)}


MORE = {
    "Gemma3n": GEMMA3N,
    "HYV4": {**INDEXED, "hidden_size": 64},
    "LongcatFlash": LONGCAT,
    "MiniMax": MINIMAX,
    "MiniMaxM3VL": IN_BLOCKS,
    "Zamba2": {**ZAMBA2, "use_shared_attention_adapter": True},
}


# One matrix for q, k and v or several; rows in another order; stored transposed; gates in between;
# latent vectors; experts beside; states.
@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "Qwen3", "Phi3", "GPT2", "GPTNeoX", "Falcon-two-norms", "Gemma2", "Cohere"),
        *("DeepseekV3", "Qwen3_5", "Qwen3Moe", "Lfm2", "NemotronH", "FalconH1", "Apertus"),
        *("Gemma3n", "HYV4", "MiniMax", "MiniMaxM3VL", "LongcatFlash", "Zamba2"),
    ],
)
def test_each_request_gets_the_answer_of_its_merged_model(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny(model, family.partition("-")[0], **{**ALL, **MORE}[family])
    drawn, folders, expected = two_adapters(model), {}, {}
    transposed = {"fan_in_fan_out": True} if family == "GPT2" else {}
    for name, pairs in drawn.items():
        folders[name] = write_adapter(tmp_path / name, pairs, **transposed)
        merged = write_merged(
            model, tmp_path / f"{name}-merged", pairs, transposed=bool(transposed)
        )
        expected[name] = scores(*answers(merged, asked()))
    expected[""] = scores(*answers(model, asked()))
    found = answers(model, *map(asked, ("all", "", "some", "all")), adapters=folders)
    for output, name in zip(found, ("all", "", "some", "all"), strict=True):
        torch.testing.assert_close(scores(output), expected[name], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(expected["all"], expected["some"], atol=0.1)
    assert not torch.allclose(expected["all"], expected[""], atol=0.1)


# Gate and up in one matrix or in two, interleaved, weighed inputs, without a gate, beside shared.
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((family, {}) for family in ("Mixtral", "GptOss", "NemotronH-experts", "DeepseekV3")),
        *((family, {}) for family in ("GraniteMoe", "Qwen3Moe")),
        ("Llama4", {"intermediate_size": 48}),
    ],
)
def test_each_request_gets_the_experts_of_its_merged_model(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    save_tiny(model, family.partition("-")[0], **{**ALL[family], **sizes})
    folders, expected = {}, {"": scores(*answers(model, asked()))}
    kinds = {"both": ("gate_up_proj", "up_proj", "down_proj"), "last": ("down_proj",)}
    for rank, (name, parameters) in enumerate(kinds.items(), 3):
        folders[name], merged = adapt_stacks(
            model, tmp_path, name, parameters=parameters, rank=rank, size=0.2
        )
        expected[name] = scores(*answers(merged, asked()))
    found = answers(model, *map(asked, ("both", "", "last", "both")), adapters=folders)
    for output, name in zip(found, ("both", "", "last", "both"), strict=True):
        torch.testing.assert_close(scores(output), expected[name], rtol=1e-3, atol=1e-3)
    for one, other in (("both", "last"), ("both", ""), ("last", "")):
        assert not torch.allclose(expected[one], expected[other], atol=0.05)


def test_experts_of_one_adapter_take_the_place_of_those_of_another(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny(model, "Qwen3Moe", **ALL["Qwen3Moe"])
    made = [
        adapt_stacks(model, tmp_path, name, parameters=parameters, rank=rank, size=0.2)[0]
        for name, parameters, rank in (
            ("both", ("gate_up_proj", "down_proj"), 4),
            ("last", ("down_proj",), 3),
            ("larger", ("down_proj",), 5),
        )
    ]
    options = {"dtype": "float32", "device": "cpu", "threads": 1}
    (expected,) = answers(model, asked("x"), adapters={"x": made[1]})
    with LLM(str(model), **options, adapters={"x": made[0]}) as llm:
        (before,) = llm.generate([tokens(20)], asked("x"))
        llm.unload_adapter("x")
        with pytest.raises(ParamError, match="at most 4 fits"):
            llm.load_adapter("x", made[2])
        llm.load_adapter("x", made[1])
        (found,) = llm.generate([tokens(20)], asked("x"))
    torch.testing.assert_close(scores(found), scores(expected), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores(found), scores(before), atol=0.05)


@pytest.mark.parametrize("quantization", ["int8", "mxfp4"])
def test_quantised_experts_stay_as_they_are(quantization: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny(model, "GptOss", **ALL["GptOss"])
    adapter, _ = adapt_stacks(
        model, tmp_path, "a", parameters=("gate_up_proj", "down_proj"), size=0.2
    )
    (expected,) = answers(model, asked(), quantization=quantization)
    adapted = {"adapters": {"a": adapter}, "quantization": quantization}
    changed, found = answers(model, asked("a"), asked(), **adapted)
    torch.testing.assert_close(scores(found), scores(expected), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores(changed), scores(expected), atol=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: must be 1 with adapters"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: must be 1 with adapters"),
        ({"max_adapters": 86}, "max_adapters: must be at most 85, not 86"),
    ],
)
@needs_native
def test_where_experts_cannot_be_changed(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    save_tiny(model, "Qwen3Moe", **ALL["Qwen3Moe"])
    adapter, _ = adapt_stacks(model, tmp_path, "a", parameters=("down_proj",))
    with pytest.raises(KvikError, match=message):
        wishes = {"model": str(model), "device": "cpu", "adapters": (f"a={adapter}",)}
        resolve_config(EngineConfig(**wishes, **options))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A model and its two adapters."""
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder / "model", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    drawn = two_adapters(folder / "model")
    return folder / "model", {n: write_adapter(folder / n, pairs) for n, pairs in drawn.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "threads": 2},
        {"tensor_parallel_size": 2, "threads": 2, "kernels": "torch"},
        {"pipeline_parallel_size": 2, "threads": 2},
        {"spec_method": "draft_model", "spec_model": "{model}"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_with_every_way_to_run(
    llama: tuple[Path, dict[str, Path]], options: dict[str, Any], forked: None
) -> None:
    model, adapters = llama
    made = [asked(), asked("all"), asked("some")]
    expected = answers(model, *made, adapters=adapters, kernels="torch")
    options = {
        key: value.format(model=model) if isinstance(value, str) else value
        for key, value in options.items()
    }
    found = answers(model, *made, adapters=adapters, **options)
    for output, right in zip(found, expected, strict=True):
        torch.testing.assert_close(scores(output), scores(right), rtol=1e-3, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "threads": 2, "kernels": "torch"},
        {"spec_method": "draft_model", "spec_model": "{model}"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_experts_with_every_way_to_run(
    options: dict[str, Any], tmp_path: Path, forked: None
) -> None:
    model = tmp_path / "model"
    save_tiny(model, "Qwen3Moe", **ALL["Qwen3Moe"])
    parameters = "gate_up_proj", "down_proj"
    adapter, _ = adapt_stacks(model, tmp_path, "a", parameters=parameters, size=0.2)
    expected = answers(model, asked(), asked("a"), adapters={"a": adapter})
    options = {
        key: value.format(model=model) if isinstance(value, str) else value
        for key, value in options.items()
    }
    found = answers(model, asked(), asked("a"), adapters={"a": adapter}, **options)
    for output, right in zip(found, expected, strict=True):
        torch.testing.assert_close(scores(output), scores(right), rtol=1e-3, atol=1e-3)


def test_a_quantised_model_keeps_its_weights(tmp_path: Path) -> None:
    """The model of floats that a GGUF file was made of has the same weights."""
    model, file = tmp_path / "model", tmp_path / "q.gguf"
    save_tiny(model, "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    pairs = two_adapters(model)["all"]
    save_gguf(model, file, tmp_path / "twin", lambda name: "Q8_0")
    adapters = {"all": write_adapter(tmp_path / "all", pairs)}
    merged = write_merged(tmp_path / "twin", tmp_path / "merged", pairs)
    (expected,) = answers(merged, asked())
    (plain,) = answers(tmp_path / "twin", asked())
    (found,) = answers(file, asked("all"), adapters=adapters)
    torch.testing.assert_close(scores(found), scores(expected), rtol=0, atol=0.2)
    assert not torch.allclose(scores(found), scores(plain), atol=1.0)


def test_prefixes_are_cached_for_each_adapter(llama: tuple[Path, dict[str, Path]]) -> None:
    model, adapters = llama
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "adapters": adapters}
    with LLM(str(model), **options) as llm:
        cached = []
        for name in ("", "all", "some", "all", ""):
            (output,) = llm.generate([tokens(40)], asked(name, prompt_logprobs=None))
            cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32]


def test_vectors_of_an_adapter(llama: tuple[Path, dict[str, Path]]) -> None:
    model, adapters = llama
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "adapters": adapters}
    with LLM(str(model), **options) as llm:
        plain, adapted, again = (
            torch.tensor(llm.embed(tokens(9), adapter=name)[0].embedding)
            for name in ("", "some", "some")
        )
    assert torch.equal(adapted, again) and plain @ adapted < 0.99


def test_the_engine_cache_knows_the_adapters(
    llama: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    model, adapters = llama
    cache = {"engine_cache": str(tmp_path / "cache")}
    first, again = (answers(model, asked("all"), adapters=adapters, **cache)[0] for _ in range(2))
    plain, expected = answers(model, asked(), **cache), answers(model, asked())
    assert torch.equal(scores(first), scores(again))
    assert torch.equal(scores(*plain), scores(*expected))


def planned_weights(model: Path, **options: Any) -> int:
    config = EngineConfig(model=str(model), device="cpu", threads=1, dtype="float32", **options)
    return resolve_config(config).memory.weights


def test_the_plan_has_the_bytes_of_the_adapters(
    llama: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    save_encoder(tmp_path / "bare", "BertModel")  # its names lack those of the trunk
    named = linear_layers(model_files(tmp_path / "bare").spec())
    pairs = draw_pairs({name.removeprefix("bert."): size for name, size in named.items()})
    bare = tmp_path / "bare", {"a": write_adapter(tmp_path / "a", pairs)}
    for model, adapters in (llama, bare):
        files = sum((folder / ADAPTER_FILES[1]).stat().st_size for folder in adapters.values())
        having = tuple(f"{name}={folder}" for name, folder in adapters.items())
        assert files < planned_weights(model, adapters=having) - planned_weights(model)
    options = {"device": "cpu", "dtype": "float32", "adapters": bare[1]}
    with LLM(str(bare[0]), **options) as llm:
        plain, adapted = (
            torch.tensor(llm.embed(tokens(9), adapter=name)[0].embedding) for name in ("", "a")
        )
    assert plain @ adapted < 0.99


def with_pairs(pairs: Mapping[str, tuple[int, int]]) -> Callable[[Path], object]:
    return lambda folder: write_adapter(folder, draw_pairs(pairs))


def with_whole(folder: Path) -> None:
    write_adapter(folder, draw_pairs({Q: (256, 256)}))
    path = folder / ADAPTER_FILES[1]
    head = {"base_model.model.lm_head.weight": torch.ones(96, 256)}
    save_file({**load_file(path), **head}, path)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda folder: None, "adapters: there is no folder"),
    "no weights": (lambda folder: folder.mkdir(), "adapters: 'mine': adapter_config.json cannot"),
    "the head": (
        with_pairs({"lm_head": (256, 96)}),
        "adapters: 'mine' adapts 'lm_head', whose outputs requests cannot change",
    ),
    "an unknown layer": (with_pairs({f"{Q}x": (256, 256)}), "q_projx', whose outputs"),
    "another shape": (with_pairs({Q: (128, 256)}), r"shape \[256, 128\], the model's is \[256, 2"),
    "a whole tensor": (with_whole, "'mine' replaces 'lm_head.weight': merge it with lora"),
    "DoRA": (
        lambda folder: write_adapter(folder, draw_pairs({Q: (256, 256)}), use_dora=True),
        "adapters: 'mine': adapter_config.json use_dora: is not supported: must be left out",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_does_not_fit_is_one_error(
    llama: tuple[Path, dict[str, Path]], case: str, tmp_path: Path
) -> None:
    make, message = WRONG[case]
    make(tmp_path / "mine")
    with pytest.raises(KvikError, match=message):
        answers(llama[0], asked(), adapters={"mine": tmp_path / "mine"})


def test_names_that_are_not_known_or_not_unique(llama: tuple[Path, dict[str, Path]]) -> None:
    model, adapters = llama
    with pytest.raises(ParamError, match=r"adapter: must be one of the engine's \('all', 'some'\)"):
        answers(model, asked("other"), adapters=adapters)
    with pytest.raises(ParamError, match=r"engine's \(none\), not 'other'"):
        answers(model, asked("other"))
    twice = tuple(f"a={folder}" for folder in adapters.values())
    with pytest.raises(KvikError, match="adapters: must be at most 512 folders with different"):
        answers(model, asked(), adapters=twice)
    with pytest.raises(KvikError, match="adapters: must be NAME=DIR, not 'all'"):
        answers(model, asked(), adapters=("all",))


def test_engine_folders_are_refused(llama: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    model, adapters = llama
    config = EngineConfig(model=str(model), device="cpu", threads=1)
    build_engine(config, tmp_path / "engine", lambda *sizes: None)
    for options in ({"adapters": adapters}, {"max_adapters": 2}):
        with pytest.raises(KvikError, match="adapters: must be left out: an engine folder"):
            answers(tmp_path / "engine", asked(), dtype="auto", **options)

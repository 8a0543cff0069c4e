"""An engine folder yields the tokens of the model it was built from, and a wrong one is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.optional_native import NATIVE, needs_native
from helpers.planned import decision
from helpers.stored_layers import gptq_config
from helpers.stored_models import CONFIGS, save_quantised
from helpers.tiny_models import (
    COMPRESSED,
    GEMMA3N,
    IN_BLOCKS,
    INDEXED,
    LONGCAT,
    MINIMAX,
    ZAMBA2,
    save_tiny,
)
from safetensors.torch import load_file, save_file

from kvik import LLM, KvikError, SamplingParams
from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.config.hardware import detect
from kvik.config.model_source import BUNDLED
from kvik.config.resolve import resolve
from kvik.export import plan_export
from kvik.gguf.export import model_metadata
from kvik.gguf.facts import sampling_metadata
from kvik.gguf.reader import write_gguf
from kvik.kernels.packing import PLAIN
from kvik.model_files import model_files
from kvik.models.model_spec import read_model_spec
from kvik.nn.checkpoint import open_checkpoint
from kvik.nn.engine_folder import MappedStorage
from kvik.nn.gguf_export import gguf_tensors
from kvik.planner.families import read_shape
from kvik.spec.engine_folder import MANIFEST, WEIGHTS, Manifest
from kvik.spec.weights import SCHEMES

PROMPTS = [[5, 6, 7, 8], [9] * 20, [11]]
EXPERTS = {
    "hidden_size": 64,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("Llama", {"hidden_size": 64, "tie_word_embeddings": True}),
    "qwen2, biases": ("Qwen2", {"hidden_size": 64, "intermediate_size": 128}),
    "gpt2, learned positions": ("GPT2", {"n_embd": 64}),
    "experts": ("Glm4Moe", EXPERTS),
    "learned activation": ("Apertus", {"hidden_size": 64, "head_dim": 16}),
    "residual streams": ("Gemma3n", GEMMA3N),
    "hyper-connections": ("HYV4", INDEXED),
    "blocks of keys": ("MiniMaxM3VL", IN_BLOCKS),
    "experts that return their input": ("LongcatFlash", LONGCAT),
    "constant decays": ("MiniMax", MINIMAX),
    "shared matrices": ("Zamba2", ZAMBA2),
    "entries": ("DeepseekV4", COMPRESSED),
}
O_PROJ, NORM = "model.layers.0.self_attn.o_proj", "model.norm.weight"
KERNELS = ["torch", *(["native"] if NATIVE else [])]
ENGINE = {"device": "cpu", "threads": 1}
PLANNED = {"num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4}


def build(model: str, output: Path, **options: Any) -> Manifest:
    _, manifest = build_engine(
        EngineConfig(model=model, **ENGINE, **options), output, lambda done, total: None
    )
    return manifest


def answers(model: str, **options: Any) -> list[Any]:
    """Return tokens and their log probabilities, to the last bit."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    with LLM(model, **ENGINE, **PLANNED, **options) as llm:
        outputs = llm.generate(PROMPTS, params)
    return [
        (choice.token_ids, [entry.logprob for entry in choice.logprobs or ()])
        for output in outputs
        for choice in output.outputs
    ]


@pytest.mark.full
@pytest.mark.each(3)  # a format decides what is stored of a matrix, a family which there are
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("quantization", SCHEMES)
@pytest.mark.parametrize("family", [*FAMILIES, "bundled"])
def test_an_engine_folder_answers_like_its_model(
    tmp_path: Path, family: str, quantization: str, kernels: str
) -> None:
    model = ""
    if family != "bundled":
        name, sizes = FAMILIES[family]
        model = str(tmp_path / "model")
        save_tiny(tmp_path / "model", name, **sizes)
    options = {"quantization": quantization, "kernels": kernels}
    build(model, tmp_path / "engine", **options)
    assert answers(str(tmp_path / "engine")) == answers(model, **options)


STORED = {name: CONFIGS[name] for name in ("gptq-order", "awq", "fp8-blocks", "bnb-nf4")}
STORED["values in more bits than keys"] = gptq_config(dynamic={"+:.*v_proj": {"bits": 8}})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", STORED)
def test_quantised_checkpoints_are_not_changed(tmp_path: Path, case: str, kernels: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    save_tiny(tmp_path / "plain", "Qwen2", **sizes)
    save_quantised(tmp_path / "plain", tmp_path / "model", tmp_path / "twin", STORED[case])
    model, engine = str(tmp_path / "model"), tmp_path / "engine"
    build(model, engine, kernels=kernels)
    assert answers(str(engine)) == answers(model, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_gguf_file(tmp_path: Path, kernels: str) -> None:
    folder, model = tmp_path / "model", tmp_path / "model.gguf"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}
    save_tiny(folder, "Qwen2", **sizes)
    spec = read_model_spec(folder)
    tensors = gguf_tensors(open_checkpoint(folder), spec, "Q4_0")
    sampling = sampling_metadata({"top_k": 7, "repetition_penalty": 1.5})
    write_gguf(model, model_metadata(spec, "tiny", "Q4_0") | sampling, tensors)
    build(str(model), tmp_path / "engine", kernels=kernels)
    assert answers(str(tmp_path / "engine")) == answers(str(model), kernels=kernels)
    defaults = model_files(tmp_path / "engine").default_params()
    assert defaults == model_files(model).default_params() and defaults.top_k == 7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model and a folder built from it."""
    folder = tmp_path_factory.mktemp("engines")
    save_tiny(folder / "model", "Llama", hidden_size=64)
    build(str(folder / "model"), folder / "engine", quantization="int8", kernels="torch")
    return folder / "model", folder / "engine"


@pytest.fixture
def copied(tmp_path: Path, tiny: tuple[Path, Path]) -> Path:
    return shutil.copytree(tiny[1], tmp_path / "out" / "engine")


def test_the_models_own_files_are_copied(tmp_path: Path) -> None:
    manifest = build("", tmp_path / "engine")
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= set(manifest.files)
    prompt, params = "Once upon a time", SamplingParams(seed=7, max_tokens=12)
    with LLM(**ENGINE, num_blocks=64) as plain:
        text = plain.generate(prompt, params)[0].text
        defaults = plain.default_params
    shutil.move(tmp_path / "engine", tmp_path / "moved")
    with LLM(str(tmp_path / "moved"), num_blocks=64) as llm:
        assert llm.generate(prompt, params)[0].text == text
        assert llm.default_params == defaults
    for name in ("dtype", "quantization"):
        assert decision(llm.resolved, name)[1] == "as the engine folder was built"


def test_a_checkpoint_of_the_bare_trunk(tmp_path: Path) -> None:
    """Its names have no "model." prefix."""
    save_tiny(tmp_path / "model", "Llama", tie_word_embeddings=True)
    path = tmp_path / "model" / "model.safetensors"
    named = {name.removeprefix("model."): value for name, value in load_file(path).items()}
    save_file(named, path)
    build(str(tmp_path / "model"), tmp_path / "engine")
    assert answers(str(tmp_path / "engine")) == answers(str(tmp_path / "model"))


def test_the_plan_counts_the_pages_of_the_file(tiny: tuple[Path, Path]) -> None:
    with LLM(str(tiny[1]), num_blocks=64) as llm:
        assert llm.resolved.memory.weights == (tiny[1] / WEIGHTS).stat().st_size


def test_options_equal_to_the_built_ones_are_accepted(tiny: tuple[Path, Path]) -> None:
    answers(str(tiny[1]), quantization="int8", kernels="torch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int4"}, "quantization: is int8 in this engine folder, not int4: "),
        ({"dtype": "float16"}, "dtype: is .* in this engine folder, not float16: "),
        ({"kernels": "native"}, "kernels: is torch in this engine folder, not native: "),
    ],
)
def test_options_other_than_the_built_ones_name_the_build_command(
    tiny: tuple[Path, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(KvikError, match=message + ".*kvik build MODEL -o ENGINE --"):
        LLM(str(tiny[1]), **options)


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        change(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return damage


def field(**values: str | int) -> Callable[[Path], None]:
    return changed(lambda manifest: manifest.update(values))


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1)


def another_build(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[0] ^= 1
    (folder / WEIGHTS).write_bytes(data)


def another_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"bos_token_id": 1', '"bos_token_id": 3'))


def pipe(folder: Path) -> None:
    """Reading it would wait forever."""
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "weights.bin: has .* bytes, .* by engine.json"),
        (another_build, "weights.bin: is not of the same build"),
        (another_config, "config.json: was altered since it was built"),
        (lambda folder: (folder / WEIGHTS).unlink(), "weights.bin: cannot be read"),
        (pipe, "weights.bin: is not a file"),
        (lambda folder: (folder / MANIFEST).unlink(), "engine.json: is missing: the folder has"),
        (field(format=2), "engine.json format: is 2, written by kvik .*; this kvik reads 1"),
        (field(byte_order="big"), "engine.json byte_order: is big"),
        (field(packing="plain-0"), "packed as 'plain-0', and the kernels here take 'plain-1'"),
        (field(quantization="int3"), "quantization: 'int3' of this engine folder is unknown"),
        (
            changed(lambda manifest: manifest["tensors"][O_PROJ].update(kind="int8 group 8")),
            "o_proj' does not have the parts of its kind .int8 group 8. and size",
        ),
        (changed(lambda manifest: manifest["tensors"].pop(NORM)), f"tensor '{NORM}' is missing"),
    ],
)
def test_a_folder_that_does_not_fit_names_the_build_command(
    copied: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(copied)
    with pytest.raises(KvikError, match=message) as caught:
        LLM(str(copied), **ENGINE, **PLANNED)
    assert "kvik build MODEL -o " in str(caught.value) and "\n" not in str(caught.value)


@needs_native
def test_without_native_kernels_a_folder_for_them_is_refused(tmp_path: Path) -> None:
    build("", tmp_path / "engine")
    spec, bare = read_model_spec(tmp_path / "engine"), replace(detect(), native=False)
    with pytest.raises(KvikError, match="kernels: .* kvik was installed without: build another"):
        resolve(EngineConfig(), spec, bare, str(tmp_path / "engine"))


def test_nothing_is_left_of_a_build_that_fails(copied: Path, tiny: tuple[Path, Path]) -> None:
    before = {path.name: path.read_bytes() for path in copied.iterdir()}

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(EngineConfig(model=str(tiny[0]), **ENGINE), copied, interrupted)
    assert [path.name for path in copied.parent.iterdir()] == ["engine"]
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before


def test_a_running_engine_keeps_its_weights_when_the_folder_is_built_again(
    copied: Path, tiny: tuple[Path, Path]
) -> None:
    other = {"quantization": "int4", "kernels": "torch"}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(copied), **ENGINE, **PLANNED) as llm:
        before = llm.generate([PROMPTS[0]], params)[0].outputs[0].token_ids
        build(str(tiny[0]), copied, **other)
        assert llm.generate([PROMPTS[0]], params)[0].outputs[0].token_ids == before
    assert answers(str(copied)) == answers(str(tiny[0]), **other)


@pytest.mark.parametrize(
    ("model", "output", "message"),
    [
        ("model", "taken", "output: must be new, empty or an engine folder; .* holds 'letter.txt'"),
        ("model", "more", "output: must be new, empty or an engine folder; .* holds 'letter.txt'"),
        ("model", "file", "output: must be a folder"),
        ("engine", "new", "model: is an engine folder already"),
        ("absent/model", "new", "model: "),
    ],
)
def test_models_that_cannot_be_built_are_refused(
    tmp_path: Path, tiny: tuple[Path, Path], model: str, output: str, message: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").write_text("dear")
    shutil.copytree(tiny[1], tmp_path / "more")
    (tmp_path / "more" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("")
    source = {"model": tiny[0], "engine": tiny[1]}.get(model, model)
    with pytest.raises(KvikError, match=message):
        build(str(source), tmp_path / output)
    assert not (tmp_path / "new").exists()
    for folder in ("taken", "more"):
        assert (tmp_path / folder / "letter.txt").read_text() == "dear"


def test_drafts_from_other_weights_are_refused(tmp_path: Path, tiny: tuple[Path, Path]) -> None:
    with pytest.raises(KvikError, match="^spec_method: "):
        build(str(tiny[0]), tmp_path / "new", spec_method="ngram")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_draft_model_may_be_an_engine_folder_or_a_gguf_file(tmp_path: Path, kernels: str) -> None:
    """With the model's own weights, rounded, most drafts are right, and the answer stays the
    same."""
    build("", tmp_path / "engine", kernels=kernels, quantization="int8")
    build("", tmp_path / "target", kernels=kernels)
    plan_export(BUNDLED, "Q8_0").write(tmp_path / "draft.gguf", lambda size: None)
    expected = answers("", kernels=kernels)
    weights = (tmp_path / "target" / WEIGHTS).stat().st_size
    for draft in ("engine", "draft.gguf"):
        wish = {"method": "draft_model", "model": str(tmp_path / draft), "adaptive": False}
        with LLM(str(tmp_path / "target"), **ENGINE, **PLANNED, speculative_config=wish) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
            assert found == [tokens for tokens, _ in expected]
            speculation = llm.stats().speculation
            assert speculation.drafts.accepted > 0
            if draft == "engine":
                weights_of_both = weights + (tmp_path / draft / WEIGHTS).stat().st_size
                assert llm.resolved.memory.weights == weights_of_both


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype is .* in its engine folder and must be float16: "),
        (
            {"speculative_config": {"quantization": "int4"}},
            "quantization is int8 in its engine folder and must be int4: ",
        ),
    ],
)
def test_a_draft_model_that_was_built_for_something_else(
    tiny: tuple[Path, Path], options: dict[str, Any], message: str
) -> None:
    wish = {"method": "draft_model", "model": str(tiny[1])}
    wish |= options.get("speculative_config", {})
    options = {"kernels": "torch", **options, "speculative_config": wish}
    with pytest.raises(KvikError, match="spec_model: " + message + "build another one"):
        LLM(str(tiny[0]), **ENGINE, **PLANNED, **options)


def test_weights_that_were_replaced_since_the_manifest_was_read(copied: Path) -> None:
    another_build(copied)
    with pytest.raises(KvikError, match="weights.bin: is not of the same build"):
        MappedStorage(copied, PLAIN)


def test_a_plan_counts_an_engine_folder_as_built(tiny: tuple[Path, Path]) -> None:
    model, engine = (read_shape(str(path)) for path in tiny)
    assert engine.stored == "int8" and model.stored != "int8"
    assert engine.spec is not None and engine.parameters == model.parameters
    assert engine.notes[-1].startswith("engine folder for torch kernels, ")

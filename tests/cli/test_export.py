"""`kvik export`: a model as a GGUF file, read back by kvik as the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFReader
from helpers.commands import Command
from helpers.gguf_tokenizers import texts
from helpers.stored_layers import gptq_config
from helpers.stored_models import save_quantised
from helpers.tiny_models import save_tiny, tokens
from safetensors.torch import load_file, save_file

from kvik import LLM, SamplingParams
from kvik.build import build_engine
from kvik.cli.main import main
from kvik.config.config import EngineConfig
from kvik.config.model_source import BUNDLED
from kvik.export import TYPES

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PROMPT = "Once upon a time"


def opened(model: Path | str, **options: object) -> LLM:
    return LLM(str(model), device="cpu", threads=1, num_blocks=64, **options)


def test_the_bundled_model_survives_a_round_trip(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "stories.gguf"
    printed = command("export", "-o", str(path), "--type", "bf16").out
    assert printed == f"{path}: 9.5 MiB, 16.01 bits a weight\n"
    with opened("", kernels="torch") as before, opened(path, kernels="torch") as after:
        expected, found = (llm.generate([PROMPT], GREEDY)[0] for llm in (before, after))
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].text == expected.outputs[0].text
        assert after.default_params == before.default_params
        for llm in (before, after):
            assert llm.resolved.model.eos_token_ids == (0, 4)
        for text in texts(60):
            ids = before.tokenizer.encode(text)
            assert after.tokenizer.encode(text) == ids
            assert after.tokenizer.decode(ids) == before.tokenizer.decode(ids)


@pytest.mark.parametrize(
    "floats", ["bf16", *(pytest.param(name, marks=pytest.mark.full) for name in ("f32", "f16"))]
)
def test_a_gguf_file_of_floats_exports_as_its_folder(floats: str, tmp_path: Path) -> None:
    """The bundled weights are bf16; those of f16 are rounded once more."""
    source, found, expected = (tmp_path / name for name in ("s.gguf", "found.gguf", "folder.gguf"))
    assert main(["export", "-o", str(source), "--type", floats]) == 0
    assert main(["export", str(source), "-o", str(found), "--type", "q4_0"]) == 0
    assert main(["export", "-o", str(expected), "--type", "q4_0"]) == 0
    read, other = GGUFReader(found), GGUFReader(expected)
    assert list(read.fields) == list(other.fields)
    for key in read.fields:
        assert read.fields[key].contents() == other.fields[key].contents(), key
    for one, same in zip(read.tensors, other.tensors, strict=True):
        assert (one.name, one.tensor_type) == (same.name, same.tensor_type)
        alike = (one.data == same.data).mean()
        assert alike == 1.0 if floats != "f16" else alike > 0.99, one.name


@pytest.mark.parametrize(
    "type",
    [
        pytest.param(name, marks=pytest.mark.full) if name in ("q5_k_m", "q6_k") else name
        for name in TYPES
    ],
)
def test_every_type_generates_the_same_first_tokens(type: str, tmp_path: Path) -> None:
    path = tmp_path / "stories.gguf"
    assert main(["export", str(BUNDLED), "-o", str(path), "--type", type]) == 0
    with opened(path) as llm:
        (output,) = llm.generate([PROMPT], GREEDY)
        assert output.outputs[0].text.startswith(" there was a ")


# The largest divergence of a type from the floats, on the bundled story.
DIVERGENCES = {"q8_0": 0.0004, "q6_k": 0.003, "q5_k_m": 0.01, "q4_k_m": 0.032, "q4_0": 0.055}


@pytest.mark.full
@pytest.mark.parametrize("type", DIVERGENCES)
def test_predictions_of_a_file_are_near_those_of_the_floats(
    type: str, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "stories.gguf"
    command("export", "-o", str(path), "--type", type)
    words = ["--reference", str(BUNDLED), "--kernels", "torch", "--dtype", "float32"]
    found = command.json("eval", str(path), "--window", "512", *words)
    assert found["scored_tokens"] > 1000
    assert 0 < found["kl_divergence"] < DIVERGENCES[type]


def test_the_chat_template_is_exported(tmp_path: Path) -> None:
    folder, path = tmp_path / "m", tmp_path / "m.gguf"
    folder.mkdir()
    for file in BUNDLED.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert main(["export", str(folder), "-o", str(path)]) == 0
    messages = [{"role": "user", "content": "Hello"}]
    with opened(folder) as before, opened(path) as after:
        assert after.render_chat(messages) == before.render_chat(messages)
        assert "<user>Hello" in after.render_chat(messages)


def test_the_public_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "stories.gguf"
    assert main(["export", "-o", str(path), "--type", "q4_0"]) == 0
    reader = GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.file_type"].contents() == 2
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["token_embd.weight"] == "Q8_0" and types["blk.0.attn_q.weight"] == "Q4_0"


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Qwen3", hidden_size=64, intermediate_size=96, head_dim=16)
    path = tmp_path / "m.gguf"
    assert main(["export", str(tmp_path), "-o", str(path), "--type", "f32"]) == 0
    found = []
    for model in (tmp_path, path):
        with opened(model, kernels="torch") as llm:
            found.append(llm.generate([tokens(9)], GREEDY)[0].outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "m.bin"], "output: must end in .gguf, not 'm.bin'"),
        (["-o", "none/m.gguf"], "output: cannot be written: 'none/m.gguf'"),
        (["-o", "m.gguf", "--type", "q4_k"], "type: must be one of f32, bf16, f16, q8_0, q6_k, "),
        (["/no/such", "-o", "m.gguf"], "model: there is no folder '/no/such'"),
        (["file.gguf", "-o", "m.gguf"], "model: is stored quantised (gguf: Q8_0): export the "),
        (["gptq", "-o", "m.gguf"], "model: is stored quantised (gptq: 4 bits, in groups of 32): "),
        (["opt", "-o", "m.gguf"], "architectures: must be one of LlamaForCausalLM, "),
        (["large", "-o", "m.gguf", "--type", "f16"], "has numbers above 65504, too large for F16"),
        ([], "arguments: the following arguments are required: -o/--output"),
    ],
)
def test_bad_input(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    for folder, family in (("large", "Llama"), ("opt", "OPT")):
        save_tiny(tmp_path / folder, family, **(sizes if family == "Llama" else {}))
    save_quantised(tmp_path / "large", tmp_path / "gptq", tmp_path / "twin", gptq_config())
    weights = load_file(tmp_path / "large/model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 3] = 1e5
    save_file(weights, tmp_path / "large/model.safetensors")
    command("export", "twin", "-o", "file.gguf")
    error = command.refusal("export", *words)
    assert message in error
    assert {path.name for path in tmp_path.iterdir()} == {
        "large",
        "opt",
        "gptq",
        "twin",
        "file.gguf",
    }


def test_a_folder_whose_weights_do_not_fit_its_config_is_refused(
    tmp_path: Path, command: Command
) -> None:
    folder, output = tmp_path / "model", tmp_path / "out.gguf"
    save_tiny(folder, "Llama")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    error = command.refusal("export", str(folder), "-o", str(output))
    assert "model: its weights lack 'model.layers." in error
    assert not output.exists()


def test_an_engine_folder_is_refused(tmp_path: Path, command: Command) -> None:
    save_tiny(tmp_path / "model", "Llama", hidden_size=64)
    wishes = EngineConfig(model=str(tmp_path / "model"), device="cpu", kernels="torch")
    build_engine(wishes, tmp_path / "engine", lambda done, total: None)
    error = command.refusal("export", str(tmp_path / "engine"), "-o", str(tmp_path / "out.gguf"))
    assert "is an engine folder: export the model it was built from" in error


def test_a_missing_expert(tmp_path: Path, command: Command) -> None:
    save_tiny(tmp_path / "m", "Mixtral", num_local_experts=4)
    path, lost = tmp_path / "m/model.safetensors", "model.layers.1.block_sparse_moe.experts.2.w2"
    weights = load_file(path)
    weights.pop(f"{lost}.weight")
    save_file(weights, path)
    error = command.refusal("export", str(tmp_path / "m"), "-o", str(tmp_path / "m.gguf"))
    assert f"its weights lack '{lost}.weight'" in error
    assert not (tmp_path / "m.gguf").exists()

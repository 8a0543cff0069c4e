"""GGUF files in the engine: equal to the same weights dequantised, in the planned bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from shutil import copy

import pytest
import torch
from helpers.gguf_models import save_gguf
from helpers.optional_native import needs_native
from helpers.paged_model import PagedModel
from helpers.tiny_models import GREEDY, greedy_and_scores, save_tiny, tokens

from kvik import LLM
from kvik.build import build_engine
from kvik.cli.main import main
from kvik.config.config import EngineConfig
from kvik.errors import ModelError
from kvik.gguf.reader import read_gguf
from kvik.kernels.reference.ops import REFERENCE, stored_weight
from kvik.kernels.weights import Matrix, MatrixSpec
from kvik.planner.families import read_shape

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "head_dim": 64,
}


def mixed(name: str) -> str:
    """Return types as llama-quantize mixes them: V and down of some layers and the head are
    finer."""
    finer = name.startswith(("blk.1.attn_v", "blk.0.ffn_down", "output", "token_embd"))
    return "Q6_K" if finer else "Q4_K"


# Types of a file's matrices, and whether all of them run as stored.
CASES: dict[str, tuple[Callable[[str], str], bool]] = {
    "Q8_0": (lambda name: "Q8_0", True),
    "Q4_0": (lambda name: "Q8_0" if "blk" not in name else "Q4_0", True),
    "mixed": (mixed, True),
    "small": (lambda name: "Q2_K" if "ffn" in name else "Q3_K", True),
    "old": (lambda name: "Q4_1" if "ffn" in name else "Q5_0", True),
    "IQ4": (lambda name: "IQ4_NL" if "attn" in name else "IQ4_XS", True),
    "MXFP4": (lambda name: "Q8_0" if "blk" not in name else "MXFP4", True),
    "floats": (lambda name: "Q5_K" if "ffn" in name else "Q5_1", False),
    "F16": (lambda name: "F16", False),
}
FAMILIES = [("Llama", case) for case in CASES]
FAMILIES += [(family, case) for family in ("Qwen2", "Qwen3", "Olmo2") for case in ("Q8_0", "mixed")]
# Mean error of a log probability. The native kernels round activations to bf16 or, for weights of
# four bits, to eight bits. Measured: 5e-7 and 0.016.
OFF = {"torch": 1e-5, "native": 0.03}


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize(("family", "case"), FAMILIES)
def test_the_engine_matches_the_dequantised_floats(
    family: str, case: str, kernels: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, tie_word_embeddings=family == "Qwen2", **SIZES)
    save_gguf(tmp_path, tmp_path / "m.gguf", tmp_path / "twin", CASES[case][0])
    expected, scores = greedy_and_scores(tmp_path / "twin", kernels="torch", dtype="float32")
    found, found_scores = greedy_and_scores(tmp_path / "m.gguf", kernels=kernels, dtype="float32")
    assert kernels == "native" or found == expected
    assert float((found_scores - scores).abs().mean()) < OFF[kernels]


def split_model(folder: Path) -> list[Path]:
    """Write a model split into parts of eight tensors, and return their paths."""
    save_tiny(folder, "Llama", **SIZES)
    parts = folder / "parts"
    parts.mkdir()
    save_gguf(folder, parts / "m.gguf", folder / "twin", lambda name: "Q8_0", {}, 8)
    return sorted(parts.iterdir())


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    """Named by its first part, or by the folder of the parts."""
    first, *others = split_model(tmp_path)
    assert first.name == "m-00001-of-00003.gguf" and len(others) == 2
    save_gguf(tmp_path, tmp_path / "m.gguf", tmp_path / "other-twin", lambda name: "Q8_0")
    expected, scores = greedy_and_scores(tmp_path / "m.gguf", dtype="float32")
    for model in (first, first.parent):
        found, found_scores = greedy_and_scores(model, dtype="float32")
        assert found == expected and torch.equal(found_scores, scores)


@pytest.mark.parametrize(
    ("change", "named", "message"),
    [
        (lambda parts: parts[1].unlink(), 0, r"m-00002-of-00003.gguf: cannot be read \(No such"),
        (lambda parts: None, 1, "00002-of-00003.gguf split.count: is 3: name the first part, NAME"),
        (lambda parts: copy(parts[1], parts[2]), 0, "00003.gguf split.no: must be 2, not 1"),
    ],
    ids=["missing", "not the first", "twice"],
)
def test_parts_that_do_not_fit_together(
    change: Callable[[list[Path]], object], named: int, message: str, tmp_path: Path
) -> None:
    parts = split_model(tmp_path)
    change(parts)
    with pytest.raises(ModelError, match=message):
        LLM(str(parts[named]), device="cpu")


@needs_native
@pytest.mark.full
@pytest.mark.parametrize(("type", "pooling"), [(0, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_vectors_are_pooled_as_the_file_says(type: int, pooling: str, tmp_path: Path) -> None:
    """Also from an engine folder."""
    save_tiny(tmp_path, "Qwen3", **SIZES)
    path, built = tmp_path / "m.gguf", tmp_path / "engine"
    types = {"qwen3.pooling_type": type}
    save_gguf(tmp_path, path, tmp_path / "twin", lambda name: "Q8_0", types)
    options = {"device": "cpu", "threads": 1, "kernels": "native"}
    build_engine(EngineConfig(model=str(path), **options), built, lambda *sizes: None)
    with LLM(str(path), **options) as llm:
        expected = llm.embed([tokens(9)], pooling)[0].embedding
        assert llm.embed([tokens(9)])[0].embedding == expected
    with LLM(str(built), device="cpu", threads=1) as llm:
        assert llm.embed([tokens(9)])[0].embedding == expected


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_the_loaded_weights(case: str, tied: bool, tmp_path: Path) -> None:
    """Every matrix, including the embedding, for torch's and the native kernels."""
    save_tiny(tmp_path, "Llama", tie_word_embeddings=tied, **SIZES)
    types, as_stored = CASES[case]
    save_gguf(tmp_path, tmp_path / "m.gguf", tmp_path / "twin", types)
    made: list[Matrix] = []

    def matrix(spec: MatrixSpec) -> Matrix:
        made.append(REFERENCE.matrix(spec))
        return made[-1]

    ops = replace(REFERENCE, matrix=matrix)
    spec = PagedModel(tmp_path / "m.gguf", ops=ops, dtype=torch.bfloat16).spec
    sizes = [stored_weight(each) for each in made]
    rest = 2 * (spec.num_parameters - sum(each.outputs * each.inputs for each in sizes))
    loaded = rest + sum(map(size, sizes))
    assert loaded == spec.weight_bytes("bfloat16", "none")
    packed = pytest.importorskip("kvik.kernels.cpu.matrix").packed_sizes
    loaded = rest + sum(sum(packed(each.spec)) for each in made)
    assert loaded == spec.weight_bytes("bfloat16", "none", "native")
    planned = replace(read_shape(str(tmp_path / "m.gguf")), kernels="native")
    if as_stored:
        assert loaded == planned.weight_bytes(planned.stored)
    assert as_stored == all(not each.kind.floats for each in sizes)
    assert case != "mixed" or len(made) == 4 + 5 + 2 - tied  # V of one layer, and the ends


def size(weight: object) -> int:
    """Return the bytes of its tensors."""
    parts = (getattr(weight, field.name) for field in fields(weight))
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


def test_other_types_are_quantised_on_request(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **SIZES)
    save_gguf(tmp_path, tmp_path / "m.gguf", tmp_path / "twin", CASES["floats"][0])
    options = {"device": "cpu", "threads": 1, "num_blocks": 32, "kernels": "torch"}
    planned = []
    for quantization in ("none", "int8"):
        with LLM(str(tmp_path / "m.gguf"), quantization=quantization, **options) as llm:
            planned.append(llm.resolved.memory.weights)
            llm.generate([tokens(5)], GREEDY)
    assert planned[1] < 0.6 * planned[0]


def test_info_names_the_formats_of_a_gguf_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path, "Qwen3", **SIZES)
    save_gguf(tmp_path, tmp_path / "m.gguf", tmp_path / "twin", mixed)
    path = str(tmp_path / "m.gguf")
    assert main(["info", path, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in text and path in text
    assert "gguf: Q6_K; Q4_K" in text or "gguf: Q4_K; Q6_K" in text
    assert main(["info", path, "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weight_bytes"] == facts["memory"]["weights"]


def test_without_a_tokenizer_prompts_are_ids(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **SIZES)
    values = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    save_gguf(tmp_path, tmp_path / "m.gguf", tmp_path / "twin", lambda name: "F32", values)
    with LLM(str(tmp_path / "m.gguf"), device="cpu", threads=1, num_blocks=32) as llm:
        assert (llm.default_params.temperature, llm.default_params.top_k) == (0.5, 7)
        with pytest.raises(ModelError, match="tokenizer.ggml.model: is missing"):
            llm.generate(["Once"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"split.count": 3}, r"m.gguf split.count: is 3: name the first part"),
        ({"llama.feed_forward_length": 256}, "must have shape"),
        ({"llama.block_count": 3}, "lack 'model.layers.2"),
        ({"llama.block_count": 1}, "hold 'model.layers.1.*unknown to the architecture"),
        ({"llama.embedding_length": 250}, "its 250 inputs do not fill blocks of 32; the GGUF file"),
        ({"llama.embedding_length": 1 << 30}, r"embedding_length: must be an integer in"),
        ({"llama.expert_count": 8}, "llama.expert_used_count: is missing"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, "block_sparse_moe.gate.weight"),
    ],
)
def test_files_with_false_sizes(values: dict[str, int], message: str, tmp_path: Path) -> None:
    """One error each, before any matrix is filled."""
    save_tiny(tmp_path, "Llama", **SIZES)
    save_gguf(tmp_path, tmp_path / "m.gguf", tmp_path / "twin", lambda name: "Q8_0", values)
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path / "m.gguf"), device="cpu", threads=1, num_blocks=32)


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **SIZES)
    path = tmp_path / "m.gguf"
    save_gguf(tmp_path, path, tmp_path / "twin", lambda name: "Q8_0")
    (bad,) = [t for t in read_gguf(path).tensors if t.name == "blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[bad.start : bad.start + 2] = b"\x00\x7e"  # NaN
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"1.mlp.up_proj.weight' holds NaN or infinity"):
        LLM(str(path), device="cpu", threads=1, num_blocks=32)


@pytest.mark.parametrize(
    ("case", "stored"), [("Q8_0", "int8-weight-only"), ("mixed", "int4"), ("F16", "fp16")]
)
def test_a_plan_counts_the_usual_bits_of_its_weights(
    case: str, stored: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "Llama", **SIZES)
    save_gguf(tmp_path, tmp_path / "m.gguf", tmp_path / "twin", CASES[case][0])
    shape = read_shape(str(tmp_path / "m.gguf"))
    assert shape.stored == stored
    assert shape.spec.num_parameters == shape.parameters
    assert any("counted as" in note for note in shape.notes) == (case != "F16")

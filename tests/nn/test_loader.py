"""Filling a model: directly into fused tensors, or a clear refusal before anything is copied."""

from __future__ import annotations

import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paged_model import PagedModel
from helpers.tiny_models import save_tiny, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.errors import ModelError
from kvik.nn import loader
from kvik.nn.checkpoint import SINGLE


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "Llama", attention_bias=True)
    return folder


def altered(source: Path, folder: Path, **changes: Tensor | None) -> Path:
    """Return a copy of a checkpoint with some tensors replaced, added or (None) removed. Names are
    written with `__` for a dot."""
    tensors: dict[str, Any] = load_file(source / SINGLE)
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / SINGLE)
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_parts_fill_their_rows_of_the_fused_weight(llama: Path) -> None:
    stored = load_file(llama / SINGLE)
    attention = PagedModel(llama).model.layers[1].attention.qkv
    scope = "model.layers.1.self_attn"
    (linear,) = attention.linears
    matrix = linear.matrix
    for suffix, fused in (("weight", matrix.data.values), ("bias", matrix.bias)):
        parts = [stored[f"{scope}.{name}.{suffix}"] for name in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(fused, torch.cat(parts))
    mlp = PagedModel(llama).model.layers[2].mlp.up.matrix.data.values
    parts = [stored[f"model.layers.2.mlp.{name}.weight"] for name in ("gate_proj", "up_proj")]
    assert torch.equal(mlp, torch.cat(parts))


@pytest.mark.parametrize(("added", "warned"), [(0.0, False), (0.5, True), (None, False)])
def test_a_head_that_a_tied_model_does_not_read_is_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, added: float | None, warned: bool
) -> None:
    source = tmp_path / "source"
    save_tiny(source, "Llama", tie_word_embeddings=True)
    embedding = load_file(source / SINGLE)["model.embed_tokens.weight"]
    PagedModel(
        altered(source, tmp_path, lm_head__weight=None if added is None else embedding + added)
    )
    assert any("lm_head.weight" in record.getMessage() for record in caplog.records) == warned


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_float_types_are_cast(
    llama: Path, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in load_file(llama / SINGLE).items()}
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    model = PagedModel(tmp_path, dtype=wanted).model
    assert torch.equal(model.embed.table, tensors["model.embed_tokens.weight"].to(wanted))
    down = tensors["model.layers.0.mlp.down_proj.weight"].to(wanted)
    assert torch.equal(model.layers[0].mlp.down.matrix.data.values, down)


NORM = "model__norm__weight"
K = "model__layers__0__self_attn__k_proj__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, "its weights lack 'model.norm.weight'"),
        ({"lm_head__weight": None}, "its weights lack 'lm_head.weight'"),
        ({"extra__weight": torch.ones(1)}, "its weights hold 'extra.weight', unknown to the"),
        ({NORM: torch.ones(31)}, "'model.norm.weight' must have shape [32] by config.json"),
        ({NORM: torch.ones(32, 1)}, "must have shape [32] by config.json, not [32, 1]"),
        ({K: torch.ones(32, 16)}, "must have shape [16, 32] by config.json, not [32, 16]"),
        ({NORM: torch.ones(32, dtype=torch.int8)}, "must be F32, BF16, F16 or F64, not I8"),
        ({NORM: torch.ones(32).to(torch.float8_e4m3fn)}, "F16 or F64, not F8_E4M3"),
        (
            {NORM: torch.ones(32).where(torch.arange(32) != 7, torch.inf)},
            "norm.weight' holds NaN or",
        ),
        ({K: torch.full((16, 32), torch.nan, dtype=torch.float16)}, "k_proj.weight' holds NaN or"),
        ({f"x{i}": torch.ones(1) for i in range(9)}, "'x2' and 6 more"),
        (
            {K: None, K.replace("weight", "qweight"): torch.ones(3, dtype=torch.int32)},
            "k_proj' is stored as qweight",
        ),
        (
            {
                (Q := K.replace("k_proj", "q_proj")): None,
                Q.replace("weight", "qweight"): torch.ones(3, dtype=torch.int32),
                Q.replace("weight", "scales"): torch.ones(3),
            },
            "q_proj' is stored as qweight, scales",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    llama: Path, tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        PagedModel(altered(llama, tmp_path, **changes))
    text = str(caught.value)
    assert text.startswith("model: ") and message in text
    assert "\n" not in text and len(text) < 300


def test_large_weights_are_no_infinity(llama: Path, tmp_path: Path) -> None:
    large = torch.full((16, 32), 6e4, dtype=torch.float16)  # their sum overflows
    model = PagedModel(altered(llama, tmp_path, **{K: large}), dtype=torch.float16).model
    (linear,) = model.layers[0].attention.qkv.linears
    assert (linear.matrix.data.values == 6e4).sum() == large.numel()


def test_rotary_buffers_of_old_checkpoints_are_left_out(llama: Path, tmp_path: Path) -> None:
    buffers = {
        f"model__layers__{i}__self_attn__rotary_emb__inv_freq": torch.ones(4) for i in range(3)
    }
    ids = tokens(9)
    expected = PagedModel(llama).logits(ids)
    assert torch.equal(PagedModel(altered(llama, tmp_path, **buffers)).logits(ids), expected)


def test_random_weights_depend_on_the_seed_alone(llama: Path) -> None:
    spec, ids = PagedModel(llama).spec, tokens(9)
    first, again, other = (PagedModel(None, spec=spec, seed=seed).logits(ids) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.isfinite(first).all()
    layer = PagedModel(None, spec=spec).model.layers[0]
    assert torch.equal(layer.norms[1].weight, torch.ones(32))
    assert torch.equal(layer.attention.qkv.linears[0].matrix.bias, torch.zeros(64))
    assert 0.01 < float(layer.attention.qkv.linears[0].matrix.data.values.std()) < 0.03


def test_large_random_matrices_repeat_their_rows(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "RANDOM_DRAWS", 20 * 32)
    weight = PagedModel(None, spec=PagedModel(llama).spec).model.embed.table  # [96, 32]
    assert len(weight[:20].unique(dim=0)) == 20
    assert torch.equal(weight[:20], weight[60:80]) and torch.equal(weight[:16], weight[80:])


def test_weights_are_freed_with_the_model(llama: Path) -> None:
    """Immediately: the builder keeps no references, and there is no cycle for the garbage
    collector."""
    paged = PagedModel(llama)
    layer = paged.model.layers[0]
    tensors = (layer.mlp.down.matrix.data.values, layer.norms[1].weight, paged.model.embed.table)
    alive = [weakref.ref(tensor) for tensor in tensors]
    gc.disable()
    try:
        del paged, layer, tensors
        assert [tensor() for tensor in alive] == [None] * 3
    finally:
        gc.enable()


def test_torchs_threads_are_restored(llama: Path, tmp_path: Path) -> None:
    """Also after a failure."""
    bad = altered(llama, tmp_path, **{NORM: torch.ones(32), K: torch.full((16, 32), torch.nan)})
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        PagedModel(llama)
        with pytest.raises(ModelError, match="NaN"):
            PagedModel(bad, quantization="int8")
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "threshold", "shown"),
    [(Terminal, 0, True), (Terminal, 1 << 30, False), (io.StringIO, 0, False)],
)
def test_a_bar_for_large_models_on_a_terminal(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    stream: type[io.StringIO],
    threshold: int,
    shown: bool,
) -> None:
    out = stream()
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setattr(loader, "PROGRESS_BYTES", threshold)
    PagedModel(llama)
    assert ("loading weights" in out.getvalue()) == shown

"""Tiny checkpoints with a head for multi-token prediction, and its definition in torch: a matrix
over the normalised embedding of the next token and the normalised hidden state, then one layer and
a norm, which are those of a model of one layer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from helpers.model_cases import CASES
from helpers.tiny_models import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
NEXTN = "model.layers.3."
# case -> names of the norm of the embedding, of that of the hidden state and of the matrix, the
# prefix of the layer, the name of its norm
NAMES: dict[str, tuple[str, str, str, str, str]] = {
    **dict.fromkeys(
        ("qwen3.5", "qwen3-next", "qwen3.5-moe"),
        (
            *("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"),
            *("mtp.layers.0.", "mtp.norm"),
        ),
    ),
    **dict.fromkeys(
        ("deepseek3", "glm4-moe", "glm4-moe-lite", "deepseek3.2", "glm-5"),
        (
            *(f"{NEXTN}enorm", f"{NEXTN}hnorm", f"{NEXTN}eh_proj"),
            *(NEXTN, f"{NEXTN}shared_head.norm"),
        ),
    ),
    "mimo": (
        *("model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm"),
        *("model.mtp_layers.0.input_proj", "model.mtp_layers.0."),
        "model.mtp_layers.0.final_layernorm",
    ),
}
ALONE: dict[str, dict[str, Any]] = {  # options of a model whose one layer is like the head's
    "qwen3.5": {"layer_types": ["full_attention"]},
    "qwen3-next": {"layer_types": ["full_attention"]},
    "qwen3.5-moe": {"layer_types": ["full_attention"]},
    "deepseek3": {"first_k_dense_replace": 0},
    "deepseek3.2": {"mlp_layer_types": ["sparse"]},
    "glm-5": {"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
    "glm4-moe": {"first_k_dense_replace": 0},
    "glm4-moe-lite": {"mlp_layer_types": ["sparse"]},
}
LAST = ("o_proj", "out_proj", "down_proj")  # matrices whose outputs are added to the residual


@dataclass(frozen=True, eq=False)
class Head:
    """The head and its model, of transformers.

    Attributes:
        gains: of the norms of the embedding and of the hidden state.
        join: [hidden, 2 * hidden].
        hidden_first: its columns are of the hidden state first.
    """

    target: Any
    layer: Any
    gains: tuple[Tensor, Tensor]
    join: Tensor
    hidden_first: bool

    @torch.no_grad()
    def drafts(self, text: tuple[int, ...], count: int) -> list[int]:
        """Return the likeliest tokens after a text: the model's own next token is its last."""
        ids, found = torch.tensor([list(text)]), []
        hidden = self.target.model(input_ids=ids).last_hidden_state[:, :-1]
        x = self._joined(ids[:, 1:], hidden)
        for _ in range(count):
            last = self.layer.model(inputs_embeds=x).last_hidden_state[:, -1:]
            found.append(int(self.target.lm_head(last).argmax()))
            x = torch.cat((x, self._joined(torch.tensor([[found[-1]]]), last)), 1)
        return found

    def _joined(self, ids: Tensor, hidden: Tensor) -> Tensor:
        eps = self.target.config.rms_norm_eps
        inputs = (self.target.get_input_embeddings()(ids), hidden)
        parts = [
            torch.nn.functional.rms_norm(x, gain.shape, gain, eps)
            for x, gain in zip(inputs, self.gains, strict=True)
        ]
        return torch.cat(parts[::-1] if self.hidden_first else parts, -1) @ self.join.T


def save_predicting(folder: Path, case: str) -> Head:
    """Save a model with a head. Layers of both add little to the embedding of the last token, so
    the head is often right."""
    family, options = ("Qwen2", {}) if case == "mimo" else CASES[case]
    target = _save(folder, family, 0, options, 0.01)
    with TemporaryDirectory() as other:
        alone = {**options, "num_hidden_layers": 1, **ALONE.get(case, {})}
        layer = _save(Path(other), family, 1, alone, 0.2)
        stored = load_file(Path(other) / WEIGHTS)
    with torch.no_grad():
        layer.model.norm.weight.copy_(target.model.norm.weight)
    first, second, matrix, prefix, last = NAMES[case]
    width, generator = target.config.hidden_size, torch.Generator().manual_seed(2)
    gains = [torch.randn(width, generator=generator) * 0.2 + 1 for _ in range(2)]
    parts = [torch.eye(width), torch.randn(width, width, generator=generator) * 0.05]
    join = torch.cat(parts[::-1] if case == "mimo" else parts, 1)
    tensors = {
        prefix + name.partition("layers.0.")[2]: values
        for name, values in stored.items()
        if "layers.0." in name
    }
    whole, offset = load_file(folder / WEIGHTS), 1.0 if case.startswith("qwen") else 0.0
    tensors |= {f"{first}.weight": gains[0] - offset, f"{second}.weight": gains[1] - offset}
    tensors |= {f"{matrix}.weight": join, f"{last}.weight": whole["model.norm.weight"].clone()}
    if prefix == NEXTN:  # which repeats parts of the model
        tensors[f"{NEXTN}embed_tokens.weight"] = whole["model.embed_tokens.weight"].clone()
        tensors[f"{NEXTN}shared_head.head.weight"] = whole["lm_head.weight"].clone()
    save_file({**whole, **tensors}, folder / WEIGHTS)
    if case == "mimo":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **MIMO}))
    return Head(target, layer, (gains[0], gains[1]), join, case == "mimo")


def _save(folder: Path, family: str, seed: int, options: dict[str, Any], factor: float) -> Any:
    """Save a model whose layers add `factor` times as much as random ones."""
    model = tiny_model(family, seed=seed, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(last in name for last in LAST):
                parameter.mul_(factor)
    model.save_pretrained(folder)
    return model

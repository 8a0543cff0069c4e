"""Tiny EAGLE-3 heads, as published ones are stored, and their definition in torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from helpers.tiny_models import tiny_config, tiny_model
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 8, 32, 40, 4, 2, 16
DRAFTED = 70  # tokens that it drafts, of 96
LAST = ("o_proj", "down_proj")  # matrices whose outputs are added to the residual


@dataclass(frozen=True, eq=False)
class Eagle3:
    """A head and its model, of transformers.

    Attributes:
        tensors: of the head, as stored.
        normed: the residual is normalised.
    """

    target: Any
    tensors: dict[str, Tensor]
    normed: bool

    @torch.no_grad()
    def drafts(self, text: tuple[int, ...], count: int) -> list[int]:
        """Return the likeliest tokens after a text: the model's own next token is its last."""
        ids, found = torch.tensor([list(text)]), []
        states = self.target.model(input_ids=ids, output_hidden_states=True).hidden_states
        taps = [states[layer][0, :-1] for layer in (2, LAYERS // 2, LAYERS - 3)]
        hidden = torch.cat(taps, 1) @ self.tensors["fc.weight"].T
        tokens = ids[0, 1:]
        for _ in range(count):
            after = self._layer(tokens, hidden)
            logits = self._norm("norm", after[-1]) @ self.tensors["lm_head.weight"].T
            best = int(logits.argmax())
            found.append(best + int(self.tensors["d2t"][best]))
            tokens = torch.cat((tokens, torch.tensor([found[-1]])))
            hidden = torch.cat((hidden, after[-1:]))
        return found

    def _norm(self, name: str, x: Tensor) -> Tensor:
        gain = self.tensors[f"{name}.weight"]
        return F.rms_norm(x, gain.shape, gain, self.target.config.rms_norm_eps)

    def _layer(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """tokens [n], hidden [n, hidden] at the places before them -> [n, hidden]."""
        w = {name.removeprefix("midlayer."): values for name, values in self.tensors.items()}
        embedded = self.target.get_input_embeddings()(tokens)
        normed = self._norm("midlayer.hidden_norm", hidden)
        x = torch.cat((self._norm("midlayer.input_layernorm", embedded), normed), 1)
        q, k, v = (
            (x @ w[f"self_attn.{name}_proj.weight"].T).view(1, len(x), -1, DIM).transpose(1, 2)
            for name in "qkv"
        )
        rope = LlamaRotaryEmbedding(self.target.config)
        q, k = apply_rotary_pos_emb(q, k, *rope(x, torch.arange(len(x))[None]))
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
        residual = normed if self.normed else hidden
        y = residual + attended.flatten(1) @ w["self_attn.o_proj.weight"].T
        z = self._norm("midlayer.post_attention_layernorm", y)
        gate, up = (z @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return y + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def save_eagle3(root: Path, *, normed: bool = False) -> Eagle3:
    """Save a model in root / "model" and a head in root / "head". The likeliest token of both is
    often the last one again, so that the head is often right."""
    sizes = {"head_dim": DIM, "tie_word_embeddings": True}
    target = tiny_model("Llama", num_hidden_layers=LAYERS, **sizes)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if any(last in name for last in LAST):
                parameter.mul_(0.02)
    target.save_pretrained(root / "model")
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int, size: float = 0.2) -> Tensor:
        return torch.randn(*shape, generator=generator) * size

    def gain() -> Tensor:
        return 1 + drawn(HIDDEN)

    drafted = torch.randperm(96, generator=generator)[:DRAFTED].sort().values
    known = torch.zeros(96, dtype=torch.bool)
    known[drafted] = True
    layer = {
        "input_layernorm.weight": gain(),
        "hidden_norm.weight": gain(),
        "post_attention_layernorm.weight": gain(),
        "self_attn.q_proj.weight": drawn(HEADS * DIM, 2 * HIDDEN),
        "self_attn.k_proj.weight": drawn(KV_HEADS * DIM, 2 * HIDDEN),
        "self_attn.v_proj.weight": drawn(KV_HEADS * DIM, 2 * HIDDEN),
        "self_attn.o_proj.weight": drawn(HIDDEN, HEADS * DIM, size=0.2),
        "mlp.gate_proj.weight": drawn(INNER, HIDDEN),
        "mlp.up_proj.weight": drawn(INNER, HIDDEN),
        "mlp.down_proj.weight": drawn(HIDDEN, INNER),
    }
    tensors = {f"midlayer.{name}": values for name, values in layer.items()}
    tensors |= {
        "fc.weight": drawn(HIDDEN, 3 * HIDDEN, size=0.2) + 3 * torch.eye(HIDDEN).repeat(1, 3),
        "norm.weight": target.model.norm.weight.detach().clone(),
        "lm_head.weight": target.lm_head.weight.detach()[drafted].clone(),
        "d2t": drafted - torch.arange(DRAFTED),
        "t2d": known,
    }
    (root / "head").mkdir()
    save_file(tensors, root / "head" / "model.safetensors")
    one = {"num_hidden_layers": 1, "intermediate_size": INNER, "head_dim": DIM}
    config = tiny_config("Llama", **one).to_dict()
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
    config |= {"norm_before_residual": normed}
    (root / "head" / "config.json").write_text(json.dumps(config))
    return Eagle3(target, tensors, normed)

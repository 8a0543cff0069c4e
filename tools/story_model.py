"""The network that `train_bundled.py` trains: the Llama of `transformers`, which returns logits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def sizes(rope_theta: float = 10000.0, **others: int) -> LlamaConfig:
    """Return the configuration of a model. Where nothing is said, it is the target's."""
    target = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 704,
        "max_position_embeddings": 1024,
    }
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    fixed = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": rope}
    return LlamaConfig(**{**target, **others}, **fixed)


TARGET = sizes()
DRAFT = sizes(
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    intermediate_size=256,
)


def narrow(module: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
    """Keep the residual stream narrow: it is the memory traffic that costs."""
    return embedded.bfloat16() if torch.is_autocast_enabled("cpu") else embedded


class Llama(LlamaForCausalLM):
    """The language model; the output matrix is the embedding matrix."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * config.num_hidden_layers) ** 0.5 if last else 0.02
                nn.init.normal_(parameter, std=std)
        self.model.embed_tokens.register_forward_hook(narrow)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, vocab] for token ids [batch, length]."""
        return super().forward(input_ids=ids, use_cache=False).logits

    def save(self, folder: Path, bos_id: int, eos_id: int) -> None:
        """Write `model.safetensors` (bfloat16) and `config.json`."""
        self.config.bos_token_id, self.config.eos_token_id = bos_id, eos_id
        stored = LlamaForCausalLM(self.config).bfloat16()  # it has the name that others know
        stored.load_state_dict(self.state_dict())
        stored.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path) -> Llama:
        """Return the model of an exported folder, widened to float32."""
        return cls.from_pretrained(folder, dtype=torch.float32).eval()

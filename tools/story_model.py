"""The network that `train_bundled.py` trains: a plain Llama in PyTorch.

It is written out here, and not imported from an engine or from `transformers`, so that the training
script needs torch and nothing else. The parameter names and shapes are those of the Hugging Face
`LlamaForCausalLM`, so a state dict can be saved as it is. Rotary embeddings use the same
"rotate half" layout: dimension i is paired with dimension i + head_dim / 2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model. The defaults are the target's."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    ffn_size: int = 704
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def to_hf(self, bos_id: int, eos_id: int) -> dict[str, object]:
        """Return the same sizes as the contents of a Hugging Face `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.ffn_size,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pretraining_tp": 1,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }

    @classmethod
    def from_hf(cls, config: dict[str, object]) -> ModelConfig:
        """Read the sizes back from the contents of a `config.json`."""
        names = {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
            "ffn_size": "intermediate_size",
            "max_positions": "max_position_embeddings",
            "rope_theta": "rope_theta",
            "norm_eps": "rms_norm_eps",
        }
        return cls(**{ours: config[theirs] for ours, theirs in names.items()})


TARGET = ModelConfig()
DRAFT = ModelConfig(hidden_size=96, num_layers=3, num_heads=3, num_kv_heads=1, ffn_size=256)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, [positions, head_dim] each; both halves have the same angles."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(
        torch.arange(config.max_positions, dtype=torch.float32),
        1.0 / config.rope_theta**exponents,
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        config = self.config

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(batch, length, count, config.head_dim).transpose(1, 2)

        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        q = rotate(heads(self.q_proj(x), config.num_heads), cos, sin)
        k = rotate(heads(self.k_proj(x), config.num_kv_heads), cos, sin)
        v = heads(self.v_proj(x), config.num_kv_heads)
        groups = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """The gated feed-forward block (SwiGLU)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer, pre-normalised."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Llama(nn.Module):
    """The language model; the output matrix is the embedding matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * config.num_layers) ** 0.5 if last else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, length, vocab] for token ids [batch, length]."""
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.bfloat16()  # keep the residual stream narrow: it is the memory traffic that costs
            cos, sin = cos.bfloat16(), sin.bfloat16()
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def parameter_count(self) -> int:
        """Return the number of parameters, the shared embedding counted once."""
        return sum(p.numel() for p in self.parameters())

    def save(self, folder: Path, bos_id: int, eos_id: int) -> None:
        """Write `model.safetensors` (bfloat16) and `config.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().bfloat16().contiguous() for k, v in self.state_dict().items()}
        temporary = folder / "model.safetensors.tmp"
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)
        temporary.replace(folder / "model.safetensors")  # never half a file under the real name
        config = json.dumps(self.config.to_hf(bos_id, eos_id), indent=2)
        (folder / "config.json").write_text(config + "\n")

    @classmethod
    def load(cls, folder: Path) -> Llama:
        """Return the model of an exported folder, widened to float32."""
        config = json.loads((folder / "config.json").read_text())
        model = cls(ModelConfig.from_hf(config))
        tensors = load_file(folder / "model.safetensors")
        model.load_state_dict({k: v.float() for k, v in tensors.items()})
        return model.eval()

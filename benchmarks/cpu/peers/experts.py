"""Write models with experts, of true shapes, for kvik and for llama.cpp.

    python experts.py FOLDER [--shapes olmoe-1b-7b qwen3-30b-a3b ...] [--gguf Q4_0 Q4_K_M]

FOLDER/NAME gets a config.json and a tokenizer. kvik draws the weights as it loads (`load_format =
"random"`), of normal numbers with a standard deviation of 0.02. FOLDER/NAME-TYPE.gguf has the same
numbers, in the block types of llama.cpp's own mix. Neither ever holds the floats of the model: a
matrix repeats its first million numbers, routers are drawn whole. Routers of such numbers
should choose their experts nearly evenly. Needs kvik.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from shapes import END, STD, tokenizer
from tokenizers import Tokenizer

from kvik.gguf.export import FILE_TYPES, block_type, model_metadata, tokenizer_metadata
from kvik.gguf.names import EMBEDDING, HEAD, gguf_name
from kvik.gguf.types import BLOCK_TYPES
from kvik.gguf.writer import OutTensor, Scalar, write_gguf
from kvik.models.model_spec import ModelSpec
from kvik.models.public import public_configs
from kvik.nn.gguf_quantize import quantize

DRAWS = 1 << 20  # of a matrix


@dataclass(frozen=True)
class Foreign:
    """How llama.cpp names a model that kvik reads no GGUF files of.

    Attributes:
        metadata: beside what all have.
        names: of a block's layers -> those of a checkpoint; shapes of what is no matrix.
    """

    architecture: str
    metadata: Mapping[str, Scalar | list[int]]
    names: Mapping[str, str]
    others: Mapping[str, tuple[int, ...]]


QWEN3_6 = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PUBLIC = ("olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v2-lite")
SHAPES: Mapping[str, Mapping[str, object]] = {
    **{name: public_configs()[name] for name in PUBLIC},
    "qwen3.6-35b-a3b": QWEN3_6,
}
FOREIGN = {
    "qwen3.6-35b-a3b": Foreign(
        "qwen35moe",
        {
            "expert_shared_feed_forward_length": 512,
            "full_attention_interval": 4,
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": 32,
            "ssm.inner_size": 4096,
        },
        {
            "ffn_norm": "",
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        {"ssm_conv1d.weight": (8192, 4), "ssm_a": (32,), "ssm_dt.bias": (32,)},
    ),
}


def write_folder(name: str, folder: Path, layers: int | None) -> None:
    """config.json and a tokenizer of as many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[name], "initializer_range": STD}
    if layers is not None:
        config["num_hidden_layers"] = layers
    vocab = int(str(config["vocab_size"]))
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), vocab - 1)
    files = {
        "config.json": {**config, **ends},
        "tokenizer.json": tokenizer(vocab),
        "tokenizer_config.json": {"eos_token": END, "bos_token": END},
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def stored(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names in a checkpoint, and shapes, of matrices and norms."""
    declared = spec.declaration
    for table in declared.tables:
        yield f"{table.name}.weight", (table.rows, table.width)
    for linear in declared.linears:
        for layer, outputs in zip(linear.names, linear.outputs, strict=True):
            yield f"{layer}.weight", (outputs, linear.inputs) if outputs > 1 else (linear.inputs,)
    for norm in declared.norms:
        yield f"{norm.name}.weight", (norm.size,)


def gguf_tensors(spec: ModelSpec, type: str, foreign: Foreign | None) -> list[OutTensor]:
    """Those of all experts of a layer are one."""
    names = foreign.names if foreign else spec.family.gguf_names
    found: dict[str, tuple[int, ...]] = {}
    count: dict[str, int] = {}
    for hf, shape in stored(spec):
        name = gguf_name(hf, names)
        assert name is not None, hf
        found[name] = shape
        count[name] = count.get(name, 0) + 1
    made = {
        name: (count[name], *shape) if name.partition(".weight")[0].endswith("_exps") else shape
        for name, shape in found.items()
    }
    for layer in range(spec.num_layers if foreign else 0):
        if spec.layers[layer].state is not None:
            made |= {f"blk.{layer}.{name}": shape for name, shape in foreign.others.items()}
    blocks = Blocks()
    tensors = []
    for name, shape in made.items():
        kind = type_of(type, name, shape, spec)
        data = blocks.of(name, kind, shape)
        tensors.append(OutTensor(name, BLOCK_TYPES[kind], shape, data))
    return tensors


def type_of(type: str, name: str, shape: tuple[int, ...], spec: ModelSpec) -> str:
    """As `llama-quantize` chooses it."""
    if len(shape) == 1 or "conv1d" in name:
        return "F32"
    if name == HEAD:
        return "Q6_K"
    if name == EMBEDDING:
        return FILE_TYPES[type].usual
    return block_type(type, name, shape[-1], spec)


class Blocks:
    """Rows of random numbers as the blocks of a file, made once for each type and width."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._made: dict[tuple[str, int], bytes] = {}

    def of(self, name: str, type: str, shape: tuple[int, ...]) -> Callable[[], Iterable[bytes]]:
        """What `OutTensor.data` is."""

        def data() -> Iterator[bytes]:
            if type == "F32":
                yield self._floats(name, shape)
                return
            width = shape[-1]
            rows = prod(shape[:-1])
            if (type, width) not in self._made:
                self._made[type, width] = self._rows(type, width)
            made, row = self._made[type, width], BLOCK_TYPES[type].row_bytes(width)
            while rows:
                taken = min(rows, len(made) // row)
                yield made[: taken * row]
                rows -= taken

        return data

    def _rows(self, type: str, width: int) -> bytes:
        numbers = torch.empty(DRAWS // width, width).normal_(std=STD, generator=self._random)
        return quantize(type, numbers).numpy().tobytes()

    def _floats(self, name: str, shape: tuple[int, ...]) -> bytes:
        """Gains are 1, decays -1, biases 0, matrices random."""
        last = name.rsplit(".", 2)[-2:]
        if "norm" in name:
            values = torch.ones(shape)
        elif last[-1] in ("ssm_a", "bias"):
            values = torch.full(shape, -1.0 if last[-1] == "ssm_a" else 0.0)
        else:
            values = torch.empty(shape).normal_(std=STD, generator=self._random)
        return values.numpy().tobytes()


def write_file(name: str, folder: Path, type: str, path: Path) -> None:
    spec = ModelSpec.from_config(json.loads((folder / "config.json").read_text("utf-8")), name)
    foreign = FOREIGN.get(name)
    if foreign is None:
        facts: dict[str, Scalar | list[int]] = dict(model_metadata(spec, name, type))
    else:
        # What all have is told as of a model that is named alike; its experts and heads are these.
        facts = told(spec, name, type, foreign)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = spec.vocab_size - 1
    words = tokenizer_metadata(library, spec.vocab_size, end, end, None)
    tensors = gguf_tensors(spec, type, foreign)
    write_gguf(path, {**facts, **words}, tensors)
    print(f"{path}: {sum(tensor.size for tensor in tensors) / 1e9:.2f} GB")


def told(spec: ModelSpec, name: str, type: str, foreign: Foreign) -> dict[str, Scalar | list[int]]:
    """The metadata of a model that kvik writes no GGUF files of."""
    experts = next(layer.experts for layer in spec.layers if layer.experts)
    sizes: dict[str, Scalar | list[int]] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "rope.freq_base": 1e7,
        "expert_count": experts.router.experts,
        "expert_used_count": experts.router.active,
        "expert_feed_forward_length": experts.inner,
        **foreign.metadata,
    }
    return {
        "general.architecture": foreign.architecture,
        "general.name": name,
        "general.file_type": FILE_TYPES[type].code,
        "general.quantization_version": 2,
        **{f"{foreign.architecture}.{key}": value for key, value in sizes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a try")
    parser.add_argument("--gguf", nargs="*", choices=FILE_TYPES, default=[])
    args = parser.parse_args()
    for name in args.shapes:
        write_folder(name, args.folder / name, args.layers)
        for type in args.gguf:
            write_file(name, args.folder / name, type, args.folder / f"{name}-{type}.gguf")


if __name__ == "__main__":
    main()

"""Write models with experts, of real shapes, for kvik and for llama.cpp.

    python experts.py FOLDER [--shapes olmoe-1b-7b qwen3-30b-a3b ...] [--gguf Q4_0 Q4_K_M]

FOLDER/NAME gets a config.json and a tokenizer. kvik generates the weights as it loads (`load_format
= "random"`): normal numbers with a standard deviation of 0.02. FOLDER/NAME-TYPE.gguf has the same
numbers, in the block types of llama.cpp's own mix. Neither ever holds the whole model in floats: a
matrix repeats its first million numbers, only routers are generated in full. Routers of such
numbers should choose their experts nearly evenly. Needs kvik.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from shapes import END, STD, tokenizer
from tokenizers import Tokenizer

from kvik.gguf.export import FILE_TYPES, model_metadata, tokenizer_metadata
from kvik.gguf.reader import write_gguf
from kvik.gguf.types import BLOCK_TYPES
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import Selection, TensorRun
from kvik.nn.gguf_export import gguf_tensors, quantize
from kvik.nn.safetensors import TensorEntry
from kvik.planner.families import public_configs
from kvik_bench.scripts import tensor_shapes

DRAWS = 1 << 20  # random numbers of a matrix


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


def write_folder(name: str, folder: Path, layers: int | None) -> None:
    """Write config.json and a tokenizer with the model's vocabulary size."""
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


class NoWeights:
    """A checkpoint that lists a model's tensors without any data."""

    facts = "config.json"

    def __init__(self, spec: ModelSpec) -> None:
        self.entries = {
            name: TensorEntry(name, "BF16", shape, 0, 2 * prod(shape))
            for name, shape in tensor_shapes(spec).items()
        }

    def runs(self, wanted: Mapping[str, Selection]) -> Iterator[TensorRun]:
        raise NotImplementedError


class Blocks:
    """Rows of random numbers as the blocks of a GGUF file, made once for each type and width."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._made: dict[tuple[str, int], bytes] = {}

    def of(self, name: str, type: str, shape: tuple[int, ...]) -> Callable[[], Iterable[bytes]]:
        """Return a value for `OutTensor.data`."""

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
        """Return the values: gains are 1, decays -1, biases 0, matrices random."""
        last = name.rsplit(".", 2)[-2:]
        if "norm" in name:
            values = torch.ones(shape)
        elif last[-1] in ("ssm_a", "bias"):
            values = torch.full(shape, -1.0 if last[-1] == "ssm_a" else 0.0)
        else:
            values = torch.empty(shape).normal_(std=STD, generator=self._random)
        return values.numpy().tobytes()


def write_file(name: str, folder: Path, type: str, path: Path) -> None:
    """Write the tensors that kvik would export, with random values."""
    spec = ModelSpec.from_config(json.loads((folder / "config.json").read_text("utf-8")), name)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = spec.vocab_size - 1
    words = tokenizer_metadata(library, spec.vocab_size, end, end, None)
    blocks = Blocks()
    tensors = [
        replace(tensor, data=blocks.of(tensor.name, tensor.type.name, tensor.shape))
        for tensor in gguf_tensors(NoWeights(spec), spec, type)
    ]
    write_gguf(path, {**model_metadata(spec, name, type), **words}, tensors)
    print(f"{path}: {sum(tensor.size for tensor in tensors) / 1e9:.2f} GB")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
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

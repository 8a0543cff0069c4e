"""Write models of real shapes for kvik and other engines, to measure them without downloads.

    python shapes.py FOLDER [--shapes llama-3.2-1b olmoe-1b-7b ...] [--gguf Q4_0 Q4_K_M]

Speed does not depend on the values of weights, only on their shape and format, so they are normal
numbers with a standard deviation of 0.02; norms are 1. FOLDER/NAME is a folder in Hugging Face
format, with a byte-level BPE tokenizer of the right size. Models with experts may be larger than
memory as floats: their folders have no weights, which kvik generates as it loads (`load_format =
"random"`). FOLDER/NAME-TYPE.gguf, with the block types of llama.cpp's own mix, never holds the
model in floats either: a matrix repeats its first million numbers, only routers are generated in
full. Routers of such numbers should choose their experts nearly evenly.
"""

from __future__ import annotations

import itertools
import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvik.gguf.export import FILE_TYPES, model_metadata, tokenizer_metadata
from kvik.gguf.reader import write_gguf
from kvik.gguf.types import BLOCK_TYPES
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import Selection, TensorRun
from kvik.nn.gguf_export import gguf_tensors, quantize
from kvik.nn.safetensors import TensorEntry, write_safetensors
from kvik.planner.families import public_configs
from kvik_bench.scripts import tensor_shapes

STD = 0.02
END = "<|end|>"  # the only special token: the last id
DRAWS = 1 << 20  # random numbers of a matrix in a GGUF file

STORIES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 288,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 768,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
HYBRID = {  # three layers with states for each layer of attention
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
QWEN3_5 = {
    **HYBRID,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "intermediate_size": 3584,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_6 = {
    **HYBRID,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": False,
}
KIMI = public_configs()["kimi-linear-48b-a3b"]
KIMI_8 = {  # 13.9 of its 49 billion parameters
    **KIMI,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "model_max_length": 32768,
}
FALCON_MAMBA_8 = {  # 1.4 of its 7.3 billion parameters
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "vocab_size": 65024,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "time_step_rank": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
AXK2_LIGHT = {  # all sizes are the architecture's usual ones
    "architectures": ["AXK2ForCausalLM"],
    "model_type": "axk2",
    "vocab_size": 163840,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
PUBLIC = (
    *("qwen2.5-0.5b", "llama-3.2-1b", "olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v2-lite"),
    "granite-4.0-h-1b",
)
SHAPES: Mapping[str, Mapping[str, object]] = {
    **{name: public_configs()[name] for name in PUBLIC},
    "stories-15m": STORIES,
    "qwen3.5-0.8b": QWEN3_5,
    "qwen3.6-35b-a3b": QWEN3_6,
    "kimi-linear-8-layers": KIMI_8,
    "falcon-mamba-8-layers": FALCON_MAMBA_8,
    "a.x-k2-light": AXK2_LIGHT,
}


def byte_letters() -> list[str]:
    """Return one printable character for each byte, as in GPT-2: itself, or one from 256 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    plain |= set(range(ord("®"), ord("ÿ") + 1))
    spare = itertools.count(256)
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def tokenizer(vocab: int) -> dict:
    """Return tokenizer.json: the bytes, then pairs of bytes, then triples, as many as fit."""
    letters = byte_letters()
    pairs = ((a, b) for a in letters for b in letters)
    triples = ((a + b, c) for a in letters for b in letters for c in letters)
    merges = list(itertools.islice(itertools.chain(pairs, triples), vocab - len(letters) - 1))
    words = [*letters, *(a + b for a, b in merges), END]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": vocab - 1, "content": END, "special": True, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }


def write_folder(config: Mapping[str, object], folder: Path) -> ModelSpec:
    """Write config.json and a tokenizer with the model's vocabulary size; without experts, weights
    as well."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = int(str(config["vocab_size"]))
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), vocab - 1)
    config = {**config, **ends, "initializer_range": STD}
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer(vocab),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "bos_token": END,
        },
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    spec = ModelSpec.from_config(config, folder.name)
    if not spec.experts_of_token:
        random = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if "norm" in name
            else torch.empty(shape, dtype=torch.bfloat16).normal_(std=STD, generator=random)
            for name, shape in tensor_shapes(spec).items()
        }
        write_safetensors(folder / "model.safetensors", tensors)
    return spec


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


def write_file(spec: ModelSpec, folder: Path, type: str, path: Path) -> None:
    """Write the tensors that kvik would export, with random values."""
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = spec.vocab_size - 1
    words = tokenizer_metadata(library, spec.vocab_size, end, end, None)
    blocks = Blocks()
    tensors = [
        replace(tensor, data=blocks.of(tensor.name, tensor.type.name, tensor.shape))
        for tensor in gguf_tensors(NoWeights(spec), spec, type)
    ]
    write_gguf(path, {**model_metadata(spec, folder.name, type), **words}, tensors)
    print(f"{path}: {sum(tensor.size for tensor in tensors) / 1e9:.2f} GB")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, required=True)
    parser.add_argument("--gguf", nargs="*", choices=FILE_TYPES, default=[])
    args = parser.parse_args()
    for name in args.shapes:
        folder: Path = args.folder / name
        spec = write_folder(SHAPES[name], folder)
        for type in args.gguf:
            write_file(spec, folder, type, args.folder / f"{name}-{type}.gguf")


if __name__ == "__main__":
    main()

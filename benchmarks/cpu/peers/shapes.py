"""Write model folders of real shapes with random weights, to measure engines without downloads.

    python shapes.py FOLDER [--shapes qwen2.5-0.5b llama-3.2-1b stories-15m] [--seed 0]

Each becomes FOLDER/NAME in Hugging Face format: bf16 safetensors (normal, standard deviation 0.02;
norms are 1), tied embeddings, and a byte-level BPE tokenizer of the right size. Speed does not
depend on the values of weights, only on their shape and format. Needs only numpy.
"""

from __future__ import annotations

import itertools
import json
import struct
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STD = 0.02
END = "<|end|>"  # the only special token: the last id


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the speed of a Llama-like model. Its output layer is the tied
    embedding."""

    architecture: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    rope_theta: float
    rope_scaling: dict | None = None
    qkv_bias: bool = False
    positions: int = 32768

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "qwen2.5-0.5b": Shape(
        "Qwen2ForCausalLM", "qwen2", 896, 24, 14, 2, 4864, 151936, 1e6, qkv_bias=True
    ),
    "llama-3.2-1b": Shape(
        "LlamaForCausalLM",
        "llama",
        2048,
        16,
        32,
        8,
        8192,
        128256,
        5e5,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        positions=131072,
    ),
    "stories-15m": Shape("LlamaForCausalLM", "llama", 288, 6, 6, 6, 768, 32000, 1e4),
}


def config(shape: Shape) -> dict:
    return {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "tie_word_embeddings": True,
        "bos_token_id": shape.vocab - 1,
        "eos_token_id": shape.vocab - 1,
        "torch_dtype": "bfloat16",
        "initializer_range": STD,
    }


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield checkpoint names and shapes; matrices are [out, in]."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (shape.hidden,)
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{layer}.self_attn.{name}.weight", (rows, shape.hidden)
            if shape.qkv_bias:
                yield f"{layer}.self_attn.{name}.bias", (rows,)
        yield f"{layer}.self_attn.o_proj.weight", (shape.hidden, queries)
        yield f"{layer}.post_attention_layernorm.weight", (shape.hidden,)
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}.mlp.{name}.weight", (shape.ffn, shape.hidden)
        yield f"{layer}.mlp.down_proj.weight", (shape.hidden, shape.ffn)
    yield "model.norm.weight", (shape.hidden,)


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of bfloat16, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_weights(shape: Shape, path: Path, seed: int) -> None:
    """Write a safetensors file: length of the header, the header in JSON, then the bytes."""
    header, end = {}, 0
    for name, size in tensors(shape):
        begin, end = end, end + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, size in tensors(shape):
            if name.endswith("norm.weight"):
                values = np.ones(size, np.float32)
            else:
                values = random.standard_normal(size, np.float32) * np.float32(STD)
            file.write(bf16(values).tobytes())


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


def write(name: str, folder: Path, seed: int) -> None:
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": config(shape),
        "generation_config.json": {"eos_token_id": shape.vocab - 1, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "bos_token": END,
            "model_max_length": shape.positions,
        },
        "tokenizer.json": tokenizer(shape.vocab),
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=1, ensure_ascii=False), "utf-8")
    write_weights(shape, folder / "model.safetensors", seed)
    total = sum(int(np.prod(size)) for _, size in tensors(shape))
    print(f"{folder}: {total / 1e6:.0f} M parameters")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in args.shapes:
        write(name, args.folder / name, args.seed)


if __name__ == "__main__":
    main()

"""The work that the roofline measures: kernel calls on tapes, and their minimal cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from kvik.kernels.cpu import _native
from kvik.kernels.cpu.native import DTYPES
from kvik.kernels.weights import ACTIVATIONS
from kvik.spec.kv import KV_FORMATS

KERNELS = {name: (i, dict(args)) for i, (name, args) in enumerate(_native.kernels())}
# Numbers of features that no case here has; they are 0 then.
UNUSED = ("bias_pair", "fp8_x", "q_rope_stride", "window", "chunked", "reach", "softcap")
UNUSED += ("sink_keys", "sink_q_stride")
# Element types of the KV caches.
CACHES = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
# Words of scale, all of about 0.01 (csrc/kv_numbers.hpp); those of int4 with 8 as the zero point.
SCALES = {"bf16": 0, "fp8": 0x3C24, "int8": 0x3C24, "int4": 0x7848}
BLOCK_SIZE = 32  # tokens of a block of the KV cache
SILU_AND_MUL = 1

Value = Tensor | torch.dtype | int | float
Wanted = Callable[[str], bool]  # of "kernel case"


@dataclass(frozen=True)
class Kind:
    """How weights are stored, and which peak limits the product.

    Attributes:
        group: the number of inputs that share a scale; 0: all of them.
        scale_bytes: the bytes of a group's scale.
        minima: whether a group also has a minimum, as large as its scale.
    """

    number: int
    bits: int
    peak: str
    group: int = 0
    scale_bytes: int = 0
    minima: bool = False

    def bytes(self, outputs: int, inputs: int) -> int:
        return outputs * inputs * self.bits // 8 + sum(self._small_bytes(outputs, inputs))

    def random(self, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return packed weights, scales and minima. Their layout does not matter for speed, as they
        are random; the bytes of scales are ordinary floats of either size."""
        dtype = torch.bfloat16 if self.bits == 16 else torch.int8
        weight = on_huge_pages(outputs * inputs * self.bits // 8, dtype)
        scales, minima = (
            torch.full((size,), 0x3C, dtype=torch.uint8)
            for size in self._small_bytes(outputs, inputs)
        )
        return weight, scales, minima

    def _small_bytes(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the bytes of the scales and of the minima."""
        groups = inputs // self.group if self.group else 0
        of_groups = outputs * groups * self.scale_bytes
        factors = 0 if self.bits == 16 else 4 * outputs
        return factors + of_groups, of_groups if self.minima else 0


KINDS = {
    "bf16": Kind(1, 16, "bf16"),
    "int8": Kind(2, 8, "int8"),
    "int8-g32": Kind(2, 8, "int8", 32, 2),
    "int8-weight-only": Kind(3, 8, "bf16"),
    "int4-g128": Kind(4, 4, "int8", 128, 2),
    "int4-g32": Kind(4, 4, "int8", 32, 2),
    "int4-min-g32": Kind(5, 4, "int8", 32, 2, minima=True),
    "mxfp4-g32": Kind(7, 4, "int8", 32, 1),
    "iq4-g32": Kind(8, 4, "int8", 32, 2),
    "nvfp4-g16": Kind(9, 4, "int8", 16, 2),
    "fp8": Kind(6, 8, "bf16"),
    "fp8-g128": Kind(6, 8, "bf16", 128, 4),
}
# One layer's matrices: outputs, inputs, activation.
LAYERS = {
    "llama-3.2-1b": {
        "qkv": (3072, 2048, 0),
        "o": (2048, 2048, 0),
        "gate_up": (16384, 2048, SILU_AND_MUL),
        "down": (2048, 8192, 0),
    },
    "qwen2.5-0.5b": {
        "qkv": (1152, 896, 0),
        "o": (896, 896, 0),
        "gate_up": (9728, 896, SILU_AND_MUL),
        "down": (896, 4864, 0),
    },
}


def words(kernel: str, arguments: dict[str, Value]) -> tuple[int, list[int | float]]:
    """Return a kernel's id and its arguments in order: addresses of tensors, numbers of dtypes. A
    missing tensor is 0: none."""
    kernel_id, names = KERNELS[kernel]
    numbers = {name for name, kind in names.items() if kind != "p" and name not in UNUSED}
    wrong = (arguments.keys() - names.keys()) | (numbers - arguments.keys())
    assert not wrong, f"{kernel}: {wrong}"
    return kernel_id, [_word(arguments.get(name, 0)) for name in names]


def _word(value: Value) -> int | float:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return DTYPES[value] if isinstance(value, torch.dtype) else value


@dataclass
class Work:
    """Calls on a tape, and their minimal cost.

    Attributes:
        parts: a name for each call; times are reported by it.
        bytes, operations: of each part, over all its calls.
    """

    kernel: str
    case: str
    peak: str
    tape: _native.Tape = field(default_factory=_native.Tape)
    parts: list[str] = field(default_factory=list)
    bytes: dict[str, float] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)

    def call(self, part: str, num_bytes: float, operations: float, **arguments: Value) -> None:
        self.tape.append(*words(self.kernel, arguments), [])
        self.parts.append(part)
        self.bytes[part] = self.bytes.get(part, 0) + num_bytes
        self.operations[part] = self.operations.get(part, 0) + operations
        self.alive += [a for a in arguments.values() if isinstance(a, Tensor)]


def on_huge_pages(num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return memory on huge pages, filled with repeated ordinary numbers."""
    memory = torch.from_numpy(_native.allocate(num_bytes, True)).view(dtype)
    some = torch.randn(1 << 16)
    some = (some * 40).to(dtype) if dtype == torch.int8 else (some * 0.1).to(dtype)
    for piece in memory.split(len(some)):
        piece.copy_(some[: len(piece)])
    return memory


def linears(
    rows_of: tuple[int, ...], models: tuple[str, ...], budget: int, wanted: Wanted
) -> Iterator[Work]:
    """Yield the matrix products of whole layers, as many layers as fill the budget."""
    for model in models:
        for name, kind in KINDS.items():
            cases = {rows: f"{model} {name} M={rows}" for rows in rows_of}
            cases = {rows: case for rows, case in cases.items() if wanted(f"linear {case}")}
            if not cases:
                continue
            layer_bytes = sum(kind.bytes(o, i) for o, i, _ in LAYERS[model].values())
            weights = [
                {part: kind.random(o, i) for part, (o, i, _) in LAYERS[model].items()}
                for _ in range(math.ceil(budget / layer_bytes))
            ]
            for rows, case in cases.items():
                yield layers_of_linears(case, model, kind, rows, weights)


def layers_of_linears(
    case: str,
    model: str,
    kind: Kind,
    rows: int,
    weights: list[dict[str, tuple[Tensor, Tensor, Tensor]]],
) -> Work:
    work = Work("linear", case, kind.peak)
    for layer in weights:
        for part, (outputs, inputs, activation) in LAYERS[model].items():
            width = outputs // 2 if activation else outputs
            x = torch.randn(rows, inputs).bfloat16()
            weight, scales, minima = layer[part]
            work.call(
                part, kind.bytes(outputs, inputs) + 2 * rows * (inputs + width),
                2 * rows * outputs * inputs, x=x, x_stride=inputs, rows=rows, weight=weight,
                scales=scales, zeros=minima if kind.minima else 0, kind=kind.number, inputs=inputs,
                outputs=outputs, group=kind.group, order=0, activation=activation, bias=0,
                residual=0, residual_stride=0, y=torch.empty(rows, width, dtype=x.dtype),
                y_stride=width, dtype=x.dtype, out_dtype=x.dtype,
            )  # fmt: skip
    return work


def attentions(batches: tuple[int, ...], budget: int, wanted: Wanted) -> Iterator[Work]:
    """Yield decoding at context 2048, then 512 tokens of a prompt, its only ones and the last of
    16,384; 32 query heads, 8 KV heads."""
    for head_dim in (64, 128):
        block = 8 * BLOCK_SIZE * head_dim  # elements of keys
        cases = [("decode", batch, 1, 2048) for batch in batches]
        cases += [("prefill", 1, 512, 512), ("prefill after 15872", 1, 512, 16384)]
        for (name, batch, queries, context), stored in product(cases, CACHES):
            work = Work("attention", f"{name} {stored} B={batch} D={head_dim}", "bf16")
            if not wanted(f"attention {work.case}"):
                continue
            blocks = batch * context // BLOCK_SIZE
            kv_bytes = 2 * blocks * 8 * BLOCK_SIZE * KV_FORMATS[stored].vector_bytes(head_dim)
            layers = math.ceil(budget / kv_bytes)
            keys, values = (
                on_huge_pages(layers * blocks * block * KV_FORMATS[stored].bits // 8, stored_as)
                for stored_as in 2 * [torch.bfloat16 if stored == "bf16" else torch.int8]
            )
            scales = torch.full(
                (layers * blocks * 8 * BLOCK_SIZE,), SCALES[stored], dtype=torch.int16
            )
            order = torch.randperm(layers * blocks, dtype=torch.int32).view(layers, batch, -1)
            tokens, seen = batch * queries, context * queries - queries * (queries - 1) / 2
            q = torch.randn(tokens, 32, head_dim).bfloat16()
            for at in range(layers):
                work.call(
                    name, kv_bytes + 4 * q.numel(), 4 * batch * seen * 32 * head_dim,
                    q=q, q_stride=32 * head_dim, k_cache=keys, v_cache=values, k_scales=scales,
                    v_scales=scales, block_table=order[at], table_stride=context // BLOCK_SIZE,
                    query_start_loc=torch.arange(0, tokens + 1, queries, dtype=torch.int32),
                    seq_lens=torch.full((batch,), context, dtype=torch.int32), num_seqs=batch,
                    heads=32, kv_heads=8, head_dim=head_dim, value_dim=head_dim,
                    block_size=BLOCK_SIZE, scale=head_dim**-0.5, out=torch.empty_like(q),
                    out_stride=32 * head_dim, dtype=q.dtype, kv_dtype=CACHES[stored],
                )  # fmt: skip
            yield work


def small_ones(budget: int, wanted: Wanted) -> Iterator[Work]:
    """Yield the kernels between the products: 512 rows of 2048, read from memory and written."""
    rows, dim, dtype = 512, 2048, torch.bfloat16
    copies = math.ceil(budget / (4 * rows * dim))
    xs, ys = (
        on_huge_pages(2 * copies * rows * dim, dtype).view(copies, rows, dim) for _ in range(2)
    )
    weight = torch.ones(dim, dtype=dtype)
    strides = {"inner": 1, "x_inner_stride": 0, "y_inner_stride": 0}
    more: dict[str, dict[str, Value]] = {
        "rms_norm": {"weight": weight, "weight_dtype": dtype, "eps": 1e-5, "dim": dim, **strides},
        "layer_norm": {"weight": weight, "bias": weight, "weight_stride": 0, "eps": 1e-5}
        | {"dim": dim, **strides},
        "activate": {"activation": ACTIVATIONS["gelu_tanh"], "columns": dim},
        "add": {"out_stride": dim, "dim": dim},
    }
    for kernel, arguments in more.items():
        work = Work(kernel, f"{rows}x{dim} bf16", "fp32")
        if not wanted(f"{kernel} {work.case}"):
            continue
        for at in range(copies):
            x, y = xs[at], ys[at]
            tensors = {"y": xs[at - 1], "out": y} if kernel == "add" else {"y": y}
            num_bytes = 2 * x.numel() * (1 + len(tensors))
            common = {"x_stride": dim, "y_stride": dim, "rows": rows, "dtype": dtype}
            work.call(kernel, num_bytes, 0, x=x, **common, **arguments, **tensors)
        yield work
    vocab = 128_256
    work = Work("largest", f"1x{vocab}", "fp32")
    if not wanted(f"largest {work.case}"):
        return
    for logits in on_huge_pages(budget // (4 * vocab) * 4 * vocab, torch.float32).split(vocab):
        work.call(
            "largest", 4 * vocab, 0, logits=logits, stride=vocab, rows=1, vocab=vocab,
            top=torch.zeros(1), ids=torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip
    yield work

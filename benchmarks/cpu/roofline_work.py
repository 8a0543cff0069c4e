"""The work that the roofline measures: calls of the engine's kernels, and their minimal cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kvik.attention.base import Attend, AttentionSpec, LayerKV
from kvik.kernels.cpu.buffers import zeros
from kvik.kernels.cpu.matrix import TILES
from kvik.kernels.weights import Activation, Matrix, MatrixSpec
from kvik.spec.kv import KV_FORMATS
from kvik.spec.weight_kind import WeightKind
from kvik_bench.machine.native_stage import NativeStage
from kvik_bench.machine.stage import BLOCK_SIZE, CPU, random_layout

# Element types of the KV caches, and words of scale, all of about 0.01 (csrc/kv_numbers.hpp); those
# of int4 with 8 as the zero point.
CACHES = {
    "bf16": (torch.bfloat16, None),
    "fp8": (torch.float8_e4m3fn, 0x3C24),
    "int8": (torch.int8, 0x3C24),
    "int4": (torch.uint8, 0x7848),
}
# How weights are stored, and which peak limits the product.
KINDS = {
    "bf16": (WeightKind("bfloat16"), "bf16"),
    "int8": (WeightKind("int8", activations="token"), "int8"),
    "int8-g32": (WeightKind("int8", 32, activations="group"), "int8"),
    "int8-weight-only": (WeightKind("int8"), "bf16"),
    "int4-g128": (WeightKind("int4", 128), "int8"),
    "int4-g32": (WeightKind("int4", 32), "int8"),
    "int4-min-g32": (WeightKind("int4", 32, "minima"), "int8"),
    "mxfp4-g32": (WeightKind("mxfp4", 32), "int8"),
    "iq4-g32": (WeightKind("iq4", 32), "int8"),
    "nvfp4-g16": (WeightKind("nvfp4", 16), "int8"),
    "fp8": (WeightKind("fp8"), "bf16"),
    "fp8-g128": (WeightKind("fp8", 128), "bf16"),
}
# One layer's matrices: outputs, inputs, activation.
LAYERS: dict[str, dict[str, tuple[int, int, Activation | None]]] = {
    "llama-3.2-1b": {
        "qkv": (3072, 2048, None),
        "o": (2048, 2048, None),
        "gate_up": (16384, 2048, "silu_and_mul"),
        "down": (2048, 8192, None),
    },
    "qwen2.5-0.5b": {
        "qkv": (1152, 896, None),
        "o": (896, 896, None),
        "gate_up": (9728, 896, "silu_and_mul"),
        "down": (896, 4864, None),
    },
}

Wanted = Callable[[str], bool]  # of "kernel case"


@dataclass
class Work:
    """Calls of a kernel, and their minimal cost.

    Attributes:
        rows: of each call.
        parts: a name for each call; times are reported by it.
        bytes, operations: of each part, over all its calls.
        results: of the calls, so that they do not share memory.
    """

    kernel: str
    case: str
    peak: str
    rows: int
    calls: list[Callable[[], object]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    bytes: dict[str, float] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)
    results: list[object] = field(default_factory=list)

    def call(
        self, part: str, num_bytes: float, operations: float, call: Callable[[], object]
    ) -> None:
        self.calls.append(call)
        self.parts.append(part)
        self.bytes[part] = self.bytes.get(part, 0) + num_bytes
        self.operations[part] = self.operations.get(part, 0) + operations

    def track(self, stage: NativeStage) -> Callable[[], list[float]]:
        """Return what runs the calls, and returns the seconds of each."""

        def run(call: Callable[[], object], rows: int) -> None:
            self.results.append(call())

        track = stage.track([partial(run, call) for call in self.calls], self.rows)
        return lambda: track(self.rows)


def on_huge_pages(num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return memory on huge pages, filled with repeated ordinary numbers."""
    memory = zeros(num_bytes // dtype.itemsize, dtype=dtype)
    some = torch.randn(1 << 16)
    some = (some * 40).to(dtype) if dtype == torch.int8 else (some * 0.1).to(dtype)
    for piece in memory.split(len(some)):
        piece.copy_(some[: len(piece)])
    return memory


def linears(
    stage: NativeStage,
    rows_of: tuple[int, ...],
    models: tuple[str, ...],
    budget: int,
    wanted: Wanted,
) -> Iterator[Work]:
    """Yield the matrix products of whole layers, as many layers as fill the budget."""
    for model in models:
        for name, (kind, peak) in KINDS.items():
            cases = {rows: f"{model} {name} M={rows}" for rows in rows_of}
            cases = {rows: case for rows, case in cases.items() if wanted(f"linear {case}")}
            layers: list[dict[str, tuple[Matrix, int]]] = []
            while cases and sum(size for layer in layers for _, size in layer.values()) < budget:
                layers.append(
                    {part: random_matrix(kind, *sizes) for part, sizes in LAYERS[model].items()}
                )
            for rows, case in cases.items():
                work = Work("linear", case, peak, rows)
                for part, (matrix, size) in ((p, m) for layer in layers for p, m in layer.items()):
                    spec = matrix.spec
                    x = torch.randn(rows, spec.inputs).bfloat16()
                    width = spec.rows // 2 if spec.activation else spec.rows
                    work.call(
                        part,
                        size + 2 * rows * (spec.inputs + width),
                        2 * rows * spec.rows * spec.inputs,
                        partial(stage.ops.linear, x, matrix, None),
                    )
                yield work


def random_matrix(
    kind: WeightKind, outputs: int, inputs: int, activation: Activation | None
) -> tuple[Matrix, int]:
    """Return a matrix, and its bytes. The layout of weights does not matter for speed, as they are
    random; the bytes of scales are ordinary floats of either size."""
    spec = MatrixSpec(kind, outputs, inputs, False, activation, torch.bfloat16, CPU)
    sizes = {name: part.numel() for name, part in TILES.layout(spec).items()}
    parts = {name: torch.full((size,), 0x3C, dtype=torch.uint8) for name, size in sizes.items()}
    dtype = torch.bfloat16 if kind.floats else torch.int8
    parts["weight"] = on_huge_pages(sizes["weight"], dtype).view(torch.uint8)
    return TILES.over(spec, parts), sum(sizes.values())


def attentions(
    stage: NativeStage, batches: tuple[int, ...], budget: int, wanted: Wanted
) -> Iterator[Work]:
    """Yield decoding at context 2048, then 512 tokens of a prompt, its only ones and the last of
    16,384; 32 query heads, 8 KV heads."""
    cases = [("decode", batch, 1, 2048) for batch in batches]
    cases += [("prefill", 1, 512, 512), ("prefill after 15872", 1, 512, 16384)]
    for head_dim, (name, batch, queries, context), stored in product((64, 128), cases, CACHES):
        work = Work("attention", f"{name} {stored} B={batch} D={head_dim}", "bf16", batch)
        if not wanted(f"attention {work.case}"):
            continue
        layout, blocks = random_layout(batch * [(context - queries, queries)])
        metadata, spec = stage.backend.plan(layout, None), AttentionSpec(head_dim**-0.5)
        kv_bytes = 2 * batch * context * 8 * KV_FORMATS[stored].vector_bytes(head_dim)
        layers = math.ceil(budget / kv_bytes)
        (dtype, scale), places = CACHES[stored], (layers, blocks, BLOCK_SIZE, 8)
        width = head_dim * KV_FORMATS[stored].bits // 8
        numbers = torch.bfloat16 if scale is None else torch.int8
        keys, values = (
            on_huge_pages(math.prod(places) * width, numbers).view(dtype).view(*places, -1)
            for _ in range(2)
        )
        scales = [None] * layers if scale is None else torch.full(places, scale, dtype=torch.int16)
        tokens, seen = batch * queries, context * queries - queries * (queries - 1) / 2
        q = torch.randn(tokens, 32, head_dim).bfloat16()
        for k, v, s in zip(keys, values, scales, strict=True):
            attend = Attend(q, None, None, LayerKV(k, v, s, s), metadata, spec)
            work.call(
                name,
                kv_bytes + 4 * q.numel(),
                4 * batch * seen * 32 * head_dim,
                partial(stage.backend.run, attend),
            )
        yield work


def small_ones(stage: NativeStage, budget: int, wanted: Wanted) -> Iterator[Work]:
    """Yield the kernels between the products: 512 rows of 2048, read from memory and written."""
    rows, dim, ops = 512, 2048, stage.ops
    copies = math.ceil(budget / (4 * rows * dim))
    xs = on_huge_pages(2 * copies * rows * dim, torch.bfloat16).view(copies, rows, dim)
    weight = torch.ones(dim, dtype=xs.dtype)
    kernels: dict[str, Callable[[Tensor, Tensor], object]] = {
        "rms_norm": lambda x, _: ops.rms_norm(x, weight, 1e-5),
        "layer_norm": lambda x, _: ops.layer_norm(x, weight, weight, 1e-5),
        "activate": lambda x, _: ops.activate(x, "gelu_tanh"),
        "add": ops.add,
    }
    for kernel, run in kernels.items():
        work = Work(kernel, f"{rows}x{dim} bf16", "fp32", rows)
        if not wanted(f"{kernel} {work.case}"):
            continue
        num_bytes = 2 * rows * dim * (3 if kernel == "add" else 2)
        for at in range(copies):
            work.call(kernel, num_bytes, 0, partial(run, xs[at], xs[at - copies // 2]))
        yield work
    vocab = 128_256
    work = Work("largest", f"1x{vocab}", "fp32", 1)
    if not wanted(f"largest {work.case}"):
        return
    count = budget // (4 * vocab)
    for logits in on_huge_pages(4 * count * vocab, torch.float32).view(count, 1, vocab):
        work.call("largest", 4 * vocab, 0, partial(ops.largest, logits))
    yield work

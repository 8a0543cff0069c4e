"""Compare an encoder with OpenVINO, ONNX Runtime and transformers: tokens a second of one batch.

    python benchmarks/cpu/encoders.py [--length 512] [--batch 32] [--threads 2] [--rounds 5]
        [--engines kvik openvino onnxruntime transformers] [--formats bf16 int8] [--json FILE]

The shape is BERT-base with random weights: 12 layers of width 768, all texts of one length, so that
no engine pads. Every engine has its own process, which loads once. Each engine then computes the
batch once in each round, so that other load on the machine affects all of them equally. The vector
of a text is the mean of its hidden states. In int8, weights and activations have eight bits: kvik's
`quantization=int8`, NNCF's post-training quantisation in OpenVINO, dynamic quantisation in ONNX
Runtime and in torch. ONNX Runtime has no bf16 on CPUs and computes in fp32 instead. An engine that
is not installed is left out, and the report says so.

The last line of a format is kvik's speed over that of the best other engine: the ratio of the
medians, and the smallest and largest ratio of a round.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

FORMATS = ("bf16", "int8")
PACKAGES = {
    "kvik": "kvik",
    "openvino": "openvino",
    "onnxruntime": "onnxruntime",
    "transformers": "transformers",
}
VOCAB = 30_522
Run = Callable[[list[list[int]]], Any]  # -> vectors [texts][768]


def save_shape(folder: Path, layers: int) -> None:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=layers), add_pooling_layer=False)
    model.to(torch.bfloat16).save_pretrained(folder)


def texts(batch: int, length: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(1000, VOCAB, (batch, length), generator=generator).tolist()


def kvik(folder: Path, format: str, threads: int, batch: int, length: int) -> Run:
    from kvik import LLM

    llm = LLM(
        str(folder),
        dtype="bfloat16",
        quantization="int8" if format == "int8" else "none",
        threads=threads,
        device="cpu",
    )
    return lambda ids: [output.embedding for output in llm.embed(ids, normalize=False)]


def _loaded(folder: Path, threads: int, *, wide: bool) -> Any:
    import torch
    from transformers import BertModel

    torch.set_num_threads(threads)
    dtype = torch.float32 if wide else torch.bfloat16
    return BertModel.from_pretrained(folder, dtype=dtype, add_pooling_layer=False).eval()


def transformers(folder: Path, format: str, threads: int, batch: int, length: int) -> Run:
    import torch

    model = _loaded(folder, threads, wide=format == "int8")
    if format == "int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)

    def run(ids: list[list[int]]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor(ids)).last_hidden_state.float().mean(1).tolist()

    return run


def _meaned(folder: Path, threads: int) -> Any:
    """Return the model with mean pooling of its hidden states, in fp32, for engines that convert
    it."""
    import torch

    class Meaned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _loaded(folder, threads, wide=True)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids).last_hidden_state.mean(1)

    return Meaned().eval()


def openvino(folder: Path, format: str, threads: int, batch: int, length: int) -> Run:
    import numpy as np
    import openvino as ov
    import torch

    ids = torch.tensor(texts(batch, length))
    with torch.no_grad():
        model = ov.convert_model(_meaned(folder, threads), example_input=ids[:2])
    model.reshape({0: [batch, length]})
    if format == "int8":
        import nncf

        data = nncf.Dataset([ids.numpy()])
        model = nncf.quantize(model, data, model_type=nncf.ModelType.TRANSFORMER)
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "THROUGHPUT",
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "bf16",
    }
    compiled = ov.Core().compile_model(model, "CPU", options)
    return lambda ids: compiled(np.array(ids))[0].tolist()


def onnxruntime(folder: Path, format: str, threads: int, batch: int, length: int) -> Run:
    import numpy as np
    import onnxruntime as ort
    import torch

    path = folder / "model.onnx"
    if not path.exists():
        ids = torch.tensor(texts(batch, length))
        exported = {"input_names": ["input_ids"], "output_names": ["vectors"], "verbose": False}
        exported["external_data"] = False  # the quantiser finds no data in files beside its copy
        with torch.no_grad():
            torch.onnx.export(_meaned(folder, threads), (ids,), path, dynamo=True, **exported)
    if format == "int8":
        from onnxruntime.quantization import quantize_dynamic
        from onnxruntime.quantization.shape_inference import quant_pre_process

        prepared, rounded = folder / "prepared.onnx", folder / "int8.onnx"
        quant_pre_process(path, prepared, skip_symbolic_shape=True)
        quantize_dynamic(prepared, rounded)
        path = rounded
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda ids: session.run(None, {"input_ids": np.array(ids)})[0].tolist()


ENGINES: dict[str, Callable[[Path, str, int, int, int], Run]] = {
    "kvik": kvik,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
    "transformers": transformers,
}


def serve(engine: str, folder: Path, format: str, threads: int, batch: int, length: int) -> None:
    """Load, then compute the batch once for each line that comes in, and write its seconds."""
    run, ids = ENGINES[engine](folder, format, threads, batch, length), texts(batch, length)
    vectors = run(ids)
    run(ids)
    print(json.dumps(vectors[0][:8]), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        run(ids)
        print(time.perf_counter() - started, flush=True)


def measure(args: Namespace, folder: Path, format: str) -> dict[str, list[float]]:
    """Return the seconds of each engine in each round."""
    running: dict[str, subprocess.Popen[str]] = {}
    for engine in args.engines:
        command = [sys.executable, __file__, "--child", engine, "--folder", str(folder)]
        command += ["--formats", format, "--threads", str(args.threads)]
        command += ["--batch", str(args.batch), "--length", str(args.length)]
        environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        # One engine at a time, as loading takes all cores.
        line = next((text for text in child.stdout if text.startswith("[")), "")
        if not line:
            print(f"{format}: {engine} did not start (exit {child.wait()})")
            continue
        print(f"{format}: {engine} gives {[round(x, 3) for x in json.loads(line)][:4]} ...")
        running[engine] = child
    seconds: dict[str, list[float]] = {engine: [] for engine in running}
    for _ in range(args.rounds):
        for engine, child in running.items():
            child.stdin.write("\n")
            child.stdin.flush()
            seconds[engine].append(float(child.stdout.readline()))
    for child in running.values():
        child.stdin.close()
        child.wait()
    return seconds


def report(args: Namespace, format: str, seconds: dict[str, list[float]]) -> None:
    tokens = args.batch * args.length
    print(f"\n{format}, {args.batch} texts of {args.length} tokens, {args.threads} threads")
    for engine, each in seconds.items():
        rates = sorted(tokens / one for one in each)
        print(f"  {engine:14}{median(rates):9,.0f} tokens/s   {rates[0]:,.0f} to {rates[-1]:,.0f}")
    others = {engine: each for engine, each in seconds.items() if engine != "kvik"}
    if "kvik" in seconds and others:
        best = min(others, key=lambda engine: median(others[engine]))
        ratios = [b / a for a, b in zip(seconds["kvik"], others[best], strict=True)]
        whole = median(others[best]) / median(seconds["kvik"])
        print(f"  kvik / {best}: {whole:.2f}   {min(ratios):.2f} to {max(ratios):.2f} by round")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--json", type=Path, help="write all seconds there")
    parser.add_argument("--child", choices=ENGINES, help=SUPPRESS)
    parser.add_argument("--folder", type=Path, help=SUPPRESS)
    args = parser.parse_args()
    if args.child:
        (format,) = args.formats
        serve(args.child, args.folder, format, args.threads, args.batch, args.length)
        return
    for engine in args.engines[:]:
        if importlib.util.find_spec(PACKAGES[engine]) is None:
            print(f"{engine} is not installed")
            args.engines.remove(engine)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_shape(Path(folder), args.layers)
        for format in args.formats:
            found[format] = measure(args, Path(folder), format)
            report(args, format, found[format])
    if args.json is not None:
        sizes = {name: getattr(args, name) for name in ("batch", "length", "layers", "threads")}
        args.json.write_text(json.dumps({**sizes, "seconds": found}, indent=1))


if __name__ == "__main__":
    main()

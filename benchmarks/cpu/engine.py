"""How near the whole engine comes to what the machine allows, sampling and Python included.

    python benchmarks/cpu/engine.py MODEL [--quantization none int8 int4] [--rounds 5] [--json FILE]

MODEL is a folder (`benchmarks/cpu/peers/shapes.py` writes some of real shapes). Decoding one
request reads every weight and its KV cache once a token; a prompt of 512 tokens is bound by
arithmetic. Both limits are measured right after each sample, because machines (virtual ones above
all) change their speed: the share's median, 10th and 90th percentile. Each round starts a process
for each quantisation in turn. Also: seconds from the call of `LLM` to its first token, and the peak
of the process's memory, less what importing torch took, over weights and used KV cache.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

PROMPT, OUTPUT, PREFILL, SAMPLES = 128, 64, 512, 3
PEAKS = {"none": "bf16", "int8-weight-only": "bf16", "int8": "int8", "int4": "int8", "fp8": "bf16"}
READ = 256 << 20  # bytes
# Bytes of a scale and its zero point as the native kernels store them.
INT4_GROUP_BYTES, INT8_ROW_BYTES = 3, 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--one", action="store_true", help=argparse.SUPPRESS
    )  # a process of its own
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.model, args.quantization[0], args.threads)))
        return
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in args.quantization}
    for _ in range(args.rounds):
        for name, found in samples.items():
            command = [sys.executable, __file__, args.model, "--one", "--quantization", name]
            if args.threads:
                command += ["--threads", str(args.threads)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    report(args.model, samples)
    if args.json:
        args.json.write_text(json.dumps(samples, indent=1))


def report(model: str, samples: dict[str, list[dict[str, float]]]) -> None:
    print(f"{Path(model).name}: median (10th to 90th percentile)")
    for name, found in samples.items():
        cells = []
        for key, form in (
            ("decode", "{:.1f} tokens/s"),
            ("decode_share", "{:.2f} of bandwidth"),
            ("prefill", "{:.0f} tokens/s"),
            ("prefill_share", "{:.2f} of peak"),
            ("ready", "{:.2f} s"),
            ("memory_over", "{:.2f} of weights and KV"),
        ):
            values = [one[key] for one in found]
            tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
            low, high = (form.split()[0].format(v) for v in (tenths[0], tenths[-1]))
            cells.append(f"{form.format(median(values))} ({low} to {high})")
        print(f"  {name:18}" + "  ".join(cells))


def measure(model: str, quantization: str, threads: int | None) -> dict[str, float]:
    """In a process of its own: ready, memory, and the median of some samples of each workload."""
    import torch  # noqa: F401  counted as the runtime

    from kvik import LLM, SamplingParams
    from kvik.kernels.cpu.native import Native
    from kvik_bench.machine.native_stage import NativeLimits

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    llm = LLM(
        model,
        quantization=quantization,
        threads=threads,
        max_model_len=PREFILL + OUTPUT,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    rng = random.Random(0)

    def generate(prompt: int, output: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        ids = [rng.randrange(10, 1000) for _ in range(prompt)]
        begun = time.perf_counter()
        llm.generate([ids], params)
        return time.perf_counter() - begun

    generate(1, 1)
    ready = time.perf_counter() - started
    spec, cache = llm.resolved.model, llm.resolved.cache
    weights, operations = weight_bytes(spec, quantization), prefill_operations(spec)
    kv_token = sum(g.bytes_per_token for g in cache.groups)
    generate(PREFILL, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
    limits = NativeLimits(Native(llm.resolved.runner.threads), READ)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in range(SAMPLES):
        first = generate(PROMPT, 1)
        rate = (OUTPUT - 1) / (generate(PROMPT, OUTPUT) - first)
        read = weights + kv_token * (PROMPT + OUTPUT / 2)
        note("decode", rate)
        note("decode_share", rate * read / limits.read_rate(READ))
        seconds = generate(PREFILL, 1)
        note("prefill", PREFILL / seconds)
        note("prefill_share", operations / seconds / limits.peak(PEAKS[quantization]))
    used = weights + kv_token * (PREFILL + OUTPUT)
    return {
        **{name: median(values) for name, values in found.items()},
        "ready": ready,
        "memory_over": peak * 1024 / used,
        "runtime_kib": base,
    }


def layers(spec) -> list[tuple[int, int]]:
    """Inputs and outputs of the products of one layer."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return [
        (hidden, queries + 2 * keys),
        (queries, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    ]


def weight_bytes(spec, quantization: str) -> float:
    """Bytes of weights that a token reads: all layers and the head."""
    from kvik.spec.weights import layer_kind

    total = 0.0
    shapes = layers(spec) * spec.num_layers + [(spec.hidden_size, spec.vocab_size)]
    for i, (inputs, outputs) in enumerate(shapes):
        scheme = layer_kind(quantization, inputs, head=i == len(shapes) - 1)
        if scheme is None:
            total += 2 * inputs * outputs
        elif scheme.bits == 4:
            total += outputs * (inputs / 2 + inputs / scheme.group * INT4_GROUP_BYTES)
        else:
            total += outputs * (inputs + INT8_ROW_BYTES)
    return total


def prefill_operations(spec) -> float:
    """Of a prompt: products of all tokens, causal attention, the head for one row."""
    products = sum(inputs * outputs for inputs, outputs in layers(spec)) * spec.num_layers
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * PREFILL**2
    return 2 * products * PREFILL + attention + 2 * spec.hidden_size * spec.vocab_size


if __name__ == "__main__":
    main()

"""How close the whole engine comes to the machine's limits, sampling and Python included.

    python benchmarks/cpu/engine.py MODEL [--quantization none int8 int4] [--rounds 5] [--json FILE]
        [--load-format random] [--context 128]

MODEL is a folder (`benchmarks/cpu/peers/shapes.py` writes some of real shapes).
Decoding one request reads every weight that a token uses and its KV cache once a token, or is bound
by the arithmetic of attention (of latent vectors); a prompt of 512 tokens is bound by arithmetic.
Both limits are measured right after each sample, because machines (virtual ones above all) change
their speed. Prints the median, 10th and 90th percentile of the share. Each round starts one process
per quantisation, one after another. Also printed: seconds from the call of `LLM` to its first
token, and the peak memory of the process: without what importing torch took, over weights and used
KV cache; and in full, over the planned memory.
"""

from __future__ import annotations

import json
import resource
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from itertools import count
from pathlib import Path
from statistics import median, quantiles

from kvik_bench.scripts import fresh_processes, greedy, random_prompts

OUTPUT, PREFILL = 64, 512
PEAKS = {"none": "bf16", "int8-weight-only": "bf16", "int8": "int8", "int4": "int8", "fp8": "bf16"}
READ = 256 << 20  # bytes


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--context", type=int, default=128, help="tokens before those of a decode")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=3, help="of each process (3)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in args.quantization}
    for _ in range(args.rounds):
        for name in samples:
            samples[name] += fresh_processes(measure, (args, name))
    report(args.model, samples)
    if args.json:
        args.json.write_text(json.dumps(samples, indent=1))


def report(model: str, samples: dict[str, list[dict[str, float]]]) -> None:
    print(f"{Path(model).name}: median (10th to 90th percentile)")
    for name, found in samples.items():
        cells = []
        for key, form in (
            ("decode", "{:.1f} tokens/s"),
            ("decode_share", "{:.2f} of its bound"),
            ("bandwidth", "{:.1f} GB/s"),
            ("prefill", "{:.0f} tokens/s"),
            ("prefill_share", "{:.2f} of peak"),
            ("ready", "{:.2f} s"),
            ("memory_over", "{:.2f} of weights and KV"),
            ("memory_planned", "{:.3f} of the plan"),
        ):
            values = [one[key] for one in found]
            tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
            low, high = (form.split()[0].format(v) for v in (tenths[0], tenths[-1]))
            cells.append(f"{form.format(median(values))} ({low} to {high})")
        print(f"  {name:18}" + "  ".join(cells))


def measure(args: Namespace, quantization: str) -> dict[str, float]:
    """In a separate process: return the start time, the memory, and the median of several samples
    of each workload."""
    import torch  # noqa: F401  counted as the runtime

    from kvik import LLM
    from kvik.kernels.cpu.native import Native
    from kvik.planner.efficiency import RunningModel
    from kvik_bench.machine.native_stage import NativeLimits

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    llm = LLM(
        args.model,
        quantization=quantization,
        load_format=args.load_format,
        threads=args.threads,
        max_model_len=max(args.context, PREFILL) + OUTPUT,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    serial = count()

    def generate(prompt: int, output: int) -> tuple[float, float]:
        """Return the seconds to the first token, and from there to the last."""
        ids = random_prompts(1, prompt, next(serial))
        times = llm.generate(ids, greedy(output))[0].metrics
        return times.first_token - times.arrival, times.finished - times.first_token

    generate(1, 1)
    ready = time.perf_counter() - started
    model = RunningModel.of(llm.resolved)
    shape, at = model.shape, model.setting
    halfway = args.context + OUTPUT // 2
    weights = shape.read_bytes(at.weight_format, 1)
    kv = shape.kv_bytes(halfway, at.kv_format)
    operations = shape.matmul_flops(PREFILL, 1) + shape.attention_flops(PREFILL, PREFILL)
    generate(max(args.context, PREFILL), 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = NativeLimits(Native(llm.resolved.runner.threads), READ)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in range(args.samples):
        rate = (OUTPUT - 1) / generate(args.context, OUTPUT)[1]
        bandwidth = limits.read_rate(READ)
        attention = shape.attention_flops(1, halfway) / limits.peak("bf16")
        note("decode", rate)
        note("decode_share", rate * (weights / bandwidth + max(kv / bandwidth, attention)))
        note("bandwidth", bandwidth / 1e9)
        seconds = generate(PREFILL, 1)[0]
        note("prefill", PREFILL / seconds)
        note("prefill_share", operations / seconds / limits.peak(PEAKS[quantization]))
    used = shape.weight_bytes(at.weight_format)
    used += shape.kv_bytes(max(args.context, PREFILL) + OUTPUT, at.kv_format)
    memory = llm.resolved.memory
    return {
        **{name: median(values) for name, values in found.items()},
        "ready": ready,
        "memory_over": (peak - base) * 1024 / used,
        "memory_planned": peak * 1024 / memory.total,
        "runtime_kib": base,
    }


if __name__ == "__main__":
    main()

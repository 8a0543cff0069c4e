"""Compare the planner's predictions with the engine's measured speed, on this machine.

    python benchmarks/prediction.py MODEL... [--quantization none int8 int4] [--rounds 3]
                                    [--batch 1 8 32] [--threads N] [--json FILE]

MODEL is a folder (`benchmarks/cpu/peers/shapes.py` writes some of real shapes). First this machine
is calibrated, as `kvik calibrate` does it, on matrices of no particular model. Then each round
starts a process for each model and format, which decodes greedily with `LLM` and prefills prompts
of 512 tokens. The read rates of memory and caches and the bf16 peak are measured before and after
each sample, because machines (virtual ones above all) change their speed: the prediction uses the
rates of that moment.
Prints medians of measured and predicted tokens/s, and of predicted over measured, with the lowest
and highest; then the same for the calibrated rates, and the cores' speed. "!" marks samples that
other processes disturbed.
"""

from __future__ import annotations

import json
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median

from kvik_bench.scripts import fresh_processes, random_prompts, seconds_of

PROMPT, PREFILL, MAX_LENGTH = 128, 512, 1024
SAMPLES, SECONDS = 2, 0.3  # samples of each figure, and about how long one takes
STEPS = 384  # most decode steps
ATTEMPTS = 4  # tries to take a sample while no other process runs


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--calibration", type=Path, help="a saved one, in place of a new one")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        calibration = args.calibration or Path(folder) / "calibration.json"
        if not args.calibration:
            from kvik_bench.machine.calibrate import calibrate_into

            calibrate_into(calibration, args.threads)
        for _ in range(args.rounds):
            for model in args.models:
                for quantization in args.quantization:
                    asked = model, quantization, args.batch, calibration
                    (answer,) = fresh_processes(measure, asked)
                    new = {
                        f"{Path(model).name} {quantization} {name}": samples
                        for name, samples in answer.items()
                    }
                    for key, samples in new.items():
                        found.setdefault(key, []).extend(samples)
                    report(new)
        print(f"\n{'':44}{'GB/s':>7}{'measured':>10}{'predicted':>10}  predicted / measured")
        report(found)
        if args.json:
            facts = json.loads(calibration.read_text())
            args.json.write_text(json.dumps({"calibration": facts, "samples": found}, indent=1))


def report(found: dict[str, list[dict[str, float]]]) -> None:
    for key, samples in found.items():
        ratios = sorted(s["predicted"] / s["measured"] for s in samples)
        fixed = median(s["unscaled"] / s["measured"] for s in samples)
        columns = [median(s[name] for s in samples) for name in ("measured", "predicted")]
        bandwidth = median(s["bandwidth"] for s in samples) / 1e9
        speed = median(s["speed"] for s in samples)
        disturbed = "!" if max(s["others"] for s in samples) > 0.05 else ""
        print(
            f"{key:44}{bandwidth:7.1f}{columns[0]:10.1f}{columns[1]:10.1f}"
            f"{median(ratios):7.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) "
            f"{fixed:.2f}  {speed:.2f} {disturbed}",
            flush=True,
        )


def measure(
    model: str, quantization: str, batches: list[int], calibration: Path
) -> dict[str, list[dict[str, float]]]:
    """In a separate process: return samples of each workload, with their predictions."""
    from kvik import LLM
    from kvik.config.hardware import detect
    from kvik.planner.calibration import ReadRate, load
    from kvik.planner.devices import Device, Setting, cpu_device
    from kvik.planner.families import read_shape
    from kvik.planner.formats import weight_format
    from kvik.planner.roofline import decode, prefill, step_time
    from kvik_bench.inprocess.rounds import OTHERS, Watch
    from kvik_bench.machine.calibrate import make_stage, speeds_now
    from kvik_bench.machine.stage import FULL

    facts = load(calibration)
    device = cpu_device(facts, facts.machine, 0)
    kernels = "torch" if facts.machine.kernels == "torch" else "native"
    shape = replace(read_shape(model), kernels=kernels)
    threads = facts.machine.threads
    llm = LLM(
        model,
        quantization=quantization,
        threads=threads,
        max_model_len=MAX_LENGTH,
        max_num_seqs=max(batches),
        max_num_batched_tokens=PREFILL,
        num_blocks=max(batches) * (-(-MAX_LENGTH // 16) + 1),
    )
    limits = make_stage(detect(), threads, FULL).limits
    form = weight_format(llm.resolved.runner.dtype, quantization)
    serial = count()

    def seconds(prompts: list[list[int]], output: int) -> float:
        return seconds_of(llm, prompts, output)

    def sample(tokens, workload, step) -> dict[str, float]:
        """Args: workload() -> seconds of one step."""
        for _ in range(ATTEMPTS):
            before, watch = speeds_now(limits, facts), Watch()
            taken, others = workload(), watch.others()
            if others < OTHERS:
                break
        *rates, speed = (
            sum(pair) / 2 for pair in zip(before, speeds_now(limits, facts), strict=True)
        )

        def predicted(device: Device) -> float:
            return tokens / step_time(shape, Setting(device, form, "bf16"), step).expected

        reads = tuple(ReadRate(r.bytes, rate) for r, rate in zip(facts.reads, rates, strict=True))
        scaled = cpu_device(facts.at(reads, speed), facts.machine, 0)
        return {
            "bandwidth": rates[-1],
            "speed": speed,
            "measured": tokens / taken,
            "predicted": predicted(scaled),
            "unscaled": predicted(device),
            "others": others,
        }

    found: dict[str, list[dict[str, float]]] = {}
    for batch in batches:
        prompts = random_prompts(batch, PROMPT, next(serial))
        seconds(prompts, 1)  # from here on the prompts are in the prefix cache
        one = (seconds(prompts, 9) - seconds(prompts, 1)) / 8
        steps = max(8, min(STEPS, int(SECONDS / one)))

        def decoding(prompts=prompts, steps=steps) -> float:
            return (seconds(prompts, steps + 1) - seconds(prompts, 1)) / steps

        step = decode(batch, PROMPT + 1 + steps // 2)
        found[f"batch {batch}"] = [sample(batch, decoding, step) for _ in range(SAMPLES)]

    def reading() -> float:
        return seconds(random_prompts(1, PREFILL, next(serial)), 1)

    reading()
    found[f"prompt {PREFILL}"] = [
        sample(PREFILL, reading, prefill(PREFILL)) for _ in range(SAMPLES)
    ]
    return found


if __name__ == "__main__":
    main()

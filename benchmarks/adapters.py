"""What adapters that requests choose cost.

    python benchmarks/adapters.py MODEL [--load-format random] [--quantization none int4]
        [--adapters 8] [--rank 16] [--rounds 5]

MODEL is a folder. All linear layers of the blocks are adapted, with random numbers: speed does not
depend on them. Each round measures an engine without adapters, and one with them whose requests
choose none, all the same one, or each another one. Prints the tokens per second without adapters,
and the others' shares of it: median, least and most of the rounds.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvik import LLM
from kvik.config.config import EngineConfig
from kvik.files import ADAPTER_FILES
from kvik.launch import resolve_config
from kvik.nn.safetensors import write_safetensors
from kvik_bench.scripts import decoding_seconds, greedy, random_prompts, spread

OUTPUT, PROMPT, BATCHES = 33, 512, (1, 8)
CHOICES: dict[str, Callable[[int], int]] = {  # number of a request -> of its adapter; -1: none
    "none chosen": lambda number: -1,
    "one for all": lambda number: 0,
    "one for each": lambda number: number,
}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", nargs="+", default=["none", "int4"])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        names = write_adapters(args, Path(folder))
        for quantization in args.quantization:
            report(quantization, measure(args, quantization, names))


def write_adapters(args: Namespace, folder: Path) -> dict[str, Path]:
    spec = resolve_config(EngineConfig(model=args.model, load_format=args.load_format)).model
    tensors = {}
    for linear in spec.declaration.linears:
        for layer, outputs in zip(linear.names, linear.outputs, strict=True):
            if linear.adaptable:
                for part, shape in (("A", (args.rank, linear.inputs)), ("B", (outputs, args.rank))):
                    name = f"base_model.model.{layer}.lora_{part}.weight"
                    tensors[name] = torch.randn(shape).to(torch.bfloat16) * 0.02
    config, weights = ADAPTER_FILES
    adapters = {f"adapter-{i}": folder / str(i) for i in range(args.adapters)}
    for path in adapters.values():
        path.mkdir()
        write_safetensors(path / weights, tensors)
        (path / config).write_text(json.dumps({"peft_type": "LORA", "r": args.rank}))
    return adapters


def measure(
    args: Namespace, quantization: str, adapters: dict[str, Path]
) -> dict[str, dict[str, list[float]]]:
    """Return tokens per second: workload -> choice of adapters -> one for each round."""
    options = {
        "quantization": quantization,
        "load_format": args.load_format,
        "threads": args.threads,
        "max_model_len": PROMPT + OUTPUT,
        "max_num_seqs": max(BATCHES),
        "enable_prefix_caching": False,
        "memory_utilization": 0.4,
    }
    names, serial = list(adapters), count()

    def rate(llm: LLM, batch: int, prompt: int, output: int, choose: Callable[[int], int]) -> float:
        chosen = [choose(i % len(names)) for i in range(batch)]
        params = [greedy(output).with_changes(adapter="" if i < 0 else names[i]) for i in chosen]
        outputs = llm.generate(random_prompts(batch, prompt, next(serial)), params)
        if output == 1:
            times = [one.metrics for one in outputs]
            return batch * prompt / (max(t.first_token for t in times) - times[0].arrival)
        return batch * (output - 1) / decoding_seconds(outputs)

    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        plain = stack.enter_context(LLM(args.model, **options))
        adapted = stack.enter_context(LLM(args.model, adapters=adapters, **options))
        engines = {"without": (plain, CHOICES["none chosen"])}
        engines |= {name: (adapted, choose) for name, choose in CHOICES.items()}
        for number in range(-1, args.rounds):
            for batch, prompt, output in (
                *((batch, 16, OUTPUT) for batch in BATCHES),
                (1, PROMPT, 1),
            ):
                workload = f"decode, batch {batch}" if output > 1 else f"prompt of {prompt}"
                for name, (llm, choose) in engines.items():
                    measured = rate(llm, batch, prompt, output, choose)
                    if number >= 0:  # the first round warms up
                        found.setdefault(workload, {}).setdefault(name, []).append(measured)
    return found


def report(quantization: str, found: dict[str, dict[str, list[float]]]) -> None:
    for workload, by_choice in found.items():
        plain = by_choice.pop("without")
        shares = {
            name: [a / b for a, b in zip(rates, plain, strict=True)]
            for name, rates in by_choice.items()
        }
        cells = [f"{name} {spread(values, '.2f')}" for name, values in shares.items()]
        print(f"{quantization}, {workload}: {spread(plain, '.1f')} tokens/s;", "; ".join(cells))


if __name__ == "__main__":
    main()

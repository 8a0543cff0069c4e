"""How long the methods take for one layer, and what they leave of its outputs.

    python benchmarks/gptq.py [--outputs 4096] [--inputs 4096] [--tokens 4096] [--threads 2]

Weights are normal, inputs correlated and of unequal size. Seconds of one run each, and the relative
error of the outputs, || (W - Q) X || / || W X ||.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvik.quantize.awq import awq, search_clip, search_scaling
from kvik.quantize.folding import scale_inputs
from kvik.quantize.gptq import gptq, rtn
from kvik.quantize.grid import Grid
from kvik.quantize.quantised import Quantised
from kvik.quantize.statistics import InputStatistics, relative_error


def made_inputs(tokens: int, inputs: int, generator: torch.Generator) -> Tensor:
    """[tokens, inputs]: half of the variance in an eighth of the directions, a few large inputs."""
    shared = torch.randn(tokens, inputs // 8, generator=generator)
    mixed = shared @ torch.randn(inputs // 8, inputs, generator=generator) / (inputs // 8) ** 0.5
    sizes = torch.randn(inputs, generator=generator).exp()
    return (mixed + torch.randn(tokens, inputs, generator=generator)) * sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(arguments.outputs, arguments.inputs, generator=generator) * 0.02
    x = made_inputs(arguments.tokens, arguments.inputs, generator)
    grid = Grid(arguments.bits, arguments.group, symmetric=False)

    started = time.perf_counter()
    statistics = InputStatistics(arguments.inputs)
    statistics.add(x)
    print(f"{'statistics':24}{time.perf_counter() - started:8.2f} s")
    hessian, mean_abs, sample = statistics.hessian(), statistics.mean_abs(), statistics.sample

    def scaled() -> Tensor:
        scales = search_scaling([w], sample, mean_abs, grid).scales
        limits = search_clip(scale_inputs(w, scales), sample / scales, grid)
        return awq(w, scales, limits, grid).dequantised() / scales

    def plain(method: Callable[[], Quantised]) -> Callable[[], Tensor]:
        return lambda: method().dequantised()

    methods = {
        "rtn": plain(lambda: rtn(w, grid)),
        "gptq": plain(lambda: gptq(w, hessian, grid)),
        "gptq act-order": plain(lambda: gptq(w, hessian, grid, act_order=True)),
        "gptq act-order, static": plain(
            lambda: gptq(w, hessian, grid, act_order=True, static_groups=True)
        ),
        "awq": scaled,
    }
    for name, method in methods.items():
        started = time.perf_counter()
        rounded = method()
        seconds = time.perf_counter() - started
        error = relative_error(w, rounded, hessian)
        print(f"{name:24}{seconds:8.2f} s   error {error:.4f}")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"largest resident size {most:.2f} GiB")


if __name__ == "__main__":
    main()

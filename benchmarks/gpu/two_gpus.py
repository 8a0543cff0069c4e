"""Compare a model divided among GPUs, one per process, with one GPU: correctness and speed.

    python benchmarks/gpu/two_gpus.py [MODEL] [--size 2] [--device cuda] [--dtype auto]
        [--rounds 3] [--only exchange parity rates loss] [--json FILE]

Exchange: microseconds to gather several tokens' hidden states among separate processes, by NCCL or
gloo, and to sum them in rank order.

Parity: greedy tokens in fp32 of one process, of either cut and of the stages of a pipeline must be
equal; prints the largest difference of their log probabilities.

Rates: engines of one process and of several in each way: a prompt of 512 tokens, then decoding of
one and of eight requests, in tokens a second. Median, lowest and highest of all rounds.

Loss: a process is killed while requests run. They must end with an error that names it, and no
process may be left.

Exits with code 1 if a check fails. `--device cpu` runs the same with torch's kernels over gloo,
which measures nothing of GPUs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvik import LLM, SamplingParams
from kvik_bench.scripts import children, fresh_processes, spread

PARTS = ("exchange", "parity", "rates", "loss")
WAYS = ("stages", "exact", "fast")
TEXTS = (
    "Once upon a time",
    "One day, the fox said to the lion,",
    "The old king had three daughters. The youngest",
    "In the forest there lived a bear",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=0)
PROMPT, OUTPUT, CONTEXT = 512, 64, 64
WORK = {"prompt": (1, PROMPT, 1), "batch 1": (1, CONTEXT, OUTPUT), "batch 8": (8, CONTEXT, OUTPUT)}
WIDTH, TOKENS, REPEATS = 4096, (1, 8, 512), 200  # hidden states that are exchanged
PATIENCE = 60.0  # seconds to wait for the error after the kill
MAX_APART = 1e-2  # largest difference of log probabilities in fp32; GPUs sum in another order


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", default="auto", help="of the rates")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    wrong: list[str] = []
    parts: dict[str, Callable[[Namespace, list[str]], object]] = {
        "exchange": exchange,
        "parity": parity,
        "rates": rates,
        "loss": loss,
    }
    for name in args.only:
        found[name] = parts[name](args, wrong)
    found["wrong"] = wrong
    print("all right" if not wrong else "\n".join(f"WRONG: {one}" for one in wrong), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return int(bool(wrong))


def options_of(args: Namespace, way: str = "") -> dict[str, Any]:
    """Return the options of an engine: of one process, or of several."""
    found: dict[str, Any] = {"device": args.device, "max_model_len": 1024, "max_num_seqs": 16}
    if args.device == "cpu":
        found |= {"kernels": "torch", "threads": args.size, "num_blocks": 512}
    if way == "stages":
        found["pipeline_parallel_size"] = args.size
    elif way:
        found |= {"tensor_parallel_size": args.size, "tensor_parallel_cut": way}
    return found


# Exchange.


def exchange(args: Namespace, wrong: list[str]) -> dict[str, float]:
    size = args.size
    with tempfile.TemporaryDirectory() as folder:
        asked = [(args.device, size, rank, f"{folder}/store") for rank in range(size)]
        try:
            times, *_ = fresh_processes(exchange_here, *asked)
        except Exception as error:
            wrong.append(f"exchange: {error}")
            return {}
    for name, microseconds in times.items():
        print(f"exchange, {name}: {microseconds:.1f} us", flush=True)
    return times


def exchange_here(device: str, size: int, rank: int, file: str) -> dict[str, float]:
    """In each process: return the microseconds of an exchange."""
    import torch

    from kvik.kernels.torch_group import connect

    own = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    wait = (lambda: None) if device == "cpu" else (lambda: torch.cuda.synchronize(own))
    if device != "cpu":
        torch.cuda.set_device(own)
    torch.set_num_threads(1)
    group = connect(own, file, rank, size, lambda: False)
    times: dict[str, float] = {}
    for tokens in TOKENS:
        part = torch.full((tokens, WIDTH // size), float(rank), dtype=dtype, device=own)
        whole = torch.full((tokens, WIDTH), 1.0, dtype=dtype, device=own)
        calls = {
            "gather": lambda part=part: group.gather_columns(part, (WIDTH // size,) * size),
            "sum": lambda whole=whole: group.add_up(whole, None, dtype),
        }
        for name, call in calls.items():
            right = call()
            assert float(right[0, -1]) == (size - 1 if name == "gather" else size)
            wait()
            begun = time.perf_counter()
            for _ in range(REPEATS):
                call()
            wait()
            each = (time.perf_counter() - begun) / REPEATS
            times[f"{name} of {tokens} x {WIDTH}"] = each * 1e6
    group.close()
    return times


# Parity.


def parity(args: Namespace, wrong: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    alone: list[Any] = []
    for way in ("", *WAYS):
        with LLM(args.model, **options_of(args, way), dtype="float32") as llm:
            outputs = [output.outputs[0] for output in llm.generate([*TEXTS], GREEDY)]
        if not way:
            alone = outputs
            continue
        apart = 0.0
        for text, one, right in zip(TEXTS, outputs, alone, strict=True):
            if one.error or one.token_ids != right.token_ids:
                wrong.append(f"parity, {way}: {text!r}: {one.error or 'other tokens'}")
                continue
            pairs = zip(one.logprobs, right.logprobs, strict=True)
            apart = max([apart, *(abs(a.logprob - b.logprob) for a, b in pairs)])
        if apart > MAX_APART:
            wrong.append(f"parity, {way}: log probabilities differ by {apart:.1e}")
        found[way] = apart
        print(f"parity, {way}: log probabilities differ by up to {apart:.1e}", flush=True)
    return found


# Rates.


def rates(args: Namespace, wrong: list[str]) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for way in ("", *WAYS):
        name = f"{args.size} processes, {way}" if way else "1 process"
        options = options_of(args, way) | {"dtype": args.dtype, "enable_prefix_caching": False}
        with LLM(args.model, **options) as llm:
            rows = found.setdefault(name, {})
            for number in range(args.rounds + 1):
                for work, (batch, prompt, output) in WORK.items():
                    rate = one_rate(llm, batch, prompt, output)
                    if number:  # the first round compiles
                        rows.setdefault(f"{work} tok/s", []).append(rate)
        told = ", ".join(f"{work} {spread(some, '.1f')}" for work, some in rows.items())
        print(f"{name}: {told}", flush=True)
    return found


def one_rate(llm: LLM, batch: int, prompt: int, output: int) -> float:
    """Return tokens a second: of the prompt if only one token is decoded, else of the output."""
    vocab = llm.resolved.model.vocab_size
    ids = [[random.randrange(5, vocab) for _ in range(prompt)] for _ in range(batch)]
    begun = time.perf_counter()
    outputs = llm.generate(ids, GREEDY.with_changes(max_tokens=output, logprobs=None))
    seconds = time.perf_counter() - begun
    assert all(one.outputs[0].error is None for one in outputs)
    return batch * (prompt if output == 1 else output) / seconds


# Loss.


def loss(args: Namespace, wrong: list[str]) -> dict[str, float]:
    own = os.getpid()
    with LLM(args.model, **options_of(args, WAYS[-1])) as llm:
        llm.generate("Once", GREEDY)
        victim = max(ranks_of(own))
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

        timer = threading.Timer(0.5, kill)
        timer.start()
        limit = time.monotonic() + PATIENCE
        error = None
        while error is None and time.monotonic() < limit:
            outputs = llm.generate([*TEXTS], GREEDY.with_changes(max_tokens=400))
            error = next((one.outputs[0].error for one in outputs if one.outputs[0].error), None)
        seconds = time.monotonic() - killed[0]
    if error is None or "has ended with signal 9" not in error:
        wrong.append(f"loss: {error or 'no error'}")
    if ranks_of(own):
        wrong.append(f"loss: processes {ranks_of(own)} are left")
    print(f"loss: after {seconds:.2f} s: {error}", flush=True)
    return {"seconds": seconds}


def ranks_of(parent: int) -> list[int]:
    """Return the child processes that each compute a share of the model."""
    found = []
    for child in children(parent):
        with suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            found += [child] * (b"kvik.rank_process" in command)
    return found


if __name__ == "__main__":
    sys.exit(main())

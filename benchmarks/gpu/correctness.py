"""Check the kernels on this GPU against the reference, within its tolerances.

Other tests run them in Triton's interpreter, which rounds and orders operations differently, and
has no parallel threads that could race.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from helpers.compared import check_case
from helpers.kernel_cases import CASES, Case
from notes import Notes
from place import DEVICE, REHEARSED, sized
from steps import Heads, cache, layout
from torch import Tensor
from torch.testing import assert_close

from kvik.attention.base import Attend, AttentionSpec, LayerKV
from kvik.attention.reference import ReferenceAttention
from kvik.attention.triton import TritonAttention
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.triton.ops import triton_ops
from kvik.spec.visible_keys import Window

ROOT = Path(__file__).resolve().parents[2]
# The most served dtype comes first.
DTYPES = sized((torch.bfloat16, torch.float32, torch.float16), (torch.bfloat16,))
TESTS = ("tests/kernels/triton", "tests/attention/test_triton.py")
NAMED = 4  # failed tests that are listed

# The cached and the new tokens of each sequence.
STEPS = sized(
    {
        "decodes": [(40, 1), (0, 1), (699, 1), (5, 1), (16, 1)],
        "long decode": [(9000, 1)],
        "mixed": [(12, 1), (0, 9), (33, 1), (200, 70), (50, 2)],
        "prefill": [(0, 300)],
        "chunk": [(500, 260)],
    },
    {"mixed": [(12, 1), (0, 9)]},
)
SHAPES = sized((Heads(), Heads(14, 2, 64), Heads(6, 6, 48), Heads(4, 1, 256)), (Heads(2, 1, 16),))
CACHES = (None, torch.float8_e4m3fn, torch.int8, torch.uint8)
WINDOWS = sized((None, Window(100), Window(96, chunked=True)), (None,))
TOKENS = sized(100, 2)  # tokens of each answer
THREADS = 2  # of the CPU's engine, as other processes compile kernels meanwhile


def cases(notes: Notes, part: str, parts: str) -> None:
    """Check one of `parts` runs of cases of kernel_cases.py, in all dtypes. Neighbours share
    kernels, which are then compiled once."""
    ops = triton_ops(DEVICE)
    chosen = sized(CASES, tuple({case.op: case for case in CASES}.values()))
    for dtype, (i, case) in product(DTYPES, enumerate(chosen)):
        if i * int(parts) // len(chosen) == int(part):
            name = f"{case.op} {case.name} {_short(dtype)}"
            notes.attempt(name, partial(_case, notes, ops, case, dtype, name))


def _case(notes: Notes, ops, case: Case, dtype: torch.dtype, name: str) -> None:
    _check(notes, name, case.op, lambda: check_case(ops, case, dtype, DEVICE))


def _check(notes: Notes, name: str, op: str, compare: Callable[[], object]) -> None:
    """Note whether two results agree: `compare` raises AssertionError if they do not."""
    wrong = ""
    try:
        compare()
    except AssertionError as error:
        wrong = " ".join(str(error).split())
    notes.check(name, not wrong, wrong, op=op)


def attention(notes: Notes, part: str, parts: str) -> None:
    """Check every `parts`-th kind of case of the backend against the reference on the same device,
    rotation and cache included. Steps of a kind share kernels."""
    kinds = list(product(CACHES, SHAPES, WINDOWS))[int(part) :: int(parts)]
    every = product(DTYPES, kinds, STEPS.items())
    for dtype, (kept, heads, window), (name, step) in every:
        if dtype == torch.float16 and kept is not None:
            continue  # the formats of the cache do not depend on it
        title = f"{name} {heads.queries}/{heads.keys} x {heads.dim} {_short(dtype)}"
        title += f" cache {_short(kept)}" if kept else ""
        title += f" {'chunks' if window.chunked else 'window'} of {window.keys}" if window else ""
        notes.attempt(
            title, partial(_attention, notes, title, step, heads, dtype, kept or dtype, window)
        )


def _attention(
    notes: Notes,
    title: str,
    step: list[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype,
    kept: torch.dtype,
    window: Window | None,
) -> None:
    torch.manual_seed(0)
    planned, blocks = layout(step)
    kv = cache(blocks, heads, kept)
    sizes = (heads.queries, heads.keys, heads.keys)
    tokens = sum(planned.num_scheduled)
    qkv = torch.randn(tokens, sum(sizes), heads.dim, device=DEVICE).to(dtype)
    angles = torch.randn(tokens, heads.dim // 2, device=DEVICE)
    rotation = torch.cat((angles.cos(), angles.sin()), -1)
    spec = AttentionSpec(heads.dim**-0.5)
    found = []
    # The reference computes in fp32 from the same rounded operands, so it adds no error itself.
    for backend in (TritonAttention(triton_ops(DEVICE)), ReferenceAttention(REFERENCE)):
        q, k, v = qkv.clone().split(sizes, 1)
        own = LayerKV(*(None if t is None else t.clone() for t in _tensors(kv)))
        plan = backend.plan(planned, window)
        attend = Attend(q, k, v, own, plan, spec, rotation)
        found.append((backend.run(attend), own))
    (mine, _), (right, _) = found
    # The two round rotated operands, weights and results to the dtype at different points.
    eps = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    if kept != dtype:
        eps += {torch.float8_e4m3fn: 2e-2, torch.int8: 5e-3, torch.uint8: 4e-2}[kept]
    _check(notes, title, "attention", lambda: assert_close(mine, right, rtol=eps, atol=eps))


def _tensors(kv: LayerKV) -> tuple[Tensor | None, ...]:
    return kv.k, kv.v, kv.k_scales, kv.v_scales


def tokens(notes: Notes) -> None:
    """Compare greedy tokens of the bundled model in fp32 with torch's kernels on the CPU."""
    from engine import Engine, answers

    prompts = [
        [1 + (7 * i + 11 * n) % 300 for i in range(n)] for n in sized((3, 17, 40, 100), (3, 5))
    ]
    found = {}
    for device, kernels in (("cpu", "torch"), (DEVICE.type, "triton")):
        engine = Engine.load(
            "",
            dtype="float32",
            device=device,
            kernels=kernels,
            threads=THREADS,
            load_format="safetensors",
            max_model_len=256,
            max_num_seqs=4,
            kv_cache_memory=64 << 20,
        )
        found[kernels] = answers(engine, prompts, TOKENS)
        engine.close()
    for prompt, mine, right in zip(prompts, found["triton"], found["torch"], strict=True):
        same = next((i for i, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b), None)
        alike = mine == right and len(mine) > 0
        detail = "" if alike else f"first other token: {same}"
        notes.check(f"tokens behind {len(prompt)}", alike, detail, op="greedy tokens")


def tests(notes: Notes) -> None:
    """Run the kernels' own tests on the GPU."""
    if importlib.util.find_spec("pytest") is None:
        notes.missed("pytest", "is not installed")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    if REHEARSED:
        command += ["--collect-only"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "3"]
    try:
        done = subprocess.run(
            [*command, *TESTS],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=notes.left(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        notes.missed("pytest", "no time left")
        return
    print(done.stdout, done.stderr)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    last = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1]
    listed = ", ".join(name.rpartition("/")[2] for name in failed[:NAMED])
    more = f" ({listed}{' ...' if len(failed) > NAMED else ''})" if failed else ""
    notes.check("pytest", done.returncode == 0, last + more, op="pytest")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

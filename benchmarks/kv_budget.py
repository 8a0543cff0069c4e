"""What KV budgets per layer cost in perplexity, and what they gain in tokens per second.

    python benchmarks/kv_budget.py perplexity FILE ... [--prompt 512] [--length 1024]
    python benchmarks/kv_budget.py recall [--bytes 0.1 0.25 0.5] [--length 512]
    python benchmarks/kv_budget.py speed [--context 16384] [--batch 8] [--bytes 0.25] [--repeats 3]

"perplexity" reads texts whose first tokens are a prompt, and scores the tokens after it: with all
keys, and with each FILE of `kvik kv-budget`. "recall" hides key-value pairs in texts, and asks the
model of `tests/data/recall` for one of them after the prompt, with budgets by entropy, uniform and
pyramid: once with a question that also ended the prompt, and once with one that did not. "speed"
decodes a batch after long contexts, alternately with all keys and with budgets: the weights, of the
shape of Llama-3.2-1B, and the KV cache are random, as no time depends on them.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.kv_budget import (
    ENTROPY,
    PYRAMID,
    UNIFORM,
    KVBudgets,
    allot,
    fingerprint_of,
    save_budgets,
    scores_of,
)
from kvik.config.model_source import BUNDLED
from kvik.core.plan import BudgetCut, NewRequest, SchedulerOutput
from kvik.core.scheduler import Scheduler
from kvik.evaluate.entropy import entropy_of
from kvik.launch import load_tokenizer, load_worker, resolve_config
from kvik.model_files import model_files
from kvik.planner.families import public_configs
from kvik.worker.worker import Worker
from kvik_bench.scripts import greedy, spread

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.recall import MODEL, Question, questions, recall_behind, rows_behind

ONE_BILLION = public_configs()["llama-3.2-1b"]
WARM, STEPS = 3, 16  # steps that warm up, and steps that are measured


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("perplexity", "recall", "speed"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--model", default="")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--length", type=int, help="of a text; 1024, or 512 of recall")
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--data", type=Path, default=BUNDLED.parent / "calibration" / "text.txt")
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bytes", type=float, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    {"perplexity": perplexity, "recall": recall, "speed": speed}[options.what](options)


@contextmanager
def loaded(config: EngineConfig) -> Iterator[tuple[ResolvedConfig, Worker]]:
    resolved = resolve_config(config)
    worker = load_worker(resolved)
    try:
        yield resolved, worker
    finally:
        worker.stop()


def perplexity(options: Namespace) -> None:
    for file in (None, *options.files):
        config = EngineConfig(
            model=options.model,
            device="cpu",
            threads=options.threads,
            max_num_seqs=1,
            kv_budget=file,
        )
        with loaded(config) as (resolved, worker):
            tokenizer = load_tokenizer(resolved)
            ids = tokenizer.encode(options.data.read_text(encoding="utf-8"))
            length = options.length or 1024
            texts = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
            scheduler = Scheduler(resolved.scheduler, resolved.cache)
            losses = [
                loss(scheduler, worker, f"{i}", text, options.prompt)
                for i, text in enumerate(texts)
            ]
        found = math.exp(sum(losses) / len(losses))
        print(f"{file or 'all keys'} | {len(texts)} texts | perplexity {found:.3f}", flush=True)


def loss(scheduler: Scheduler, worker: Worker, name: str, ids: Sequence[int], prompt: int) -> float:
    """Return the mean loss of the tokens after the prompt."""
    total = 0.0
    for at, hidden in rows_behind(scheduler, worker, name, ids[:-1], prompt):
        for row in range(0, len(hidden), 64):
            logits = worker.logits(hidden[row : row + 64])
            right = torch.tensor(ids[at + row + 1 : at + row + len(logits) + 1])
            total += float(torch.nn.functional.cross_entropy(logits, right, reduction="sum"))
    return total / (len(ids) - prompt)


def recall(options: Namespace) -> None:
    length = options.length or 512
    asked = questions(options.questions, length)
    with tempfile.TemporaryDirectory() as name:
        files: dict[str, str | None] = {"all keys": None}
        for share in options.bytes or (0.1, 0.25, 0.5):
            for by in (ENTROPY, UNIFORM, PYRAMID):
                file = Path(name) / f"{by} {share}.json"
                budgets = save_recall_budgets(file, by, share, length, asked)
                files[f"{share:.0%} of the bytes | {by} | {budgets} tokens"] = str(file)
        for title, budget_file in files.items():
            facts = {"device": "cpu", "threads": options.threads, "max_num_seqs": 1}
            with loaded(EngineConfig(str(MODEL), kv_budget=budget_file, **facts)) as (it, worker):
                scheduler = Scheduler(it.scheduler, it.cache)
                known, new = (
                    recall_behind(scheduler, worker, asked, twice=twice) for twice in (True, False)
                )
            print(f"{title} | asked in the prompt {known:.1%} | only behind {new:.1%}", flush=True)


def save_recall_budgets(
    file: Path, by: str, share: float, length: int, asked: Sequence[Question]
) -> tuple[int, ...]:
    """Save budgets of the recall model, with entropies measured on its own texts."""
    config = EngineConfig(str(MODEL), device="cpu", threads=1)
    spec = model_files(MODEL).spec()
    entropies: tuple[float, ...] = ()
    if by == ENTROPY:
        texts = [one.token_ids for one in asked[:8]]
        entropies = entropy_of(config, texts, lambda what, share: None)
    scores = scores_of(by, entropies, spec.num_layers)
    sizes = [each.bytes_per_token for each in spec.kv_specs(2) if each]
    budgets = allot(scores, sizes, share, length)
    facts = spec.architecture, fingerprint_of(spec), by, share, length, "", 0
    save_budgets(KVBudgets(*facts, scores=scores, budgets=budgets), file)
    return budgets


def speed(options: Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(ONE_BILLION))
        spec = model_files(folder).spec()
        layers, context, share = spec.num_layers, options.context, (options.bytes or [0.25])[0]
        sizes = [each.bytes_per_token for each in spec.kv_specs(2) if each]
        scores = [1.0 + i // (layers // 4) for i in range(layers)]  # four classes
        budgets = allot(scores, sizes, share, context)
        facts = spec.architecture, fingerprint_of(spec), "entropy", share, context, "", 0
        save_budgets(KVBudgets(*facts, scores=tuple(scores), budgets=budgets), folder / "b.json")
        rates: dict[str, list[float]] = {"all keys": [], "budgets": []}
        for turn in range(2 * options.repeats):
            way = list(rates)[turn % 2]
            file = str(folder / "b.json") if way == "budgets" else None
            seconds = decode(str(folder), file, options)
            rates[way].append(options.batch / statistics.median(seconds))
            print(
                f"{way} | {rates[way][-1]:.2f} tokens/s | steps of "
                f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f} ms",
                flush=True,
            )
        ratios = [b / a for a, b in zip(rates["all keys"], rates["budgets"], strict=True)]
        print(
            f"budgets of {min(budgets)} to {max(budgets)} tokens | {context} tokens, batch "
            f"{options.batch} | ratio {spread(ratios)}"
        )


def decode(model: str, file: str | None, options: Namespace) -> list[float]:
    """Return the seconds of each step that decodes after a context."""
    batch, context, size = options.batch, options.context, 16
    config = EngineConfig(
        model=model,
        load_format="random",
        device="cpu",
        threads=options.threads,
        kv_budget=file,
        max_num_seqs=batch,
        max_num_batched_tokens=64,
        max_model_len=context + 64,
    )
    each = -(-(context + 64) // size)
    # The groups do not depend on the number of blocks.
    groups = len(resolve_config(config).cache.groups)
    kept = 0 if file is None else json.loads(Path(file).read_text())["budgets"]
    spare = 0 if file is None else -(-max(kept) // size) + 2
    config = replace(config, num_blocks=batch * groups * (each + spare) + 1)
    with loaded(config) as (resolved, worker):
        draw_cache(worker)
        free = iter(range(1, resolved.cache.pool_size))
        tables = [[[next(free) for _ in range(each)] for _ in range(groups)] for _ in range(batch)]
        prompt = [5 + i % 1000 for i in range(context)]
        cuts = []
        for slot in range(batch):
            for group, of in enumerate(resolved.cache.groups):
                budget = of.spec.budget
                if budget is not None:
                    where = budget.cut_blocks(context, size)
                    ids = [next(free) for _ in where]
                    cuts.append(BudgetCut(slot, group, context, context - budget.tokens, ids))
        seconds = []
        for step in range(WARM + STEPS):
            new = [
                NewRequest(
                    *(slot, [*prompt, 7], context, context, tables[slot]),
                    *(greedy(STEPS), frozenset(), 0),
                )
                for slot in range(batch if step == 0 else 0)
            ]
            plan = SchedulerOutput(
                *(step, list(range(batch)), [1] * batch, [0] * batch, [True] * batch),
                new_requests=new,
                budget_cuts=cuts if step == 0 else [],
            )
            started = time.perf_counter()
            worker.result(worker.submit(plan))
            seconds.append(time.perf_counter() - started)
    return seconds[WARM:]


def draw_cache(worker: Worker) -> None:
    """Fill the cache: memory pages that were never written all map to the same zero page."""
    runner = worker._runner
    for storage in runner.network.kv.storages:
        with torch.inference_mode():
            flat = storage.flatten()
            part = torch.randn(1 << 20).to(flat.dtype)
            for first in range(0, len(flat), len(part)):
                flat[first : first + len(part)] = part[: len(flat) - first]


if __name__ == "__main__":
    main()

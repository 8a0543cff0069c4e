"""How close speculation with a draft model comes to its theoretical speed-up.

    python benchmarks/speculation.py MODEL [--quantization int4] [--acceptance 0.8] [--drafts 5]
        [--batches 1 8] [--tokens 128] [--rounds 5]

MODEL is a folder (`benchmarks/cpu/peers/shapes.py` writes some of real shapes with random weights).
A small draft network with random weights runs with it, at about 1/20 of its cost: it computes what
a draft model computes, and then its tokens are replaced. With the chosen acceptance probability
they become the model's own tokens, known from an earlier run, else wrong ones. So the acceptance
is known and the time is real. Both the fixed number of drafts and the adaptive one are measured.

"formula" is (1 - a^(K+1)) / (1 - a) / (1 + K c) with the chosen acceptance and a cost of 1/20,
verification being free; "with costs" is the same with what was measured in the round: acceptance,
number of drafts, cost of a draft and of its verification. Medians of the rounds, lowest and
highest.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import zlib
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from kvik.config.config import EngineConfig
from kvik.launch import resolve_config
from kvik.planner.speculation import speed_up
from kvik.worker.drafters import registry
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.request_table import RequestTable
from kvik_bench.inprocess.inproc import loaded, run_jobs
from kvik_bench.inprocess.jobs import Requests, fixed
from kvik_bench.inprocess.measures import DECODE
from kvik_bench.inprocess.speculation import Pair
from kvik_bench.scripts import spread

sys.path.append(str(Path(__file__).parent / "cpu" / "peers"))
from shapes import SHAPES, write_folder

COST = 1 / 20
PROMPT = 32
KEY = 8  # first tokens of a prompt: the key of its text


class Answers:
    """How each text continues, and which drafts are to be right."""

    def __init__(self, acceptance: float) -> None:
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self._acceptance = acceptance

    def draft(self, text: Sequence[int], position: int) -> int:
        """Return the draft to propose.

        Args:
            text: its first tokens.
            position: position of the draft in the text.
        """
        key = tuple(text[:KEY])
        known = self.texts[key]
        token = known[position] if position < len(known) else 0
        chance = zlib.crc32(f"{key} {position}".encode()) / (1 << 32)
        return token if chance < self._acceptance else token ^ 1


class Scripted:
    """A draft model that computes everything, and proposes what `answers` says. The text then
    differs from its own drafts, so it computes those tokens again, together with the newest one."""

    def __init__(self, drafter: Drafter, table: RequestTable, answers: Answers) -> None:
        self.drafter = drafter
        self.table = table
        self.answers = answers

    def enter(self, slot: int) -> None:
        self.drafter.enter(slot)

    def leave(self, slot: int) -> None:
        self.drafter.leave(slot)

    def propose(self, rows: DraftRows) -> Drafts:
        drafts = self.drafter.propose(rows).by_row()
        texts = self.table.token_ids[rows.slots, :KEY].tolist()
        known = self.table.num_tokens[rows.slots].tolist()
        return Drafts.of(
            [
                [self.answers.draft(text, first + i) for i in range(len(tokens))]
                for text, first, tokens in zip(texts, known, drafts, strict=True)
            ]
        )


def write_draft(folder: Path, model: Path, hidden: int, layers: int) -> None:
    """Write a small Llama with the vocabulary of the model."""
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": 1, "head_dim": 64}
    vocab = resolve_config(EngineConfig(model=str(model))).model.vocab_size
    write_folder({**SHAPES["stories-15m"], **sizes, **heads, "vocab_size": vocab}, folder)
    tokenizer = model / "tokenizer.json"
    if tokenizer.is_file():
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def report(name: str, batch: int, pairs: Sequence[Pair], formula: float) -> None:
    rates = [(DECODE.of(pair.plain), DECODE.of(pair.guessing)) for pair in pairs]
    gains = [with_ / without for without, with_ in rates]
    share = [gain / formula for gain in gains]
    expected = [gain / pair.predicted for gain, pair in zip(gains, pairs, strict=True)]
    print(
        f"batch {batch}, {name}: {median(rate for rate, _ in rates):.1f} -> "
        f"{median(rate for _, rate in rates):.1f} tokens/s, speed-up {spread(gains)}\n"
        f"  formula {formula:.2f}: {spread(share)} of it; "
        f"with costs {spread([p.predicted for p in pairs])}: {spread(expected)} of it\n"
        f"  acceptance {spread([p.acceptance for p in pairs])}, "
        f"K {spread([p.depth for p in pairs])}, "
        f"steps with drafts {spread([p.share for p in pairs])}, "
        f"draft {spread([p.draft_cost for p in pairs], '.3f')} and step "
        f"{spread([p.step_cost for p in pairs])} of a plain step, "
        f"equal tokens {spread([p.equal for p in pairs])}",
        flush=True,
    )


def measure(args: Namespace, draft: Path) -> None:
    answers = Answers(args.acceptance)
    build = registry.DRAFTERS["draft_model"]
    registry.DRAFTERS["draft_model"] = lambda parts: Scripted(build(parts), parts.table, answers)
    config = EngineConfig(
        model=args.model,
        quantization=args.quantization,
        max_model_len=PROMPT + args.tokens,
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
    )
    wish = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": args.drafts,
        "quantization": "int8",
    }
    resolved = {
        name: resolve_config(replace(config, speculative_config={**wish, "adaptive": adaptive}))
        for name, adaptive in (("fixed", False), ("adaptive", True))
    }
    pairs: dict[tuple[str, int], list[Pair]] = {}
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(loaded(resolve_config(config)))
        engines = {name: stack.enter_context(loaded(found)) for name, found in resolved.items()}
        vocab_size = plain.resolved.model.vocab_size
        for number in range(-1, args.rounds):
            for batch in args.batches:
                jobs = Requests(batch, fixed(PROMPT, args.tokens)).jobs(number, vocab_size)
                without = run_jobs(plain, jobs)
                for job, answer in zip(jobs, without.answers, strict=True):
                    answers.texts[tuple(job.prompt[:KEY])] = [*job.prompt, *answer]
                for name, engine in engines.items():
                    pair = Pair(without, run_jobs(engine, jobs), trees=False)
                    if number >= 0:
                        pairs.setdefault((name, batch), []).append(pair)
    formula = speed_up(args.acceptance, args.drafts, COST)
    for (name, batch), found in sorted(pairs.items(), key=lambda item: item[0][1]):
        report(name, batch, found, formula)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256, help="of the draft network")
    parser.add_argument("--layers", type=int, default=4, help="of the draft network")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_draft(Path(folder), Path(args.model), args.hidden, args.layers)
        measure(args, Path(folder))


if __name__ == "__main__":
    main()

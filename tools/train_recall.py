"""Train the model in `tests/data/recall`, which remembers pairs, to test what a cache forgets.

    python tools/train_recall.py --minutes 1.7

Texts hold pairs of a key and a value in filler, and after all pairs ask for keys (multi-query
associative recall; Arora et al. 2023, Zoology). Only answers are learned. That needs a head that
looks at the previous token, and an induction head over it (Olsson et al. 2022): training begins
with a rough form of both. Texts become longer as the loss falls. The learning rate depends on the
processor time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from story_model import Llama, ModelConfig
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers import recall  # noqa: E402 (the task is the tests')

CONFIG = ModelConfig(
    vocab_size=recall.VOCAB,
    hidden_size=96,
    num_layers=2,
    num_heads=3,
    num_kv_heads=3,
    head_dim=32,
    ffn_size=64,
    max_positions=recall.CONTEXT,
    rope_theta=1_000_000.0,  # most channels hardly turn within the context: they tell keys apart
)
# Deviation of embeddings; size of queries and keys of the two heads; factor of all other outputs.
EMBEDDED, SHARP, QUIET = 0.3, 2.0, 0.1
LENGTHS = (32, 64, 128, 256, 512, 1024)
TOKENS = 4096  # of a step
EASY = 0.2  # the loss at which texts become longer
RATE, WARM_UP = 3e-3, 40


def batch(dice: torch.Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return texts [rows, length] int64, and which tokens are answers, [rows, length] bool."""
    pairs = min(len(recall.KEYS), length // 8)
    size = length // (2 * pairs)  # of a slot in the first half; each has one pair
    texts = torch.randint(recall.FILLER.start, recall.FILLER.stop, (rows, length), generator=dice)
    texts[:, 0] = recall.BEGIN
    order = torch.rand(rows, len(recall.KEYS), generator=dice).argsort(1)[:, :pairs]
    keys = order + recall.KEYS.start  # [rows, pairs]
    values = torch.randint(recall.VALUES.start, recall.VALUES.stop, (rows, pairs), generator=dice)
    half = pairs * size  # the other half has the questions
    slack = size - 2
    start = torch.arange(pairs) * size + 1
    jitter = torch.randint(0, max(1, slack), (rows, pairs), generator=dice)
    first = (start + jitter).clamp(max=half - 2)
    # Drawn independently: if each key came once, the remaining values would hint at the answer.
    asked = torch.randint(0, pairs, (rows, pairs), generator=dice)
    room = (length - half) // pairs
    there = half + torch.arange(pairs) * room
    there = there + torch.randint(0, max(1, room - 2), (rows, pairs), generator=dice)
    row = torch.arange(rows)[:, None]
    texts[row, first], texts[row, first + 1] = keys, values
    texts[row, there] = recall.ASK
    texts[row, there + 1], texts[row, there + 2] = keys[row, asked], values[row, asked]
    answers = torch.zeros(rows, length, dtype=torch.bool)
    answers[row, there + 2] = True
    return texts, answers


def beginning() -> Llama:
    """Return a model with a rough form of the two heads that training would find late.

    The first head of the first layer looks at the previous token: one channel is the same for all
    tokens; queries are made from it alone, and keys from it with a rotation by one position, so
    that scores are largest one position apart. The head writes the previous token to the channels
    from which the first head of the second layer makes its keys; that head makes its queries from
    the tokens themselves (an induction head).
    """
    model = Llama(CONFIG)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            std = EMBEDDED if "embed" in name else weight.shape[1] ** -0.5
            writes_back = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(weight, std=QUIET * std if writes_back else std)
    size, half = CONFIG.head_dim, CONFIG.head_dim // 2
    angles = CONFIG.rope_theta ** (-torch.arange(half) / half)
    first, second = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        queries, keys = first.q_proj.weight, first.k_proj.weight  # [heads * size, hidden]
        queries[:size], keys[:size] = 0.0, 0.0
        queries[:half, 0] = SHARP
        keys[:half, 0], keys[half:size, 0] = SHARP * angles.cos(), SHARP * angles.sin()
        reads, writes = torch.linalg.qr(torch.randn(CONFIG.hidden_size, 2 * size))[0].split(size, 1)
        reads[0] = 0.0  # not the channel that is the same for all tokens
        first.v_proj.weight[:size], first.o_proj.weight[:, :size] = reads.T, writes
        second.q_proj.weight[:size] = SHARP * reads.T
        second.k_proj.weight[:size] = SHARP * writes.T
    return model


def train(minutes: float, seed: int) -> Llama:
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a step is small
    dice = torch.Generator().manual_seed(seed)
    pick = random.Random(seed)
    model = beginning()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    begin, end, stage, step, mean = time.process_time(), 60 * minutes, 0, 0, 4.0
    while (spent := time.process_time() - begin) < end:
        length = LENGTHS[stage] if step % 2 else pick.choice(LENGTHS[: stage + 1])
        texts, answers = batch(dice, TOKENS // length, length)
        logits = model(texts)[:, :-1][answers[:, 1:]]
        loss = F.cross_entropy(logits, texts[answers])
        left = min(1.0, 3 * (1 - spent / end))  # constant, then down to 0 in the last third
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP, left)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean, step = 0.9 * mean + 0.1 * loss.item(), step + 1
        if mean < EASY and stage + 1 < len(LENGTHS):
            stage, mean = stage + 1, 4.0
        if step % 50 == 0:
            print(
                f"{spent:4.0f} s  step {step}  length {LENGTHS[stage]}  loss {mean:.4f}", flush=True
            )
    return model.eval()


def right(model: Llama, length: int, count: int = 256) -> float:
    """Return the share of questions that are answered."""
    asked = recall.questions(count, length, pairs=min(16, length // 8), seed=1)
    found = []
    with torch.inference_mode():
        for first in range(0, count, 32):
            some = torch.tensor([one.token_ids for one in asked[first : first + 32]])
            found += model(some)[:, -1].argmax(-1).tolist()
    return sum(a == b.answer for a, b in zip(found, asked, strict=True)) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.7, help="of one core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=recall.MODEL)
    options = parser.parse_args()
    model = train(options.minutes, options.seed)
    model.save(options.output, recall.BEGIN, recall.ASK)
    stored = Llama.load(options.output)  # as it was rounded
    print({length: right(stored, length) for length in LENGTHS}, model.parameter_count())


if __name__ == "__main__":
    main()

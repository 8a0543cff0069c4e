"""What a trained story model is worth: held-out loss, samples, agreement of draft and target."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from story_data import ASSISTANT, END, END_OF_TEXT, USER, Story
from story_model import Llama
from tokenizers import Tokenizer

SAMPLE_PROMPTS = ("Once upon a time", "One day, the fox")
SAMPLE_REQUESTS = ("Tell me a story about a lion and a mouse.",)


def held_out_loss(
    model: Llama, tokenizer: Tokenizer, stories: list[Story], limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Return the mean loss per token of the held-out stories of each group.

    Each story is read alone, after the end-of-text token, as in training; one that is longer than
    the context is cut into pieces that do not overlap.
    """
    start = tokenizer.token_to_id(END_OF_TEXT)
    size = model.config.max_positions - 1
    totals: dict[str, list[float]] = {}
    for story in stories:
        if not story.held_out:
            continue
        ids = tokenizer.encode(story.text).ids[:limit]
        for at in range(0, len(ids), size):
            piece = torch.tensor([[start, *ids[at : at + size]]])
            with torch.no_grad():
                logits = model(piece[:, :-1]).float()
            loss = F.cross_entropy(logits[0], piece[0, 1:], reduction="sum").item()
            total = totals.setdefault(story.group, [0.0, 0, 0])
            total[0] += loss
            total[1] += piece.shape[1] - 1
        totals[story.group][2] += len(tokenizer.decode(ids))
    totals["all"] = [sum(column) for column in zip(*totals.values(), strict=True)]
    return {
        group: {
            "loss": loss / count,
            "perplexity": math.exp(loss / count),
            "bits_per_character": loss / characters / math.log(2),
            "tokens": count,
        }
        for group, (loss, count, characters) in totals.items()
    }


def generate(
    model: Llama,
    prompt: list[int],
    stop: set[int],
    count: int,
    seed: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
) -> list[int]:
    """Sample a continuation, recomputing the whole prefix at each step: short texts only."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    while len(ids) - len(prompt) < count:
        with torch.no_grad():
            logits = model(torch.tensor([ids[-model.config.max_positions :]]))[0, -1].float()
        probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= top_p] = 0.0
        token = int(order[torch.multinomial(probabilities, 1, generator=generator)])
        if token in stop:
            break
        ids.append(token)
    return ids[len(prompt) :]


def samples(model: Llama, tokenizer: Tokenizer, count: int, seed: int) -> list[tuple[str, str]]:
    """Return one continuation of each sample prompt and one answer to each sample request."""
    stop = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)}
    pairs = [(text, text) for text in SAMPLE_PROMPTS]
    pairs += [(r, f"{USER}{r}{END}{ASSISTANT}") for r in SAMPLE_REQUESTS]
    return [
        (label, tokenizer.decode(generate(model, tokenizer.encode(text).ids, stop, count, seed)))
        for label, text in pairs
    ]


def accepted_share(
    target: Llama, draft: Llama, tokenizer: Tokenizer, stories: list[Story], count: int = 24
) -> float:
    """Return the mean probability that the target accepts a token drafted at temperature 1.

    For one position that is the sum over the vocabulary of min(p, q). Measured on held-out text.
    """
    start = tokenizer.token_to_id(END_OF_TEXT)
    total, positions = 0.0, 0
    for story in [s for s in stories if s.held_out][:count]:
        ids = torch.tensor([[start, *tokenizer.encode(story.text).ids[:512]]])
        with torch.no_grad():
            p, q = target(ids).float().softmax(-1), draft(ids).float().softmax(-1)
        total += torch.minimum(p, q).sum().item()
        positions += ids.shape[1]
    return total / positions

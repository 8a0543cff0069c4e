"""Prompts that are pieces of texts, the same for the same seed: a model that goes on in a text says
what it says to its users; after random tokens, what can be foreseen is chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvik.errors import ParamError
from kvik.text.tokenizer import Tokenizer
from kvik_bench.inprocess.inproc import Job
from kvik_bench.inprocess.jobs import Requests, fixed


@dataclass(frozen=True, slots=True)
class Pieces:
    """
    Attributes:
        prefix: tokens that begin each prompt (BOS).
        texts: in tokens, without it; none is empty.
        prompt_tokens: of a prompt at most, its prefix included. A shorter text is one prompt.
    """

    prefix: Sequence[int]
    texts: Sequence[Sequence[int]]
    prompt_tokens: int
    output_tokens: int
    seed: str

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        prompt_tokens: int,
        output_tokens: int,
        seed: str,
    ) -> Pieces:
        """Raises ParamError when a prompt has no room for its prefix and one token more."""
        prefix = tokenizer.encode("")
        if prompt_tokens <= len(prefix):
            raise ParamError(
                "prompt_tokens", f"must be at least {len(prefix) + 1}, not {prompt_tokens}"
            )
        tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return cls(prefix, [ids for ids in tokens if ids], prompt_tokens, output_tokens, seed)

    def jobs(self, number: int, count: int) -> list[Job]:
        """Requests of one round: a piece of each text in turn, from anywhere in it."""
        draw = random.Random(f"{self.seed}/{number}")
        first = draw.randrange(len(self.texts))
        room = self.prompt_tokens - len(self.prefix)
        jobs = []
        for i in range(count):
            text = self.texts[(first + i) % len(self.texts)]
            start = draw.randrange(max(1, len(text) - room + 1))
            jobs.append(Job([*self.prefix, *text[start : start + room]], self.output_tokens))
        return jobs


@dataclass(frozen=True, slots=True)
class RandomPieces:
    """For a model without a tokenizer."""

    vocab_size: int
    prompt_tokens: int
    output_tokens: int
    seed: str

    def jobs(self, number: int, count: int) -> list[Job]:
        lengths = fixed(self.prompt_tokens, self.output_tokens)
        return Requests(count, lengths, seed=self.seed).jobs(number, self.vocab_size)

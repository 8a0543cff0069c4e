"""Loads for an engine in this process: random prompts, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from kvik.config.config import ResolvedConfig
from kvik.errors import ConfigError, ParamError
from kvik.planner.serving import Traffic
from kvik.text.tokenizer import Tokenizer
from kvik_bench.inprocess.inproc import BenchRequest
from kvik_bench.load.workload import DrawnLengths, Length, Lengths, TokenFiller

MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of a load. Rounds have the same lengths and different prompts, so that the prefix
    cache has none from earlier rounds."""

    count: int
    lengths: Lengths
    # Before the prompts of `lengths`; each request has one of `prefixes` prefixes.
    prefix_tokens: int = 0
    prefixes: int = 1
    seed: str = "0"
    field: str = "prompt_tokens"  # the option that sets the lengths, for errors

    def check(self, resolved: ResolvedConfig) -> None:
        """Check the numbers; raises ParamError, which names the field."""
        if not 1 <= self.count <= MAX_REQUESTS:
            raise ParamError("num_requests", f"must be in [1, {MAX_REQUESTS}], not {self.count}")
        if self.prefix_tokens < 0:
            raise ParamError("prefix_tokens", f"must be at least 0, not {self.prefix_tokens}")
        if self.prefixes < 1:
            raise ParamError("prefixes", f"must be at least 1, not {self.prefixes}")
        if self.prefixes > 1 and not self.prefix_tokens:
            raise ParamError("prefixes", "needs --prefix-tokens")
        for prompt, output in self.sizes():
            check_context(self.field, prompt, output, resolved)

    def sizes(self) -> list[tuple[int, int]]:
        """Return the tokens of each prompt, including the prefix, and of its answer."""
        drawn = (self.lengths.of(i, 0) for i in range(self.count))
        return [(self.prefix_tokens + prompt, output) for prompt, output in drawn]

    def traffic(self) -> Traffic:
        """Return the mean request. The shared prefix counts as cached for all."""
        sizes = self.sizes()
        prompt = round(mean(prompt for prompt, _ in sizes))
        return Traffic(prompt, round(mean(output for _, output in sizes)), self.prefix_tokens)

    def jobs(self, number: int, vocab_size: int) -> list[BenchRequest]:
        """Return the requests of one round."""
        seed = f"{self.seed}/{number}"
        filler = TokenFiller(vocab_size)
        prefixes = self.prefix_prompts(number, vocab_size)
        draw = random.Random(f"{seed}/prefix of")
        return [
            BenchRequest(
                draw.choice(prefixes) + filler.fill(prompt - self.prefix_tokens, f"{seed}/{i}"),
                output,
            )
            for i, (prompt, output) in enumerate(self.sizes())
        ]

    def prefix_prompts(self, number: int, vocab_size: int) -> list[list[int]]:
        filler = TokenFiller(vocab_size)
        seeds = [f"{self.seed}/{number}/prefix/{i}" for i in range(self.prefixes)]
        return [filler.fill(self.prefix_tokens, seed) for seed in seeds]


def fixed(prompt_tokens: int, output_tokens: int) -> Lengths:
    """Return the same lengths for all requests; raise ParamError if one is below 1."""
    for field, count in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if count < 1:
            raise ParamError(field, f"must be at least 1, not {count}")
    return DrawnLengths(Length("fixed", prompt_tokens), Length("fixed", output_tokens), "")


def check_batches(batches: Sequence[int], resolved: ResolvedConfig) -> None:
    """Raise ParamError unless each number of requests can run together."""
    limit = resolved.scheduler.max_num_seqs
    for batch in batches:
        if not 1 <= batch <= limit:
            raise ParamError("batch", f"must be in [1, {limit}] (max_num_seqs), not {batch}")


def check_context(field: str, prompt: int, output: int, resolved: ResolvedConfig) -> None:
    """Raise ParamError unless the model writes text and a request fits into its context."""
    resolved.model.check_writes()
    limit = resolved.scheduler.max_model_len
    if prompt + output > limit:
        raise ParamError(
            field,
            f"{prompt}, and {output} of output, are more than the context of {limit} "
            "(max_model_len)",
        )


def refuse_varied(options: Mapping[str, object], *names: str) -> None:
    """Raise ConfigError for engine options that a benchmark sets itself."""
    for name in names:
        if name in options:
            raise ConfigError(name, "is what this benchmark varies: it cannot be given")


# Prompts that are pieces of texts, the same for the same seed. A model continues a text as it does
# for users; after random tokens, the predictability of its output would be arbitrary.


@dataclass(frozen=True, slots=True)
class TextPieces:
    """Prompts that are pieces of texts."""

    prefix: Sequence[int]  # first tokens of each prompt (BOS)
    texts: Sequence[Sequence[int]]  # tokens of each text, without the prefix; none is empty
    prompt_tokens: int  # limit of a prompt, including its prefix. A shorter text is one prompt.
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
    ) -> TextPieces:
        """Tokenise texts; raises ParamError if a prompt cannot hold the prefix and one token."""
        prefix = tokenizer.encode("")
        if prompt_tokens <= len(prefix):
            raise ParamError(
                "prompt_tokens", f"must be at least {len(prefix) + 1}, not {prompt_tokens}"
            )
        tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return cls(prefix, [ids for ids in tokens if ids], prompt_tokens, output_tokens, seed)

    def jobs(self, number: int, count: int) -> list[BenchRequest]:
        """Return the requests of one round: random pieces of the texts, in order."""
        draw = random.Random(f"{self.seed}/{number}")
        first = draw.randrange(len(self.texts))
        length = self.prompt_tokens - len(self.prefix)
        jobs = []
        for i in range(count):
            text = self.texts[(first + i) % len(self.texts)]
            start = draw.randrange(max(1, len(text) - length + 1))
            jobs.append(
                BenchRequest([*self.prefix, *text[start : start + length]], self.output_tokens)
            )
        return jobs

"""The requests of a load: when they are due, how long they are, and their contents.

A conversation depends only on the seed and its number, so the same seed sends the same requests
byte for byte, whatever the timing and the number of connections. Only the answers that later turns
of a conversation repeat come from the server.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate, count, islice, pairwise
from pathlib import Path
from typing import Final

import numpy as np

from kvik.errors import ParamError

# Common English words: with a space before it, each is one token in most vocabularies.

_TEXT: Final = """
about above across action after again against age air almost alone along already also always among
animal another answer any apple arm around art ask away baby back bad ball bank base bed been
before begin behind below best better between big bird black blood blue board boat body book born
both bottom box boy break bright bring brother brown build bus busy buy call came can car care
carry case cat cause center chair chance change check child city class clean clear close coat cold
color come common cook cool copy corn could count country course cover cross cry cut dance dark
day dead deal dear deep did different dinner do doctor dog done door down draw dream dress drink
drive drop dry each ear early earth east easy eat edge egg eight else end enough even evening ever
every eye face fact fall family far farm fast father fear feel feet few field fight fill find fine
finger finish fire first fish five floor flower fly follow food foot for form found four free
fresh friend from front fruit full game garden gave get girl give glad glass go gold gone good got
grass great green ground group grow had hair half hand happy hard has hat have he head hear heart
heat heavy help her here high hill him his hold hole home hope horse hot hour house how hundred
ice idea if in inside into is it job join jump just keep kind king kitchen knew know lady lake
land large last late laugh lay lead learn leave left leg less let letter life light like line list
little live long look lost lot love low made make man many map mark may mean meat meet men middle
might mile milk mind minute miss money month moon more morning most mother mountain mouth move
much music must my name near neck need never new next nice night nine no north nose not note
nothing now number of off often oil old on once one only open or other our out over own page paper
park part party pass past pay people person picture piece place plan plant play point poor power
press pretty pull push put question quick quiet rain ran reach read ready real red rest rich ride
right ring river road rock room round run safe said salt same sand sat save saw say school sea
second see seed sell send set seven shall she ship shoe shop short should show side sign sing
sister sit six skin sky sleep slow small smile snow so soft some son song soon sound south space
speak spring stand star start stay step still stone stop store story street strong such summer sun
sure table take talk tall teach tell ten than thank that the their them then there these they
thing think this three through time to today together told too took top town tree trip true try
turn two uncle under until up us use very voice wait walk wall want war warm was wash watch water
way we wear week well went were west what wheel when where which white who why wide wife wild will
wind window winter wish with woman wood word work world would write year yellow yes yet you young
your
"""

WORDS: Final = tuple(_TEXT.split())


# Arrivals of an open loop: seconds after the start.

TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def constant(rate: float) -> Iterator[float]:
    return (i / rate for i in count())


def poisson(rate: float, seed: str) -> Iterator[float]:
    """Yield independent arrivals, with exponential gaps."""
    rng = random.Random(seed)
    return accumulate(rng.expovariate(rate) for _ in count())


def bursts(rate: float, burstiness: float, seed: str) -> Iterator[float]:
    """Yield arrivals with gamma gaps of mean 1/rate and coefficient of variation `burstiness`.

    1 is Poisson; above 1 requests come in bursts, below 1 more evenly.
    """
    rng = random.Random(seed)
    shape = burstiness**-2
    scale = 1.0 / (rate * shape)
    return accumulate(rng.gammavariate(shape, scale) for _ in count())


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a recorded load."""

    offset: float  # seconds after the first
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path, speed: float = 1.0, limit: int | None = None) -> list[TraceRow]:
    """Read a trace in the csv format of Azure's LLM inference traces (Patel et al., Splitwise,
    2023).

    Args:
        speed: 2 replays it twice as fast.
        limit: number of rows to read.

    Raises:
        ParamError: the file cannot be read, or a row is not understood or goes back in time.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            if tuple(header[: len(TRACE_COLUMNS)]) != TRACE_COLUMNS:
                raise ParamError("trace", f"must begin with the line {','.join(TRACE_COLUMNS)}")
            read = [_read_row(row, reader.line_num) for row in islice(filter(None, reader), limit)]
    except OSError as error:
        raise ParamError("trace", f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise ParamError("trace", "must be a csv file") from None
    if not read:
        raise ParamError("trace", "has no rows")
    if any(later[0] < earlier[0] for earlier, later in pairwise(read)):
        raise ParamError("trace", "must be sorted by TIMESTAMP")
    first = read[0][0]
    return [TraceRow((time - first).total_seconds() / speed, p, o) for time, p, o in read]


def _read_row(row: Sequence[str], line: int) -> tuple[datetime, int, int]:
    try:
        time = datetime.fromisoformat(row[0].strip())
        if time.tzinfo is None:  # as in Azure's trace of 2023; the one of 2024 names UTC
            time = time.replace(tzinfo=UTC)
        prompt_tokens, output_tokens = int(row[1]), int(row[2])
        if not (1 <= prompt_tokens <= MAX_TOKENS and 1 <= output_tokens <= MAX_TOKENS):
            raise ValueError
    except (ValueError, IndexError):
        shown = ",".join(row)[:60]
        allowed = f"a time and two numbers of tokens in [1, {MAX_TOKENS}]"
        raise ParamError("trace", f"line {line} must have {allowed}, not {shown!r}") from None
    return time, prompt_tokens, output_tokens


# Lengths of prompts and answers: drawn from a distribution, or taken from a trace.

MAX_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of token counts, never below 1."""

    # "fixed" (a), "uniform" (a to b, both included), "normal" (mean a, standard deviation b) or
    # "lognormal" (median a, standard deviation b of the logarithm).
    kind: str
    a: float
    b: float = 0.0

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        if self.kind == "normal":
            value = rng.normalvariate(self.a, self.b)
        else:
            value = self.a * rng.lognormvariate(0.0, self.b)
        return min(max(round(value), 1), MAX_TOKENS)


def parse_length(field: str, text: str) -> Length:
    """ "512", "100..200", "normal:512:64" or "lognormal:512:0.8" -> Length.

    Raises:
        ParamError: anything else, or counts outside 1 to 4,194,304.
    """
    name, *numbers = text.split(":")
    try:
        if name in ("normal", "lognormal"):
            a, b = map(float, numbers)
            length = Length(name, a, b)
        elif ".." in text:
            low, _, high = text.partition("..")
            length = Length("uniform", int(low), int(high))
        else:
            length = Length("fixed", int(text))
    except ValueError:
        length = Length("fixed", 0)
    in_range = 1 <= length.a <= MAX_TOKENS and 0 <= length.b <= MAX_TOKENS
    if not in_range or (length.kind == "uniform" and length.b < length.a):
        raise ParamError(
            field,
            f"must be like 512, 100..200, normal:512:64 (mean, deviation) or lognormal:512:0.8 "
            f"(median, deviation of the logarithm), not {text[:60]!r}",
        )
    return length


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Independent draws for each request."""

    prompt: Length
    output: Length
    seed: str

    @classmethod
    def of_texts(cls, prompt: str, output: str, seed: str) -> DrawnLengths:
        """Parse both lengths; see `parse_length`."""
        return cls(
            parse_length("prompt_tokens", prompt), parse_length("output_tokens", output), seed
        )

    def of(self, index: int, turn: int) -> tuple[int, int]:
        """Return the tokens of the prompt and of the answer, in a turn of conversation `index`."""
        rng = random.Random(f"{self.seed}/lengths/{index}/{turn}")
        return self.prompt.draw(rng), self.output.draw(rng)


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """The lengths of a trace's rows, in order."""

    rows: Sequence[TraceRow]

    def of(self, index: int, turn: int) -> tuple[int, int]:
        row = self.rows[index % len(self.rows)]
        return row.prompt_tokens, row.output_tokens


Lengths = DrawnLengths | TraceLengths

Content = str | list[int]  # text, or token ids

# The first ids of most vocabularies are special tokens and single bytes.
FIRST_IDS = 1000


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. Token counts are planned: only the server knows the counts of a text."""

    messages: tuple[tuple[str, Content], ...]  # (role, content); the last one asks
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LoadTurn:
    content: Content
    tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LoadConversation:
    """Turns that are sent one after another; each repeats the conversation before it."""

    turns: tuple[LoadTurn, ...]
    system: LoadTurn | None = None  # a prefix that conversations share

    def request(self, answers: Sequence[str]) -> LoadRequest:
        """Return the request that follows the given answers."""
        messages = [] if self.system is None else [("system", self.system.content)]
        tokens = 0 if self.system is None else self.system.tokens
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [("user", turn.content), ("assistant", answer)]
            tokens += turn.tokens + turn.output_tokens
        turn = self.turns[len(answers)]
        messages.append(("user", turn.content))
        return LoadRequest(tuple(messages), tokens + turn.tokens, turn.output_tokens)

    def first(self, turns: int) -> LoadConversation:
        return replace(self, turns=self.turns[:turns])


@dataclass(frozen=True, slots=True)
class TokenFiller:
    """Random token ids, each equally likely. Exact in length."""

    vocab_size: int
    excluded: frozenset[int] = frozenset()  # special tokens

    def fill(self, tokens: int, seed: str) -> list[int]:
        low = min(FIRST_IDS, self.vocab_size // 2)
        ids: list[int] = (_raw(tokens, seed) % np.uint64(self.vocab_size - low) + low).tolist()
        if not self.excluded.isdisjoint(ids):
            ids = [low if token in self.excluded else token for token in ids]
        return ids


@dataclass(frozen=True, slots=True)
class WordFiller:
    """Random words, about one token each in most vocabularies."""

    def fill(self, tokens: int, seed: str) -> str:
        picks: list[int] = (_raw(tokens, seed) % np.uint64(len(WORDS))).tolist()
        return " ".join([WORDS[i] for i in picks])


Filler = TokenFiller | WordFiller


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Random contents; each conversation starts with one of `prefixes` shared prefixes."""

    lengths: Lengths
    filler: Filler
    seed: str
    turns: int = 1
    prefix_tokens: int = 0
    prefixes: int = 1

    def conversation(self, index: int) -> LoadConversation:
        turns = []
        for turn in range(self.turns):
            tokens, output_tokens = self.lengths.of(index, turn)
            content = self.filler.fill(tokens, f"{self.seed}/{index}/{turn}")
            turns.append(LoadTurn(content, tokens, output_tokens))
        return LoadConversation(tuple(turns), self._prefix(index))

    def _prefix(self, index: int) -> LoadTurn | None:
        if not self.prefix_tokens:
            return None
        number = random.Random(f"{self.seed}/prefix of/{index}").randrange(self.prefixes)
        content = self.filler.fill(self.prefix_tokens, f"{self.seed}/prefix/{number}")
        return LoadTurn(content, self.prefix_tokens, 0)


@dataclass(frozen=True, slots=True)
class TextWorkload:
    """Given texts in order, repeated from the start after the last one."""

    texts: Sequence[str]
    output: Length
    seed: str
    turns: int = 1

    def conversation(self, index: int) -> LoadConversation:
        turns = []
        for turn in range(self.turns):
            text = self.texts[(index * self.turns + turn) % len(self.texts)]
            rng = random.Random(f"{self.seed}/lengths/{index}/{turn}")
            turns.append(LoadTurn(text, len(text.split()), self.output.draw(rng)))
        return LoadConversation(tuple(turns))


LoadWorkload = RandomWorkload | TextWorkload


def read_texts(path: Path) -> list[str]:
    """Read prompts from a file: one per line, or for .jsonl one object with `prompt` per line.

    Raises:
        ParamError: the file cannot be read, or has no prompts.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
        lines = [line for line in content.split("\n") if line.strip()]  # U+2028 ends no line
        if path.suffix == ".jsonl":
            lines = [_prompt_of(line) for line in lines]
    except OSError as error:
        raise ParamError("prompts", f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ParamError("prompts", "must be UTF-8 text") from None
    if not lines:
        raise ParamError("prompts", "has no prompts")
    return lines


def _prompt_of(line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ParamError("prompts", f"must be objects with a text `prompt`, not {line[:60]!r}")
    return prompt


def _raw(count: int, seed: str) -> np.typing.NDArray[np.uint64]:
    """Return random 64-bit numbers. numpy guarantees the bits of PCG64, but not of `Generator`."""
    bits = np.random.PCG64(random.Random(seed).getrandbits(128))
    return np.asarray(bits.random_raw(count), dtype=np.uint64)

"""Sampling parameters of one generation.

Each is declared once, as a field of `SamplingParams`. Its range check, command-line flag, request
field and JSON schema, form field in the playground, and names in model files are read from that
declaration (`PARAMETERS`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kvik.core.structured import CHECKED, Constraint, Structure
from kvik.errors import ParamError, shown
from kvik.options import (
    ANY,
    Flag,
    Integer,
    Kind,
    Number,
    Option,
    Synonym,
    Text,
    bad_value,
    normalised,
    option,
    options_of,
    unknown,
    with_synonyms,
)

NOTHING_ALLOWED = "the request's rules allow no token"  # an error caused by its parameters

MAX_INT32 = 2**31 - 1
MAX_N = 128
MAX_BEAMS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_LIST_ENTRIES = 4096
MAX_LOGPROBS = 100
MIN_TEMPERATURE = 1e-3  # below it the softmax of scaled logits overflows; use 0 (greedy)
COUNT = Integer(0, MAX_INT32)
TOKEN_ID = Integer(0, MAX_INT32, noun="a token id")
BIAS = Number(-100, 100)


@dataclass(frozen=True)
class TokenIds(Kind):
    """A list of at least `min_entries` token ids; None is an empty one."""

    min_entries: int = 0

    expects = "integers separated by commas"
    metavar = "N,N"

    def parse(self, text: str) -> tuple[int, ...]:
        return tuple(TOKEN_ID.parse(part) for part in text.split(","))

    def checked(self, value: object) -> tuple[int, ...]:
        entries = _entries(value, "must be a list of token ids")
        if len(entries) < self.min_entries:
            raise ValueError("must name at least one token id")
        return tuple(TOKEN_ID.checked(token) for token in entries)


class LogitBias(Kind):
    """Token ids and what is added to their logits. An id may be a string of digits, as the names in
    a JSON object are."""

    expects = "ID:BIAS pairs separated by commas"
    metavar = "ID:BIAS,.."
    hashed = False

    @property
    def limits(self) -> str:
        return f"each value {BIAS.limits}"

    def parse(self, text: str) -> dict[int, float]:
        pairs = (part.partition(":") for part in text.split(","))
        return {TOKEN_ID.parse(token): BIAS.parse(bias) for token, _, bias in pairs}

    def checked(self, value: object) -> dict[int, Any]:
        if not isinstance(value, Mapping):
            raise ValueError("must map token ids to numbers")
        _check_length(value)
        return {self._token(token): BIAS.checked(bias) for token, bias in value.items()}

    @staticmethod
    def _token(token: object) -> int:
        if isinstance(token, str) and re.fullmatch(r"[0-9]{1,10}", token):
            token = int(token)
        return TOKEN_ID.checked(token)


@dataclass(frozen=True)
class Words(Kind):
    """Words, or sequences of token ids; None is none. Words become token ids at the frontend
    (`text/tokenizer.py`); the engine sees ids."""

    # A word means its last token inside a text; else it means all its tokens, as encoded at the
    # start of a line and after a space.
    last: bool = False

    repeats = True

    def checked(self, value: object) -> tuple[str | tuple[int, ...], ...]:
        # A word becomes up to two lists of token ids.
        words = _entries(value, "must be a list of words or of token id lists", 2)
        if any(isinstance(word, str) for word in words):
            _check_length(words)
        if not all(words):
            raise ValueError("must not contain an empty word")
        ids = TokenIds()
        return tuple(word if isinstance(word, str) else ids.checked(word) for word in words)


class StopList(Kind):
    """Strings, or one; None is none."""

    repeats = True

    def checked(self, value: object) -> tuple[str, ...]:
        problem = "must be a string or a list of strings"
        texts = (value,) if isinstance(value, str) else _entries(value, problem)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(problem)
        if len(texts) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} strings, not {len(texts)}")
        for text in texts:
            if not text:
                raise ValueError("must not contain an empty string, which ends every text at once")
            if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                raise ValueError(f"a stop string has at most {MAX_STOP_BYTES} bytes")
        return tuple(texts)


def _entries(value: object, problem: str, times: int = 1) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, tuple | list):
        raise ValueError(problem)
    _check_length(value, times)
    return value


def _check_length(value: Sequence[object] | Mapping[int, float], times: int = 1) -> None:
    limit = times * MAX_LIST_ENTRIES
    if len(value) > limit:
        raise ValueError(f"at most {limit} entries, not {len(value)}")


def _parameter(
    default: object,
    kind: Kind,
    help: str,
    *,
    alias: str = "",
    label: str = "",
    stored: str = "",
    gguf: str = "",
    column: str = "",
    truncates: Literal["", "in place", "whole rows"] = "",
    only_with: str = "",
) -> Any:
    """Declare a sampling parameter. Its default changes nothing.

    Args:
        alias: another name of it in requests; "": none.
        label: of its field in the playground's form; "": it has none.
        stored: its name in generation_config.json; "": it is not read.
        gguf: its name in the metadata of a GGUF file, below `general.sampling`; "": it has none.
        column: numpy name of the dtype of its column in tensors; "": the sampler does not read it.
        truncates: whether it drops tokens, in the order of the declarations; "whole rows": using
            numbers about all tokens of a row, which takes more memory; "": it does not.
        only_with: a parameter without which it has no effect; "": there is none.
    """
    facts: dict[str, object] = {"alias": alias, "label": label, "stored": stored, "gguf": gguf}
    facts |= {"column": column, "truncates": truncates, "only_with": only_with}
    return option(default, kind, help, facts)


# Names in vLLM and transformers. Values that are accepted and ignored change nothing.
SYNONYMS: Mapping[str, Synonym] = {
    "max_new_tokens": Synonym("max_tokens"),
    "num_return_sequences": Synonym("n"),
    "repeat_penalty": Synonym("repetition_penalty"),
    "do_sample": Synonym("temperature", {False: 0.0}, (True,), "temperature says it"),
    "best_of": Synonym(meaningless=ANY, why="it must equal n"),
    "beam_width": Synonym("num_beams"),
    "use_beam_search": Synonym(meaningless=(False,), why="num_beams does this"),
    "no_repeat_ngram_size": Synonym(meaningless=(0, None), why="dry_multiplier does this"),
    "detokenize": Synonym(meaningless=(True,), why="text is always made"),
    "spaces_between_special_tokens": Synonym(meaningless=(True,), why="the tokenizer decides"),
    "guided_decoding": Synonym("structured"),
    "structured_outputs": Synonym("structured"),
}


def by_own_names(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by kvik's names, and `best_of`, which new `SamplingParams` check.

    Raises:
        ParamError: kvik has no equivalent, or a parameter is given under two names.
    """
    named, _ = with_synonyms(params, SYNONYMS, ParamError)
    return {**named, "best_of": params["best_of"]} if "best_of" in params else named


class _OtherNames(type):
    """Makes a class of parameters accept the names in `SYNONYMS`."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The fields, for `help` and editors, which would show the arguments of `__call__`."""
        made = inspect.signature(vars(cls)["__init__"])
        return made.replace(parameters=list(made.parameters.values())[1:])

    if not TYPE_CHECKING:  # for type checkers, its arguments are the fields

        def __call__(cls, *values: Any, **params: Any) -> Any:
            best_of = params.get("best_of")
            if not params.keys() <= PARAMETERS.keys():
                params, _ = with_synonyms(params, SYNONYMS, ParamError)
                for name in params:
                    if name not in PARAMETERS:
                        text = unknown(name, "sampling parameter", [*PARAMETERS, *SYNONYMS])
                        raise ParamError(name, text)
            made = super().__call__(*values, **params)
            if not (best_of is None or (type(best_of) is int and best_of == made.n)):
                text = f"must equal n ({made.n}), not {shown(best_of)}: choose by logprobs"
                raise ParamError("best_of", text)
            return made


@dataclass(frozen=True, slots=True)
class SamplingParams(metaclass=_OtherNames):
    """Options of one request. Defaults sample from the model's own distribution. Parameters may
    have the names that vLLM and transformers give them (`SYNONYMS`).

    Raises:
        ParamError: a value is not allowed, or contradicts another.
    """

    n: int = _parameter(
        1, Integer(1, MAX_N), "number of completions of the prompt", label="Answers (n)"
    )
    num_beams: int = _parameter(
        1,
        Integer(1, MAX_BEAMS),
        "beams of a beam search, which returns the n most likely outputs it finds; temperature, "
        "truncation and seed have no effect. 1: outputs are sampled",
        alias="beam_width",
    )
    length_penalty: float = _parameter(
        1.0,
        Number(-10, 10),
        "the log probability of an output is divided by its number of tokens to the power of this",
        only_with="num_beams",
    )
    early_stopping: bool = _parameter(
        False,
        Flag(),
        "end the search once num_beams outputs have ended, even if a better one may follow",
        only_with="num_beams",
    )
    temperature: float = _parameter(
        1.0,
        Number(0, 100),
        f"0 is greedy; otherwise logits are divided by it, which is at least {MIN_TEMPERATURE}",
        label="Temperature",
        stored="temperature",
        gguf="temp",
        column="float32",
    )
    top_k: int = _parameter(
        0,
        Integer(-1, MAX_INT32),
        "keep the k most likely tokens; 0 or -1 keeps all",
        label="Top k",
        stored="top_k",
        gguf="top_k",
        column="int64",
        truncates="in place",
    )
    top_p: float = _parameter(
        1.0,
        Number(0, 1, above=True),
        "keep the likeliest tokens whose probabilities sum to this (Holtzman et al. 2020)",
        label="Top p",
        stored="top_p",
        gguf="top_p",
        column="float64",
        truncates="in place",
    )
    min_p: float = _parameter(
        0.0,
        Number(0, 1),
        "drop tokens whose probability is below this times the largest",
        label="Min p",
        stored="min_p",
        gguf="min_p",
        column="float32",
        truncates="in place",
    )
    typical_p: float = _parameter(
        1.0,
        Number(0, 1, above=True),
        "keep the most typical tokens whose probabilities sum to this (Meister et al. 2022)",
        label="Typical p",
        stored="typical_p",
        column="float64",
        truncates="whole rows",
    )
    presence_penalty: float = _parameter(
        0.0,
        Number(-2, 2),
        "subtracted from the logits of generated tokens",
        label="Presence penalty",
        column="float32",
    )
    frequency_penalty: float = _parameter(
        0.0,
        Number(-2, 2),
        "subtracted from the logits of generated tokens, once for each use",
        label="Frequency penalty",
        column="float32",
    )
    repetition_penalty: float = _parameter(
        1.0,
        Number(1e-3, 10),  # logits that are divided by a smaller one may overflow
        "divisor of the logits of tokens of the prompt and the output; negative logits are "
        "multiplied by it (Keskar et al. 2019)",
        alias="repeat_penalty",
        label="Repetition penalty",
        stored="repetition_penalty",
        gguf="penalty_repeat",
        column="float32",
    )
    dry_multiplier: float = _parameter(
        0.0,
        Number(0, 100),
        "strength of DRY: tokens that would continue a repetition lose this times dry_base to the "
        "power of its length beyond dry_allowed_length; 0 is off",
        label="DRY multiplier",
    )
    dry_base: float = _parameter(1.75, Number(1, 100), "see dry_multiplier")
    dry_allowed_length: int = _parameter(
        2, Integer(1, MAX_INT32), "repetitions shorter than this many tokens cost nothing"
    )
    dry_penalty_last_n: int = _parameter(
        -1,
        Integer(-1, MAX_INT32),
        "number of last tokens in which DRY looks for repetitions; -1: the whole context, 0: none",
    )
    dry_sequence_breakers: Sequence[str | Sequence[int]] = _parameter(
        ("\n", ":", '"', "*"),
        Words(last=True),
        "words, or token id sequences, whose last token ends a repetition",
        only_with="dry_multiplier",
    )
    logit_bias: Mapping[int, float] | None = _parameter(
        None, LogitBias(), "values added to the logits of tokens, by token id"
    )
    allowed_token_ids: Sequence[int] | None = _parameter(
        None, TokenIds(min_entries=1), "the only tokens that can be sampled, by id"
    )
    bad_words: Sequence[str | Sequence[int]] = _parameter(
        (),
        Words(),
        "words, or token id sequences, that must not be completed",
        stored="bad_words_ids",
    )
    min_tokens: int = _parameter(
        0,
        COUNT,
        "least number of output tokens, before which neither EOS nor a stop id can be sampled. A "
        "stop string counts only if it ends after them; the text is cut where it begins",
        label="Min tokens",
    )
    max_tokens: int | None = _parameter(
        256,
        COUNT,
        "output limit (256 if neither the caller nor the model's authors say); None: only the end "
        "of the context (`max_model_len`), which ends every output; 0 (with `prompt_logprobs`): "
        "no output, the prompt is only scored",
        label="Max tokens",
        stored="max_new_tokens",
    )
    stop: Sequence[str] = _parameter(
        (), StopList(), "strings that end the output (not included in the text)"
    )
    stop_token_ids: Sequence[int] = _parameter((), TokenIds(), "ids that end the output, like EOS")
    ignore_eos: bool = _parameter(False, Flag(), "treat EOS as an ordinary token")
    seed: int | None = _parameter(
        None,
        Integer(-(2**63), 2**63 - 1),
        "seed of this request; its text then does not depend on other requests",
        label="Seed",
    )
    logprobs: int | None = _parameter(
        None,
        Integer(0, MAX_LOGPROBS),
        "report the log probability of each sampled token and of this many alternatives",
    )
    prompt_logprobs: int | None = _parameter(
        None, Integer(0, MAX_LOGPROBS), "the same for each prompt token"
    )
    prompt_logprobs_start: int = _parameter(
        0,
        COUNT,
        "index of the first prompt token that `prompt_logprobs` reports; those before it may come "
        "from the prefix cache",
    )
    skip_special_tokens: bool = _parameter(True, Flag(), "leave special tokens out of the text")
    include_stop_str_in_output: bool = _parameter(
        False, Flag(), "keep the matched stop string in the text"
    )
    structured: Constraint | None = _parameter(  # noqa: RUF009
        None,
        Structure(),
        "constraint on the text: a JSON Schema, a regular expression, one of some texts, or a "
        "grammar. JSON is formatted as by json.dumps; min_tokens and ignore_eos do not apply",
        alias="structured_outputs",
    )
    speculation: bool = _parameter(
        True, Flag(), "use speculative decoding for this request, if it is on in the engine"
    )
    adapter: str = _parameter(
        "",
        Text("the name of an adapter"),
        "adapter that changes the model for this request, one of the engine's `adapters`",
    )

    def __post_init__(self) -> None:
        for name, value in normalised(self, ParamError).items():
            object.__setattr__(self, name, value)
        if 0 < self.temperature < MIN_TEMPERATURE:
            text = f"0 (greedy) or in [{MIN_TEMPERATURE}, 100]"
            raise ParamError("temperature", str(bad_value(text, self.temperature)))
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise ParamError("prompt_logprobs_start", "needs prompt_logprobs")
        if self.num_beams > 1:
            self._check_beams()
        if self.max_tokens is None:
            return
        if self.max_tokens == 0 and (self.prompt_logprobs is None or self.n > 1):
            raise ParamError(
                "max_tokens", "must be at least 1, or 0 with prompt_logprobs and n = 1"
            )
        if self.min_tokens > self.max_tokens:
            text = f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            raise ParamError("min_tokens", text)

    def _check_beams(self) -> None:
        if self.n > self.num_beams:
            raise ParamError("n", f"must be at most num_beams ({self.num_beams}), not {self.n}")
        for name, unset in (("stop", ()), ("prompt_logprobs", None)):
            if getattr(self, name) != unset:
                raise ParamError(name, "must not be given with num_beams")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def restriction(self) -> str:
        """The name, as the caller knows it, of a parameter that forbids tokens."""
        if self.structured is not None:
            return self.structured.name
        names = ("allowed_token_ids", "bad_words", "logit_bias")
        return next((name for name in names if getattr(self, name)), "min_tokens")

    def without_prompt_logprobs(self) -> SamplingParams:
        return replace(self, prompt_logprobs=None, prompt_logprobs_start=0)

    @property
    def words(self) -> dict[str, tuple[str | tuple[int, ...], ...]]:
        """The values of all parameters in use that hold words."""
        return {
            parameter.name: value
            for parameter in WORDS
            if (value := getattr(self, parameter.name))
            and getattr(self, parameter.facts["only_with"], True)
        }

    def word_ids(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return a value that holds words as token ids, as the engine needs it."""
        words = getattr(self, name)
        ids = tuple(word for word in words if not isinstance(word, str))
        if len(ids) < len(words):
            raise ParamError(name, "must be token ids by the time they reach the engine")
        return ids

    def with_changes(self, **changes: object) -> SamplingParams:
        """Return a copy with some fields, by any of their names, replaced and everything checked
        again."""
        return replace(self, **by_own_names(changes))

    def check_against(self, vocab_size: int, max_model_len: int) -> None:
        """Refuse values that the model's vocabulary or context makes impossible."""
        if self.structured is not None and self.structured.kind != CHECKED:
            raise ParamError("structured", "must be checked by the time it reaches the engine")
        ids: list[tuple[str, int]] = [("logit_bias", i) for i in (self.logit_bias or ())]
        ids += [("allowed_token_ids", i) for i in (self.allowed_token_ids or ())]
        ids += [("stop_token_ids", i) for i in self.stop_token_ids]
        ids += [(name, i) for name in self.words for word in self.word_ids(name) for i in word]
        for name, token in ids:
            if token >= vocab_size:
                raise ParamError(name, f"token id {token} is outside 0..{vocab_size - 1}")
        if self.min_tokens > max_model_len:
            raise ParamError(
                "min_tokens",
                f"must be at most the context of {max_model_len}, not {self.min_tokens}",
            )


PARAMETERS: Mapping[str, Option] = {one.name: one for one in options_of(SamplingParams)}
WORDS = tuple(one for one in PARAMETERS.values() if isinstance(one.kind, Words))
TRUNCATIONS = tuple(one for one in PARAMETERS.values() if one.facts["truncates"])

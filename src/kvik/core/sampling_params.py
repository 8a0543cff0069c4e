"""What a caller may ask of one generation, checked once at the edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real

from kvik.config.errors import ParamError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_LIST_ENTRIES = 4096
MAX_LOGPROBS = 100
MIN_TEMPERATURE = 1e-3  # below it the softmax of scaled logits overflows: greedy is meant
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "speculation")
_INTEGERS = ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one request. Defaults sample from the model's own distribution.

    Attributes:
        n: sibling completions of the same prompt.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: nucleus mass (Holtzman et al. 2020), in (0, 1].
        min_p: drop tokens below min_p times the largest probability, in [0, 1].
        typical_p: locally typical mass (Meister et al. 2022), in (0, 1].
        presence_penalty, frequency_penalty: subtracted for generated tokens, in [-2, 2].
        repetition_penalty: divides (multiplies negative) logits of tokens of the prompt and the
            output (Keskar et al. 2019), in (0, 10].
        logit_bias: token id -> value added to its logit, in [-100, 100].
        allowed_token_ids: if given, nothing else can be sampled.
        bad_words: words, or token id sequences, that must not be completed. Words become token ids
            at the frontend (`text/bad_words.py`); the engine sees ids.
        min_tokens: so many tokens come before EOS or a stop id, and a stop string counts only if it
            ends in the text of the tokens after them. It may begin before: the text is cut there.
        max_tokens: output limit (256 if neither the caller nor the model's authors say); None:
            only the end of the context (`max_model_len`), which ends every output; 0 (with
            `prompt_logprobs`): only the prompt is read.
        stop: strings that end the output (not included in the text).
        stop_token_ids: ids that end the output, like EOS.
        ignore_eos: EOS is an ordinary token.
        seed: int64; the text of a seeded request does not depend on its batch companions.
        logprobs: report the log probability of each sampled token and this many alternatives.
        prompt_logprobs: the same for each prompt token.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the matched stop string in the text.
        speculation: guess tokens of this request ahead, where the engine does so at all.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    speculation: bool = True

    def __post_init__(self) -> None:
        self._normalise()
        _int("n", self.n, 1, MAX_N)
        _real("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ParamError(
                "temperature",
                f"must be 0 (greedy) or in [{MIN_TEMPERATURE}, 100], not {self.temperature!r}",
            )
        _int("top_k", self.top_k, -1, 2**31 - 1)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        self._check_ids()
        _int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _int("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.max_tokens == 0 and (self.prompt_logprobs is None or self.n > 1):
                raise ParamError(
                    "max_tokens", "must be at least 1, or 0 with prompt_logprobs and n = 1"
                )
            if self.min_tokens > self.max_tokens:
                raise ParamError(
                    "min_tokens",
                    f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}",
                )
        self._check_stop()
        if self.seed is not None:
            _int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ParamError(name, f"must be true or false, not {_shown(getattr(self, name))}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def bad_word_ids(self) -> tuple[tuple[int, ...], ...]:
        """`bad_words` as the engine takes them."""
        words = tuple(word for word in self.bad_words if not isinstance(word, str))
        if len(words) < len(self.bad_words):
            raise ParamError("bad_words", "must be token ids by the time they reach the engine")
        return words

    def with_changes(self, **changes: object) -> SamplingParams:
        """A copy with some fields replaced and everything checked again."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise ParamError(
                    name, f"is no sampling parameter (known: {', '.join(sorted(known))})"
                )
        return replace(self, **changes)  # type: ignore[arg-type]

    def check_against(self, vocab_size: int, max_model_len: int) -> None:
        """Refuse what only the model's facts show to be impossible."""
        ids: list[tuple[str, int]] = [("logit_bias", i) for i in (self.logit_bias or ())]
        ids += [("allowed_token_ids", i) for i in (self.allowed_token_ids or ())]
        ids += [("stop_token_ids", i) for i in self.stop_token_ids]
        ids += [("bad_words", i) for word in self.bad_word_ids for i in word]
        for name, token in ids:
            if token >= vocab_size:
                raise ParamError(name, f"token id {token} is outside 0..{vocab_size - 1}")
        if self.min_tokens > max_model_len:
            raise ParamError(
                "min_tokens",
                f"must be at most the context of {max_model_len}, not {self.min_tokens}",
            )

    def _normalise(self) -> None:
        """Accept a list where a tuple is stored, a single stop string, and integers of numpy, which
        overflow where Python's do not."""
        put = object.__setattr__
        for name in _INTEGERS:
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                put(self, name, int(value))
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            put(self, "logit_bias", dict(self.logit_bias))  # what the caller does later is his own
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is None and name != "allowed_token_ids":
                put(self, name, ())
            elif isinstance(value, list):
                put(self, name, tuple(value))
        if isinstance(self.bad_words, tuple):
            put(
                self,
                "bad_words",
                tuple(tuple(w) if isinstance(w, list) else w for w in self.bad_words),
            )

    def _check_ids(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ParamError("logit_bias", "must map token ids to numbers")
            _length("logit_bias", self.logit_bias)
            for token, bias in self.logit_bias.items():
                _int("logit_bias", token, 0, 2**31 - 1, what="a token id")
                _real("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ParamError("allowed_token_ids", "must name at least one token id")
        _token_ids("stop_token_ids", self.stop_token_ids)
        if not isinstance(self.bad_words, tuple):
            raise ParamError("bad_words", "must be a list of words or of token id lists")
        _length("bad_words", self.bad_words)
        for word in self.bad_words:
            if not isinstance(word, str):
                _token_ids("bad_words", word)
            if not word:
                raise ParamError("bad_words", "must not contain an empty word")

    def _check_stop(self) -> None:
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) for s in self.stop):
            raise ParamError("stop", "must be a string or a list of strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParamError("stop", f"at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}")
        for text in self.stop:
            if not text:
                raise ParamError("stop", "must not contain an empty string")
            if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                raise ParamError("stop", f"a stop string has at most {MAX_STOP_BYTES} bytes")


def _int(name: str, value: object, low: int, high: int, what: str = "an integer") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:  # type: ignore[operator]
        raise ParamError(name, f"must be {what} in [{low}, {high}], not {_shown(value)}")


def _real(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    good = not isinstance(value, bool) and isinstance(value, Real)
    if not good or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        bracket = "(" if open_low else "["
        raise ParamError(
            name, f"must be a number in {bracket}{low:g}, {high:g}], not {_shown(value)}"
        )


def _shown(value: object) -> str:
    """A bad value as it fits into one line; Python refuses to print very long integers."""
    try:
        text = repr(value)
    except ValueError:
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _length(name: str, value: Mapping[int, float] | tuple[object, ...]) -> None:
    if len(value) > MAX_LIST_ENTRIES:
        raise ParamError(name, f"at most {MAX_LIST_ENTRIES} entries, not {len(value)}")


def _token_ids(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise ParamError(name, "must be a list of token ids")
    _length(name, value)
    for token in value:
        _int(name, token, 0, 2**31 - 1, what="a token id")

"""Speculative decoding: its options, their checks, and the decisions.

One JSON object (`speculative_config`) holds all options; the flags `spec_method`, `spec_model` and
`spec_tokens` set its most common fields, and take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvik.config.draft_heads import HeadsSpec
from kvik.config.step_memory import StepSize
from kvik.errors import ConfigError, shown
from kvik.models.gemma4 import ASSISTANT
from kvik.models.model_spec import ModelSpec
from kvik.options import Flag, Integer, Number, OneOf, Text, option, options_of, unknown
from kvik.spec.weights import SCHEMES

# Engine options.
SPECULATION_OPTIONS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
OFF = "off"
FORCED = "forced"  # only tokens that a grammar forces, which all methods except trees draft first
MTP = "mtp"  # the model's own head for multi-token prediction
EAGLE3 = "eagle3"  # a head that reads hidden states between layers
# Methods with a draft model or heads in another folder; methods that need none.
MODEL_METHODS = ("draft_model", "medusa", "eagle", EAGLE3, ASSISTANT)
OWN_METHODS = ("ngram", "suffix", FORCED, MTP)
# What `spec_model` must name.
NAMED = {"draft_model": "a draft model", EAGLE3: "the head", ASSISTANT: "the assistant"}
# Read the embeddings of tokens.
EMBEDDING_METHODS = ("eagle", EAGLE3, MTP, ASSISTANT)
TREE_METHODS = ("medusa", "eagle")
CACHING_METHODS = ("draft_model", EAGLE3, MTP)  # store keys and values of drafts
# Methods that sample drafts if the tokens of their request are sampled.
DRAWING_METHODS = (*CACHING_METHODS, ASSISTANT)
# Read hidden states or keys of the model in every step: the model's processes compute them, too.
DIVIDED_METHODS = (EAGLE3, MTP, ASSISTANT)
METHODS = (*MODEL_METHODS, *OWN_METHODS, OFF)
# Facts of the options that apply to one method only.
MODELS_ALONE, NGRAM_ALONE, SUFFIX_ALONE = (
    {"methods": methods} for methods in (("draft_model", ASSISTANT), ("ngram",), ("suffix",))
)
MAX_DRAFT_TOKENS = 64  # of a request in a step
MAX_NGRAM = 32
DEFAULT_TOKENS: Mapping[str, int] = {
    "draft_model": 5,
    "ngram": 8,
    "suffix": 8,
    FORCED: 16,
    "medusa": 16,  # nodes of its tree
    "eagle": 5,
    EAGLE3: 4,
    ASSISTANT: 4,
    MTP: 3,
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculation options of the user: the fields of `speculative_config`."""

    method: str = option(OFF, OneOf(METHODS), "what drafts tokens")
    model: str = option(
        "",
        Text("a folder or a hub id"),
        'folder or hub id of the draft model, or of the heads; "" for those that ship with the '
        "model",
    )
    num_speculative_tokens: int | None = option(
        None,
        Integer(1, MAX_DRAFT_TOKENS),
        "most drafts of a request in one step; None: the method's default",
    )
    adaptive: bool = option(
        True, Flag(), "fewer drafts for requests whose drafts fail, none while they would cost time"
    )
    quantization: str = option(
        "none", OneOf(tuple(SCHEMES)), "of the draft model's weights.", MODELS_ALONE
    )
    ngram_min: int = option(
        1, Integer(1, MAX_NGRAM), "fewest tokens at the end of a text to look up.", NGRAM_ALONE
    )
    ngram_max: int = option(
        4, Integer(1, MAX_NGRAM), "most tokens at the end of a text to look up.", NGRAM_ALONE
    )
    shared: bool = option(
        False, Flag(), "look into earlier outputs of the same tenant, too.", SUFFIX_ALONE
    )
    typical_acceptance: bool = option(
        False,
        Flag(),
        "accept drafts that are likely enough, drawn or not. Faster, and lossy: it changes the "
        "distribution of requests that sample without a seed. All others keep their tokens",
    )
    typical_epsilon: float = option(0.09, Number(0, 1, above=True), "see `Typical`")
    typical_delta: float = option(0.3, Number(0, 1, above=True), "see `Typical`")


@dataclass(frozen=True, slots=True)
class Typical:
    """Accept a draft of probability p > min(epsilon, delta * exp(-H)), where H is the entropy of
    the distribution in nats: typical acceptance of Medusa (Cai et al. 2024, 2401.10774, section
    2.3.1). The less certain the model is, the lower the required probability. Lossy."""

    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A model or heads that draft."""

    path: str = ""  # folder of the draft model or of the heads; "" if there is none
    spec: ModelSpec | None = None  # facts of the draft model; None: there is none
    # The target's id of each of its tokens, -1 if there is none; None: the ids are the same.
    meanings: tuple[int, ...] | None = None
    heads: HeadsSpec | None = None  # facts of the heads; None: there are none
    taps: tuple[int, ...] = ()  # layers before which it reads the target's residual stream

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The target's layers whose keys and values it reads."""
        layers = () if self.spec is None or self.spec.wiring != ASSISTANT else self.spec.layers
        return tuple({layer.kv_from for layer in layers if layer.kv_from is not None})

    @property
    def method(self) -> str | None:
        """The method that drafts with it; None: there is nothing to draft with."""
        if self.heads is not None:
            return self.heads.kind
        if self.spec is not None:
            if self.spec.wiring == ASSISTANT:
                return ASSISTANT
            return EAGLE3 if self.taps else "draft_model"
        return self.path or None  # of the model's own head


NO_SOURCE = DraftSource()
OWN_HEAD = DraftSource(MTP)  # for plans with the model's own head


@dataclass(frozen=True, slots=True)
class ResolvedSpeculation:
    """The resolved settings of speculative decoding."""

    method: str  # one of `METHODS` except "off"
    num_draft_tokens: int  # maximum number of drafts of a request in one step
    max_draft_rows: int  # maximum number of drafts of all requests in one step
    adaptive: bool = True
    # Slots in the KV cache allocated to a decoding request beyond its step, for a drafter that
    # writes there.
    num_lookahead_tokens: int = 0
    source: DraftSource = NO_SOURCE
    draft_step: StepSize | None = None  # the largest step of a draft model
    draft_group: int = 0  # KV group of the target whose block tables a draft model shares
    quantization: str = "none"
    ngram_min: int = 1
    ngram_max: int = 4
    shared: bool = False
    # Lossy acceptance of drafts of requests that sample without a seed; None: acceptance that keeps
    # the distribution.
    typical: Typical | None = None

    @property
    def trees(self) -> bool:
        """Whether the drafts of a request are the nodes of a tree."""
        return self.method in TREE_METHODS

    @property
    def divided(self) -> bool:
        """Whether the processes of a group share what drafts, as they share the model."""
        return self.method in DIVIDED_METHODS

    @property
    def paged(self) -> bool:
        """Whether what drafts has keys and values of its own in the target's blocks and pages."""
        return self.method == EAGLE3

    @property
    def draws(self) -> bool:
        """Whether drafts are sampled if the tokens of their request are."""
        return self.method in DRAWING_METHODS


def merge_speculation(
    config: Mapping[str, object] | None, method: str | None, model: str | None, tokens: int | None
) -> SpeculativeConfig | None:
    """Merge the speculation options of an engine, each already checked; None if it is off.

    Args:
        config: `speculative_config`. method, model, tokens: `spec_method`, `spec_model` and
            `spec_tokens`; None: not given.

    Raises:
        ConfigError: a field of `config` is impossible, or an option contradicts the method.
    """
    values = {} if config is None else _checked(config)
    idle = {key: f"{key} of speculative_config" for key in values}  # without a method
    for name, (key, value) in {
        "spec_method": ("method", method),
        "spec_model": ("model", model),
        "spec_tokens": ("num_speculative_tokens", tokens),
    }.items():
        if value is not None:
            values[key] = value
            idle.pop(key, None)
            idle[key] = name
    options = SpeculativeConfig(**values)
    if options.method == MTP and options.model:  # other engines' name of it
        options = replace(options, method=ASSISTANT)
    if "method" not in values and idle:
        text = f"must be one of {', '.join(METHODS)} beside {', '.join(idle.values())}"
        raise ConfigError("spec_method", f"{text}; it is not given")
    if options.method == OFF:
        return None
    _of_its_method(options, values)
    if options.ngram_min > options.ngram_max:
        raise ConfigError(
            "speculative_config",
            f"ngram_min must be at most ngram_max ({options.ngram_max}), not {options.ngram_min}",
        )
    if options.method in NAMED and not options.model:
        kind = NAMED[options.method]
        raise ConfigError("spec_model", f"must name {kind} for the method {options.method}")
    if options.method in OWN_METHODS and options.model:
        raise ConfigError("spec_model", f"must be left out: {options.method} needs no model")
    return options


def _checked(config: Mapping[str, object]) -> dict[str, Any]:
    """Check each field of `speculative_config` and return them."""
    options = {option.name: option for option in options_of(SpeculativeConfig)}
    values = {}
    for key, value in config.items():
        if key not in options:
            text = f"{shown(key)} {unknown(str(key), 'field of it', options)}"
            raise ConfigError("speculative_config", text)
        try:
            values[key] = options[key].checked(value)
        except ValueError as bad:
            raise ConfigError("speculative_config", f"{key} {bad}") from None
    return values


def _of_its_method(options: SpeculativeConfig, values: Mapping[str, object]) -> None:
    """Refuse fields that would have no effect, unless they have their default."""
    for field in options_of(SpeculativeConfig):
        methods = field.facts.get("methods", METHODS)
        if options.method not in methods and getattr(options, field.name) != field.default:
            raise ConfigError(
                "speculative_config",
                f"{field.name} is for the method {', '.join(methods)}, not {options.method}",
            )
    for name in ("typical_epsilon", "typical_delta"):
        if name in values and "typical_acceptance" not in values:
            raise ConfigError("speculative_config", f"{name} needs typical_acceptance")

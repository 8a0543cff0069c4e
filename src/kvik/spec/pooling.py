"""Reads from a model's files how a prompt's hidden states become a vector, a score or classes.

Vectors follow the modules of sentence-transformers (Reimers and Gurevych 2019): `modules.json`
lists the pooling, dense layers and normalisation after the network. Scores come from the head of a
`*ForSequenceClassification` with one label, or from the logits of a token that means yes and one
that means no. Such a head with several labels gives the probability of each.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvik.errors import ModelError, shown
from kvik.files import is_named
from kvik.spec.fields import MAX_WIDTH, Fields, read_json

MODULES = "modules.json"
SENTENCES = "config_sentence_transformers.json"
JUDGE = "Qwen3ForCausalLM"  # the architecture that scores by the logits of tokens
JUDGE_TOKENS = 9693, 2152  # "yes" and "no" of its tokenizer
LENGTHS = "sentence_bert_config.json"
TOKENIZER = "tokenizer_config.json"
MODULE_CONFIG = "config.json"
MAX_MODULES = 16

# Names of poolings in files: the value of `pooling_mode`, or the true key after "pooling_mode_".
MODES: Mapping[str, str] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
    "max": "max",
    "max_tokens": "max",
}
# Last component of torch's class name -> function of `PooledLayer`.
FUNCTIONS: Mapping[str, str] = {
    "Identity": "none",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}
SCORE_FUNCTIONS = ("Identity", "Sigmoid", "Tanh", "ReLU")
MAX_LABELS = 1 << 16
# `problem_type` of config.json -> the function of the outputs for several labels.
SINGLE = "single_label_classification"
PROBLEMS = {SINGLE: "softmax", "multi_label_classification": "sigmoid", "regression": "none"}


@dataclass(frozen=True, slots=True)
class PooledLayer:
    """A layer over pooled vectors: function(W x + b), or a norm."""

    name: str  # in the checkpoint; for a dense module it begins with the module's folder
    # inputs, outputs: widths.
    inputs: int
    outputs: int
    bias: bool = True
    function: str = "none"  # "none", or one of `FUNCTIONS`
    norm_eps: float | None = None  # of a LayerNorm, which has no matrix; None: not a norm

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes in the checkpoint."""
        norm = self.norm_eps is not None
        shapes: dict[str, tuple[int, ...]] = {}
        shapes[f"{self.name}.weight"] = (self.outputs,) if norm else (self.outputs, self.inputs)
        if self.bias:
            shapes[f"{self.name}.bias"] = (self.outputs,)
        return shapes


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """How a model makes a vector or a score of a prompt."""

    kind: str  # one of `core.types.POOLINGS`, the model's trained pooling
    layers: tuple[PooledLayer, ...] = ()  # over the pooled vector, in order
    scores: bool = False  # the result is a score of the prompt, or of each label, not a vector
    labels: tuple[str, ...] = ()  # of a classifier's outputs, in order; (): it is no classifier
    # The score is the logit of the first token, minus the logit of the second if there is one;
    # None: it is the output of the last layer.
    score_tokens: tuple[int, int | None] | None = None
    # Of a score: one of `FUNCTIONS`. Of several labels: "softmax", "sigmoid" or "none".
    function: str = "none"
    dimensions: tuple[int, ...] = ()  # lengths to which vectors can be cut (Kusupati et al. 2022)
    any_dimension: bool = False  # vectors can be cut to any length from the least of `dimensions`
    modules: tuple[str, ...] = ()  # folders of modules with separate weight files
    # Format of a pair of texts to score: "pair", the tokenizer's; or "qwen3", Qwen3-Reranker's.
    template: str = "pair"
    prompts: tuple[tuple[str, str], ...] = ()  # name -> text to put before texts
    default_prompt: str = ""  # name of the default prompt; "": none
    max_tokens: int | None = None  # limit of a prompt below the network's own; None: no such limit

    @property
    def gives(self) -> str:
        """What the model gives, for error messages."""
        if not self.scores:
            return "vectors of texts"
        return "classes of texts" if len(self.labels) > 1 else "scores of texts"

    def width(self, hidden: int) -> int:
        """Return the length of a vector, given the length of hidden states."""
        return self.layers[-1].outputs if self.layers else hidden

    def allowed(self, hidden: int) -> str:
        """Return the allowed `dimensions` of a request, for an error message."""
        width = self.width(hidden)
        if self.any_dimension:
            return f"in {min(self.dimensions, default=1)}..{width}"
        if not self.dimensions:
            return f"{width}: this model's vectors cannot be cut"
        return "one of " + ", ".join(map(str, sorted({*self.dimensions, width})))

    def can_cut(self, dimensions: int, hidden: int) -> bool:
        """Return whether vectors can be cut to this length."""
        width = self.width(hidden)
        if self.any_dimension:
            return min(self.dimensions, default=1) <= dimensions <= width
        return dimensions == width or dimensions in self.dimensions


def classifier(fields: Fields, kind: str, *layers: PooledLayer) -> PoolingSpec:
    """Return the pooling of a classifier.

    A single label is a score. It goes through the function that config.json names, or else through
    a sigmoid. Several labels exclude each other, unless `problem_type` says otherwise.

    Args:
        kind: of pooling.
        layers: of the head; the last has one output for each label.

    Raises:
        ModelError: labels or functions cannot be used.
    """
    labels = read_labels(fields)
    if len(labels) > 1:
        function = PROBLEMS[fields.choice("problem_type", tuple(PROBLEMS), SINGLE)]
    else:
        function, inside = "sigmoid", fields.inside("sentence_transformers")
        older = "sbert_ce_default_activation_function"
        for where, key in ((inside, "activation_fn"), (fields, older)):
            if key in where:
                function = _function(where, key, SCORE_FUNCTIONS)
                break
    return PoolingSpec(kind, layers, scores=True, labels=labels, function=function)


def read_labels(fields: Fields) -> tuple[str, ...]:
    """Return the names of a classifier's labels, in the order of its outputs.

    Raises:
        ModelError: there are none, or their numbers are not 0, 1 and so on.
    """
    names = fields.mapping("id2label")
    if names is None:
        count = fields.integer("num_labels", 1, MAX_LABELS, 2)
        return tuple(f"LABEL_{i}" for i in range(count))
    ordered = [names.get(str(i)) for i in range(len(names))]
    if not 1 <= len(names) <= MAX_LABELS or not all(isinstance(name, str) for name in ordered):
        allowed = f"must name 1 to {MAX_LABELS} labels, by 0, 1 and so on"
        raise fields.error("id2label", f"{allowed}, not {shown(dict(names))}")
    return tuple(map(str, ordered))


def last_token_classifier(fields: Fields, hidden: int, eps: float) -> PoolingSpec:
    """Return the pooling of a decoder's `*ForSequenceClassification`: a layer over the state of the
    last token, as in reward models."""
    labels = len(read_labels(fields))
    return classifier(fields, "last", PooledLayer("score", hidden, labels, bias=False))


def cut_dimensions(fields: Fields) -> tuple[tuple[int, ...], bool]:
    """Return `dimensions` and `any_dimension` from config.json."""
    listed = fields.raw("matryoshka_dimensions")
    if listed is not None:
        return tuple(int(n) for n in fields.numbers("matryoshka_dimensions", 1, MAX_WIDTH)), False
    return (), fields.boolean("is_matryoshka", False)


def mean_vectors(fields: Fields, hidden: int, eps: float) -> PoolingSpec:
    """The mean of all tokens, unless files say otherwise."""
    dimensions, every = cut_dimensions(fields)
    return PoolingSpec("mean", dimensions=dimensions, any_dimension=every)


def read_modules(folder: Path, hidden: int, vocab: int, config: Fields) -> PoolingSpec | None:
    """Return the pooling by the modules of a folder; None: it has no `modules.json`.

    Args:
        hidden, vocab: width of hidden states, and size of the vocabulary.
        config: of the network.

    Raises:
        ModelError: a file cannot be used, or a module is not supported.
    """
    if not is_named(folder / MODULES):
        return None
    width, spec, normal = hidden, PoolingSpec(""), False
    for fields in _modules(folder):
        kind = fields.text("type").rpartition(".")[2]
        path = fields.text("path") if fields.raw("path") != "" else ""
        if kind == "Transformer":
            if path:
                raise fields.error("path", f"must be empty for the network, not {shown(path)}")
        elif kind == "Pooling" and not spec.kind:
            spec = replace(spec, kind=_pooling(folder, path))
        elif kind == "Dense" and spec.kind and not normal:
            layer = _dense(folder, path, width)
            width = layer.outputs
            layers, modules = (*spec.layers, layer), (*spec.modules, path)
            spec = replace(spec, layers=layers, modules=modules)
        elif kind == "LogitScore" and not spec.kind:
            tokens = _tokens(folder, path, vocab)
            spec = PoolingSpec(
                "last", scores=True, score_tokens=tokens, function="sigmoid", template="qwen3"
            )
        elif kind == "Normalize":  # requests say whether vectors are normalised
            normal = True
        elif kind != "Dropout":
            supported = "Transformer, Pooling, Dense, Normalize and LogitScore"
            raise fields.error("type", f"must be one of {supported}, in order, not {shown(kind)}")
    if not spec.kind or spec.scores:
        return spec if spec.kind else None
    dimensions, every = cut_dimensions(config)
    return replace(spec, dimensions=dimensions, any_dimension=every)


def read_judge(folder: Path, vocab: int, config: Fields) -> PoolingSpec | None:
    """Return the pooling of Qwen3-Reranker, whose files do not describe it: the model is recognised
    by its name, or by `classifier_from_token` of config.json. None: it is another model.

    Raises:
        ModelError: `classifier_from_token` has other tokens.
    """
    named = any("qwen3-reranker" in part.lower() for part in folder.absolute().parts[-3:])
    tokens = config.strings("classifier_from_token")
    if tokens and tokens != ("no", "yes"):
        raise config.error("classifier_from_token", f"must be ['no', 'yes'], not {list(tokens)}")
    if not (named or tokens) or vocab <= max(JUDGE_TOKENS):
        return None
    return PoolingSpec(
        "last", scores=True, score_tokens=JUDGE_TOKENS, function="sigmoid", template="qwen3"
    )


def with_sentences(folder: Path, spec: PoolingSpec) -> PoolingSpec:
    """Add what the files of a folder say about its texts and scores: the prompts, the longest text,
    and the function of scores.

    Raises:
        ModelError: a file cannot be used.
    """
    fields = _fields(folder, SENTENCES)
    prompts, default = _prompts(fields)
    if spec.scores and len(spec.labels) < 2 and "activation_fn" in fields:
        spec = replace(spec, function=_function(fields, "activation_fn", SCORE_FUNCTIONS))
    return replace(
        spec, prompts=tuple(prompts.items()), default_prompt=default, max_tokens=_length(folder)
    )


def _fields(folder: Path, name: str) -> Fields:
    """Return the fields of a file; none if there is no such file."""
    return Fields(read_json(folder / name) if is_named(folder / name) else {}, name)


def _length(folder: Path) -> int | None:
    fields = _fields(folder, LENGTHS)
    if "max_seq_length" in fields:
        return fields.integer("max_seq_length", 1, MAX_WIDTH)
    # Newer releases only write the tokenizer's limit, which is 1e30 if there is none.
    limit = _fields(folder, TOKENIZER).raw("model_max_length")
    return limit if isinstance(limit, int) and 0 < limit <= MAX_WIDTH else None


def _prompts(fields: Fields) -> tuple[dict[str, str], str]:
    prompts = dict(fields.mapping("prompts") or {})
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise fields.error("prompts", f"must hold texts, not {shown(text)} for {shown(name)}")
    default = fields.text("default_prompt_name") if "default_prompt_name" in fields else ""
    if default and default not in prompts:
        raise fields.error("default_prompt_name", f"must be one of prompts, not {shown(default)}")
    return {name: str(text) for name, text in prompts.items()}, default


def _modules(folder: Path) -> list[Fields]:
    path = folder / MODULES
    try:
        listed = json.loads(path.read_bytes()[: 1 << 20])
    except OSError as error:
        raise ModelError(MODULES, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise ModelError(MODULES, "is not valid JSON") from None
    if not isinstance(listed, list) or len(listed) > MAX_MODULES:
        raise ModelError(MODULES, f"must be a list of at most {MAX_MODULES} modules")
    if not all(isinstance(module, dict) for module in listed):
        raise ModelError(MODULES, "must hold objects")
    return [Fields(module, f"{MODULES} {i}") for i, module in enumerate(listed)]


def _module(folder: Path, path: str) -> Fields:
    """Return the configuration of a module, from its folder."""
    if not path or Path(path).name != path or path.startswith("."):
        raise ModelError(MODULES, f"path must name a folder of the model's, not {shown(path)}")
    return Fields(read_json(folder / path / MODULE_CONFIG), f"{path}/{MODULE_CONFIG}")


def _pooling(folder: Path, path: str) -> str:
    fields = _module(folder, path)
    if not fields.boolean("include_prompt", True):
        raise fields.error("include_prompt", "must be true")
    prefix = "pooling_mode_"
    every = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    unsupported = ("mean_sqrt_len_tokens", "weightedmean_tokens")
    chosen = [m for m in (*every, *unsupported) if fields.boolean(f"{prefix}{m}", False)]
    key = prefix + (chosen[0] if chosen else "mean_tokens")
    if "pooling_mode" in fields:
        key, chosen = "pooling_mode", [fields.text("pooling_mode")]
    if len(chosen) > 1:
        raise fields.error(key, f"cannot be combined with {', '.join(chosen[1:])}")
    if not chosen:
        raise fields.error(key, "must be true, or another pooling mode must be")
    if chosen[0] not in MODES:
        raise fields.error(key, f"must be cls, mean, max or lasttoken, not {shown(chosen[0])}")
    return MODES[chosen[0]]


def _dense(folder: Path, path: str, width: int) -> PooledLayer:
    fields = _module(folder, path)
    inputs = fields.integer("in_features", 1, MAX_WIDTH)
    if inputs != width:
        raise fields.error("in_features", f"must be {width}, the width before it, not {inputs}")
    if fields.boolean("use_residual", False):
        raise fields.error("use_residual", "must be false")
    function = _function(fields, "activation_function") if "activation_function" in fields else ""
    return PooledLayer(
        f"{path}.linear",
        inputs,
        fields.integer("out_features", 1, MAX_WIDTH),
        bias=fields.boolean("bias", True),
        function=function or "tanh",
    )


def _tokens(folder: Path, path: str, vocab: int) -> tuple[int, int | None]:
    fields, last = _module(folder, path), vocab - 1
    no = fields.integer("false_token_id", 0, last) if "false_token_id" in fields else None
    return fields.integer("true_token_id", 0, last), no


def _function(fields: Fields, key: str, allowed: Collection[str] = tuple(FUNCTIONS)) -> str:
    name = fields.text(key).rpartition(".")[2]
    if name not in allowed:
        raise fields.error(key, f"must be one of {', '.join(allowed)}, not {shown(name)}")
    return FUNCTIONS[name]

"""Draft heads: small networks on a model's hidden states that draft its next tokens. Their folder
holds a config.json, which this file reads and writes, and a model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvik.config.graph_sizes import graph_bytes
from kvik.config.model_source import CONFIG
from kvik.errors import ConfigError, ModelError, shown
from kvik.models.eagle3 import NORMED, PLAIN
from kvik.models.gemma4 import ASSISTANT
from kvik.models.model_spec import TEXT, ModelSpec
from kvik.spec.fields import MAX_VOCAB, MAX_WIDTH, Fields, read_json
from kvik.spec.layers import LayerSpec
from kvik.spec.model import DTYPE_BYTES, LOGIT_BYTES

MEDUSA, EAGLE = KINDS = ("medusa", "eagle")
MIN_TAPPED = 7  # layers of a model with an EAGLE-3 head
TAPPED = "eagle_aux_hidden_state_layer_ids"
GEMMA4, ASSISTANTS = "Gemma4", "AssistantForCausalLM"  # in names of architectures
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of the model
MAX_DEPTH, MAX_LAYERS, MAX_RANKS = 16, 8, 64
# Bytes of a logit while the most likely tokens are found (a value and an index), and rows at a
# time.
RANKED_BYTES, RANKED_ROWS = 16, 16


@dataclass(frozen=True, slots=True)
class HeadsSpec:
    """Facts of draft heads."""

    kind: str  # one of `KINDS`
    hidden_size: int  # of the model; 0 if unknown, as in Medusa's own checkpoints
    vocab_size: int  # likewise
    depth: int  # tokens drafted ahead: heads of Medusa, steps of EAGLE
    layers: int = 1  # residual blocks of each head of Medusa
    own_logits: bool = False  # each head of Medusa has its own output matrix, not the model's
    inner_size: int = 0  # width of EAGLE's feed-forward
    # [depth][ranks], share of cases in which the r-th most likely token at depth d + 1 was right,
    # on held-out text; () if not measured.
    accuracies: tuple[tuple[float, ...], ...] = ()

    def as_config(self, model: str) -> dict[str, object]:
        """Return the contents of config.json, with Medusa's own names if it has them.

        Args:
            model: name of the model that the heads belong to.
        """
        values: dict[str, object] = {
            "model_type": self.kind,
            "base_model_name_or_path": model,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }
        if self.kind == MEDUSA:
            values |= {"medusa_num_heads": self.depth, "medusa_num_layers": self.layers}
            values["own_logits"] = self.own_logits
        else:
            values |= {"num_steps": self.depth, "intermediate_size": self.inner_size}
        return values | {"accuracies": [list(ranks) for ranks in self.accuracies]}


@dataclass(frozen=True, slots=True)
class HeadsFootprint:
    """Bytes of draft heads, which are never quantised and run through Python."""

    spec: HeadsSpec
    dtype: str
    drafts: int  # maximum number of drafts of a request in one step

    @property
    def weights(self) -> int:
        spec, hidden = self.spec, self.spec.hidden_size
        if spec.kind == MEDUSA:
            per_head = spec.layers * (hidden * hidden + hidden)
            per_head += hidden * spec.vocab_size if spec.own_logits else 0
            return spec.depth * per_head * DTYPE_BYTES[self.dtype]
        joined = 2 * hidden * hidden + hidden
        return (joined + hidden + 3 * hidden * spec.inner_size) * DTYPE_BYTES[self.dtype]

    @property
    def graph(self) -> int:
        """Bytes of a captured forward: up to two layers for each depth of drafts."""
        return graph_bytes(2 * self.spec.depth)

    def step(self, rows: int) -> int:
        """Peak of drafting for `rows` requests together."""
        spec, hidden, item = self.spec, self.spec.hidden_size, DTYPE_BYTES[self.dtype]
        if spec.kind == MEDUSA:
            guesses = rows * spec.depth
            widths = 5 * hidden  # before, inside and after a block, and concatenated
            copies = 2 if spec.own_logits else 1  # copies of logits: of each head, and concatenated
        else:
            # At most half of the nodes of a tree have children, unless it is a chain.
            guesses = rows * max(1, self.drafts // 2)
            widths = 7 * hidden + 3 * spec.inner_size
            copies = 1
        logits = copies * guesses * LOGIT_BYTES + min(guesses, RANKED_ROWS) * RANKED_BYTES
        return rows * hidden * item + guesses * widths * item + logits * spec.vocab_size


def read_heads_spec(folder: Path, kind: str) -> HeadsSpec:
    """Read the facts of heads of a kind.

    Raises:
        ModelError: config.json cannot be read, or belongs to other heads.
    """
    fields = Fields(read_json(folder / CONFIG))
    medusa = kind == MEDUSA
    # Medusa's own checkpoints give neither their kind nor their sizes.
    minimum, default = (0, 0) if medusa else (1, None)
    if "model_type" in fields or not medusa:
        fields.choice("model_type", (kind,))
    spec = HeadsSpec(
        kind=kind,
        hidden_size=fields.integer("hidden_size", minimum, MAX_WIDTH, default),
        vocab_size=fields.integer("vocab_size", minimum, MAX_VOCAB, default),
        depth=fields.integer("medusa_num_heads" if medusa else "num_steps", 1, MAX_DEPTH),
    )
    if medusa:
        layers = fields.integer("medusa_num_layers", 1, MAX_LAYERS, 1)
        spec = replace(spec, layers=layers, own_logits=fields.boolean("own_logits", True))
    else:
        spec = replace(spec, inner_size=fields.integer("intermediate_size", 1, MAX_WIDTH))
    return _with_accuracies(spec, fields)


def _with_accuracies(spec: HeadsSpec, fields: Fields) -> HeadsSpec:
    value = fields.raw("accuracies")
    if value is None:
        return spec
    good = isinstance(value, list) and len(value) in (0, spec.depth) and all(map(_shares, value))
    if not good:
        raise fields.error(
            "accuracies",
            f"must be {spec.depth} lists of 1 to {MAX_RANKS} shares, not {shown(value)}",
        )
    assert isinstance(value, list)
    return replace(spec, accuracies=tuple(tuple(map(float, ranks)) for ranks in value))


def _shares(ranks: object) -> bool:
    return (
        isinstance(ranks, list)
        and 1 <= len(ranks) <= MAX_RANKS
        and all(isinstance(n, int | float) and not isinstance(n, bool) for n in ranks)
        and all(0 <= n <= 1 for n in ranks)
    )


def is_eagle3(config: Mapping[str, object]) -> bool:
    """Return whether a config.json is of an EAGLE-3 head."""
    names = config.get("architectures")
    return isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)


def eagle3_facts(folder: Path, model: ModelSpec) -> tuple[ModelSpec, tuple[int, ...]]:
    """Read the facts of an EAGLE-3 head for a model.

    Returns:
        The head as a Llama of one layer, whose tokens are those that it drafts; the layers of the
        model before which it reads the residual stream.

    Raises:
        ModelError: with field `spec_model`: there is none that kvik can use, or it is for another
            model.
    """
    try:
        spec = _eagle3_spec(folder, model)
    except ModelError as error:
        raise ModelError("spec_model", f"holds no EAGLE-3 head: {error}") from None
    sizes = spec.hidden_size, model.hidden_size
    if sizes[0] != sizes[1]:
        raise ModelError(
            "spec_model", f"its head is for hidden states of {sizes[0]}, the model has {sizes[1]}"
        )
    if model.streams is not None:
        message = "must be left out: the model has several residual streams"
        raise ModelError("spec_model", message)
    if model.num_layers < MIN_TAPPED:
        raise ModelError(
            "spec_model", f"must be left out: the model has fewer than {MIN_TAPPED} layers"
        )
    return spec, _taps(model)


def _taps(model: ModelSpec) -> tuple[int, ...]:
    return 2, model.num_layers // 2, model.num_layers - 3


def _eagle3_spec(folder: Path, model: ModelSpec) -> ModelSpec:
    config = read_json(folder / CONFIG)
    fields = Fields(config)
    if not is_eagle3(config):
        names = shown(fields.raw("architectures"))
        raise fields.error("architectures", f"must name one of EAGLE-3, not {names}")
    inner = {**config, **(fields.mapping("transformer_layer_config") or {})}
    Fields(inner).integer("num_hidden_layers", 1, 1, 1)
    for part in (fields, fields.inside("eagle_config")):
        if part.raw(TAPPED) not in (None, [], list(_taps(model))):
            raise part.error(TAPPED, f"must be {list(_taps(model))}, not {shown(part.raw(TAPPED))}")
    vocab = fields.integer("draft_vocab_size", 1, MAX_VOCAB, model.vocab_size)
    facts = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": vocab}
    facts |= {"tie_word_embeddings": False}
    kept = {key: value for key, value in inner.items() if key not in SPECIAL_TOKENS}
    spec = ModelSpec.from_config({**kept, **facts})
    before = fields.boolean("norm_before_residual", False)
    return replace(spec, wiring=NORMED if before else PLAIN)


def is_assistant(config: Mapping[str, object]) -> bool:
    """Return whether a config.json is of an assistant of Gemma 4."""
    names = config.get("architectures")
    return isinstance(names, list) and any(ASSISTANTS in str(name) for name in names)


def assistant_facts(folder: Path, model: ModelSpec) -> ModelSpec:
    """Read the facts of an assistant of Gemma 4 for a model (`Gemma4Assistant`).

    Raises:
        ModelError: with field `spec_model`: there is none, or it is for another model.
    """
    try:
        spec = _assistant_spec(folder)
        return replace(spec, layers=_reading(spec, model))
    except ModelError as error:
        raise ModelError("spec_model", f"holds no assistant of this model: {error}") from None


def _assistant_spec(folder: Path) -> ModelSpec:
    config = read_json(folder / CONFIG)
    fields = Fields(config)
    if not is_assistant(config):
        names = shown(fields.raw("architectures"))
        raise fields.error("architectures", f"must name an assistant of Gemma 4, not {names}")
    # All its layers read other keys, whatever num_kv_shared_layers says.
    facts = {"architectures": ["Gemma4ForCausalLM"], "num_kv_shared_layers": 0}
    inner = {"hidden_size_per_layer_input": 0, **config, **(fields.mapping(TEXT) or {})}
    kept = {key: value for key, value in inner.items() if key not in (*SPECIAL_TOKENS, TEXT)}
    width = fields.integer("backbone_hidden_size", 1, MAX_WIDTH, 1536)
    return replace(ModelSpec.from_config({**kept, **facts}), wiring=ASSISTANT, embedding_size=width)


def _reading(spec: ModelSpec, model: ModelSpec) -> tuple[LayerSpec, ...]:
    """Return the layers of an assistant, each of which reads the keys and values of the model's
    last layer of its kind that has its own. Raises ModelError if the model has other sizes."""
    if not model.architecture.startswith(GEMMA4):
        raise ModelError("model", f"must be a Gemma 4, not {model.architecture}")
    for name, ours, theirs in (
        ("vocab_size", spec.vocab_size, model.vocab_size),
        ("backbone_hidden_size", spec.embedding_size, model.hidden_size),
    ):
        if ours != theirs:
            raise ModelError(name, f"must be {theirs}, not {ours}")
    if any(layer.token_input or layer.experts for layer in spec.layers):
        raise ModelError(TEXT, "must have no experts and no token embeddings of each layer")
    owners = {
        layer.window is None: number
        for number, layer in enumerate(model.layers)
        if layer.kv_from is None
    }
    layers = []
    for layer in spec.layers:
        owner = owners.get(layer.window is None)
        if owner is None:
            raise ModelError("layer_types", "must be kinds of layers of the model")
        kv_heads, head_dim = model.heads(model.layers[owner])
        if spec.heads(layer)[1] != head_dim or spec.num_heads % kv_heads:
            raise ModelError(
                "head_dim",
                f"must be {head_dim} for {kv_heads} heads of keys, not {spec.heads(layer)[1]} for "
                f"{spec.num_heads} heads of queries",
            )
        window = model.layers[owner].window
        layers.append(replace(layer, kv_from=owner, kv_heads=kv_heads, window=window))
    return tuple(layers)


def heads_for(folder: Path, kind: str, hidden_size: int, vocab_size: int) -> HeadsSpec:
    """Read the facts of heads of a kind for a model of these sizes.

    Raises:
        ModelError: with field `spec_model`: config.json cannot be read, belongs to other heads, or
            they are for a model of other sizes.
    """
    try:
        stored = read_heads_spec(folder, kind)
    except ModelError as error:
        raise ModelError("spec_model", f"holds no {kind} heads: {error}") from None
    spec = replace(
        stored,
        hidden_size=stored.hidden_size or hidden_size,
        vocab_size=stored.vocab_size or vocab_size,
    )
    if (spec.hidden_size, spec.vocab_size) != (hidden_size, vocab_size):
        raise ModelError(
            "spec_model",
            f"its heads are for hidden states of {spec.hidden_size} and {spec.vocab_size} tokens, "
            f"the model has {hidden_size} and {vocab_size}",
        )
    return spec


def shipped_heads(kind: str, model: Path) -> Path:
    """Return the folder of the heads that come with a model, next to its own: "model-medusa".
    Raises ConfigError if there are none."""
    folder = model.with_name(f"{model.name}-{kind}")
    if not (folder / CONFIG).is_file():
        raise ConfigError("spec_model", f"must name the {kind} heads: the model comes without any")
    return folder

"""Gemma 3n (Google DeepMind 2025): several residual streams, of which each layer computes on one.

A layer predicts the streams from each other, and corrects all by what attention and MLP change in
one of them (AltUp, Baykal et al. 2023, arXiv 2301.13310). A product of low rank is added to what
attention reads (LAuReL, Menghani et al. 2024, arXiv 2411.07501). In the first layers only the
largest gates of the MLP pass. Attention, shared keys and values, and the layers' own inputs of each
token are those of Gemma 4.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvik.models.decoder import Decoder
from kvik.models.gemma import GEGLU, gemma3_ropes
from kvik.models.gemma4 import (
    CAP,
    GEMMA4,
    Gemma4Attention,
    OwnInput,
    TokenInputs,
    kv_owners,
)
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields
from kvik.spec.layers import MAX_STREAMS, SLIDING, AltUpSpec, LayerSpec, layer_types, read_window
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext, Norm

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SQUARE = 1e-5  # mean square of a new stream from which on it is as large as the first one
SPARSE_LAYERS, SPARSITY = 10, 0.95  # of models that do not say it


class AltUp:
    """Predicts the residual streams of a layer and corrects them by what it computes."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, streams: AltUpSpec) -> None:
        hidden, count, self.active = spec.hidden_size, streams.count, streams.active
        self.hidden = hidden
        self.norm = builder.rms_norm("router_norm", hidden, spec.norm_eps, scale=1 / hidden)
        # A correction adds 1 to its coefficients.
        coefficients = {"prediction_coefs": (count**2, 0.0), "correction_coefs": (count, 1.0)}
        self.predictions, self.corrections = builder.mixtures(
            "modality_router", hidden, count, coefficients
        )
        self.mix, self.spread = builder.weighted_sums(count), builder.weighted_sums(1)
        self.minus = builder.scaled_sum(-1.0)

    def of(self, x: Tensor) -> Tensor:
        """x [tokens, streams * hidden] -> the stream that layers compute on, [tokens, hidden]."""
        first = self.active * self.hidden
        return x[:, first : first + self.hidden]

    def predict(self, x: Tensor) -> Tensor:
        """x [tokens, streams * hidden] -> the same."""
        return self.mix(x, x, self.predictions(self.norm(self.of(x))))

    def correct(self, predicted: Tensor, made: Tensor) -> Tensor:
        """predicted [tokens, streams * hidden], made [tokens, hidden] -> the streams."""
        change = self.minus(self.of(predicted), made)
        return self.spread(change, predicted, self.corrections(self.norm(made)))


class Gemma3nLayer:
    """Attention, an MLP and the layer's own input of each token, over several streams."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        facts, hidden = spec.layers[layer], spec.hidden_size
        streams = facts.alt_up
        assert streams is not None
        norm = partial(builder.rms_norm, dim=hidden, eps=spec.norm_eps)
        laurel = builder.at("laurel")
        self.altup = AltUp(spec, builder.at("altup"), streams)
        self.attention_norm = norm("input_layernorm")
        self.attention = Gemma4Attention(spec, builder.at("self_attn"), layer)
        self.attended_norm = norm("post_attention_layernorm")
        self.left = laurel.linear("linear_left", hidden, facts.residual_rank, bias=False)
        self.right = laurel.linear("linear_right", facts.residual_rank, hidden, bias=False)
        self.laurel_norm = laurel.rms_norm("post_laurel_norm", hidden, spec.norm_eps)
        self.add = builder.scaled_sum(1.0)
        self.rescale = builder.scaled_columns(((hidden, 0.5**0.5),))
        self.mlp_norm = norm("pre_feedforward_layernorm", before="gate_up")
        self.mlp = builder.at("mlp").gated_mlp(
            hidden, spec.inner(facts), bias=False, activation=GEGLU, sparsity=facts.sparsity
        )
        self.fed_norm = norm("post_feedforward_layernorm")
        self.scale = None
        if streams.scaled:
            self.scale = builder.learned_scale("altup.correct_output_scale", hidden)
        else:
            builder.ignore("altup.correct_output_scale")
        self.own = OwnInput(spec, builder, layer)
        # The first stream does not get it.
        self.spread = builder.weighted_sums(1, (0.0, *[1.0] * (streams.count - 1)))

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual streams x [tokens, streams * hidden] one layer further."""
        predicted = self.altup.predict(x)
        active = self.altup.of(predicted)
        normed = self.attention_norm(active)
        total = self.attended_norm.add(self.attention(normed, rotation, ctx), active)
        total = self.laurel_norm.add(self.right(self.left(normed, ctx), ctx), total)
        total = self.rescale(self.add(normed, total))
        total = self.fed_norm.add(self.mlp(self.mlp_norm(total), ctx), total)
        x = self.altup.correct(predicted, total)
        active = self.altup.of(x)
        added = self.own(active if self.scale is None else self.scale(active), ctx)
        return self.spread(self.own.norm(added), x)


class Gemma3n(Decoder):
    """The language model; image and audio encoders are not read."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        assert spec.streams is not None
        self.count, self.hidden = spec.streams.count, spec.hidden_size
        super().__init__(spec, builder, Gemma3nLayer, self._last_norm)
        trunk, hidden, new = builder.at("model"), spec.hidden_size, range(self.count - 1)
        self.inputs = TokenInputs(spec, trunk)
        names = tuple(f"altup_projections.{stream}" for stream in new)
        matrix = partial(trunk.linear, inputs=hidden, bias=False, role="streams")
        self.project = matrix(names, outputs=(hidden,) * len(new))
        self.project_back = [
            matrix(f"altup_unembed_projections.{stream}", outputs=hidden) for stream in new
        ]
        self.as_large, self.joined = builder.rescaled(LEAST_SQUARE), builder.joined()
        self.sum = builder.weighted_sums(len(new), [1.0] * len(new))

    def _last_norm(self, spec: ModelFacts, builder: LayerBuilder) -> Norm:
        """Return the norm of the mean of all streams, which reads their sum."""
        return builder.rms_norm("norm", spec.hidden_size, spec.norm_eps * self.count**2)

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual streams before the first layer, [tokens, streams *
        hidden]."""
        x = super().enter(ids, ctx)
        new = self.project(x, ctx).unflatten(1, (-1, self.hidden))
        return self.joined(x, self.as_large(new, x).flatten(1))

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens], x [tokens, streams * hidden] from `enter` -> [tokens, layers, width]."""
        return self.inputs(ids, x[:, : self.hidden], ctx)

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, streams * hidden] after the last layer -> normalised, [tokens, hidden]."""
        first, *others = x.split(self.hidden, 1)
        back = [linear(x) for linear, x in zip(self.project_back, others, strict=True)]
        joined = back[0]
        for more in back[1:]:
            joined = self.joined(joined, more)
        large = self.as_large(joined.unflatten(1, (-1, self.hidden)), first)
        return super().leave(self.sum(large.flatten(1), first))


def gemma3n_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with a window and without, by `layer_types`; each fifth has none."""
    types = layer_types(fields, layers, every=5)
    ropes, window = gemma3_ropes(fields, types, positions), read_window(fields)
    count = fields.integer("altup_num_inputs", 2, MAX_STREAMS, 4)
    facts = LayerSpec(
        token_input=fields.integer("hidden_size_per_layer_input", 1, MAX_WIDTH, 256),
        input_tokens=fields.integer("vocab_size_per_layer_input", 1, MAX_VOCAB, 262_144),
        alt_up=AltUpSpec(
            count,
            fields.integer("altup_active_idx", 0, count - 1, 0),
            fields.boolean("altup_correct_scale", True),
        ),
        residual_rank=fields.integer("laurel_rank", 1, MAX_WIDTH, 64),
    )
    parts = zip(
        types, kv_owners(fields, types), _inner(fields, layers), _sparsity(fields, layers),
        strict=True,
    )  # fmt: skip
    return tuple(
        replace(
            facts,
            window=window if kind == SLIDING else None,
            rope=ropes[kind],
            kv_from=owner,
            inner=inner,
            sparsity=sparsity,
        )
        for kind, owner, inner, sparsity in parts
    )


def _inner(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the width of each layer's MLP: `intermediate_size` is one number or a list."""
    key = "intermediate_size"
    values = fields.raw(key)
    if not isinstance(values, list | tuple):
        values = [values] * layers
    read = (fields.changed({key: value}).integer(key, 1, MAX_WIDTH) for value in values)
    return _of_layers(fields, key, tuple(read), layers)


def _sparsity(fields: Fields, layers: int) -> tuple[float, ...]:
    key = "activation_sparsity_pattern"
    if fields.raw(key) is None:
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        return (SPARSITY,) * sparse + (0.0,) * (layers - sparse)
    return _of_layers(fields, key, fields.numbers(key, 0.0, 1.0 - 1e-6), layers)


def _of_layers(fields: Fields, key: str, values: tuple[Any, ...], layers: int) -> tuple[Any, ...]:
    if len(values) != layers:
        raise fields.error(key, f"must have {layers} entries, not {len(values)}")
    return values


def _widest(fields: Fields) -> int:
    return max(_inner(fields, fields.integer("num_hidden_layers", 1, MAX_LAYERS)))


GEMMA3N = replace(
    GEMMA4,
    name="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    models="Gemma 3n, text-only models",
    make=Gemma3n,
    layers=gemma3n_layers,
    experts=None,
    optional_experts=False,
    inner=_widest,
    keys={"hidden_act": "hidden_activation"},
    defaults={
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
        CAP: 30.0,
    },
    gguf=None,
)
# As published, with image and audio encoders.

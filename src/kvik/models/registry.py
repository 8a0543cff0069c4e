"""Which class runs which architecture, and how a model comes to be from a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from kvik.models.gpt2 import GPT2
from kvik.models.llama import Llama, mistral, qwen2
from kvik.models.qwen3 import qwen3
from kvik.nn.builder import Builder
from kvik.nn.context import ForwardContext
from kvik.nn.loader import load_weights, random_weights
from kvik.spec.model import ModelSpec


class Model(Protocol):
    """A network without state: weights only, the cache comes with the context."""

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        ...

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> hidden [tokens, hidden], normalised."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32."""
        ...


class Network(Model, Protocol):
    """A model whose layers can be run by themselves: forward is norm(blocks(enter(ids)))."""

    def blocks(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """The residual stream x [tokens, hidden] -> the same behind the last layer."""
        ...


MODELS: Mapping[str, Callable[[ModelSpec, Builder], Network]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "GPT2LMHeadModel": GPT2,
}


def load_model(spec: ModelSpec, builder: Builder, *, seed: int = 0) -> Model:
    """The model that `spec` describes, with the weights of the builder's checkpoint.

    Without a checkpoint, what the builder's storage does not hold becomes random, from `seed`.

    Raises:
        ModelError: the checkpoint does not fit the spec, or cannot be quantised.
    """
    model = MODELS[spec.architecture](spec, builder)
    if builder.checkpoint is None:
        random_weights(builder.declared, seed)
    else:
        load_weights(builder.declared, builder.checkpoint)
    return model

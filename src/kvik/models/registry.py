"""Which class runs which architecture, and how a model comes to be from a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from kvik.config.model_spec import ModelSpec
from kvik.models.gpt2 import GPT2
from kvik.models.llama import Llama
from kvik.models.mistral import mistral
from kvik.models.qwen2 import qwen2
from kvik.models.qwen3 import qwen3
from kvik.nn.builder import Builder
from kvik.nn.context import ForwardContext
from kvik.nn.loader import load_weights, random_weights


class Model(Protocol):
    """A network without state: weights only, the cache comes with the context."""

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> hidden [tokens, hidden], normalised."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32."""
        ...


MODELS: Mapping[str, Callable[[ModelSpec, Builder], Model]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "GPT2LMHeadModel": GPT2,
}


def load_model(spec: ModelSpec, builder: Builder, *, seed: int = 0) -> Model:
    """The model that `spec` describes, with the weights of the builder's checkpoint.

    A builder without a checkpoint makes random weights from `seed`.

    Raises:
        ModelError: the checkpoint does not fit the spec, or cannot be quantised.
    """
    model = MODELS[spec.architecture](spec, builder)
    if builder.checkpoint is None:
        random_weights(builder.declared, seed)
    else:
        load_weights(builder.declared, builder.checkpoint)
    return model

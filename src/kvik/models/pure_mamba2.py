"""Models of Mamba-2 layers alone (Dao and Gu 2024, arXiv 2405.21060), as Codestral Mamba."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models import mamba2
from kvik.models.bamba import check_limits
from kvik.models.decoder import Decoder, MakeStateKeeper, layer_norms
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext

if TYPE_CHECKING:
    from torch import Tensor

KEYS = {
    mamba2.HEADS: "num_heads",
    mamba2.HEAD_DIM: "head_dim",
    mamba2.GROUPS: "n_groups",
    mamba2.SIZE: "state_size",
    mamba2.TAPS: "conv_kernel",
}


class MambaLayer:
    """What keeps a state reads the normalised residual stream and adds to it."""

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, keeper: MakeStateKeeper
    ) -> None:
        state = spec.layers[layer].state
        assert state is not None
        self.norm = layer_norms(spec, builder)("norm", before="qkv")
        self.mixer = keeper(spec, builder.at("mixer"), layer, state)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        return self.mixer(self.norm(x), x, rotation, ctx)


def state_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer keeps a state."""
    check_limits(fields)
    inner = fields.integer("hidden_size", 1, MAX_WIDTH) * fields.integer("expand", 1, 64, 2)
    state = mamba2.mamba2_state(fields, KEYS, "use_conv_bias", inner)
    return (LayerSpec(state=state),) * layers


MAMBA2 = Architecture(
    "Mamba2ForCausalLM",
    "mamba2",
    "Mamba 2 and Codestral Mamba",
    partial(
        Decoder,
        make_layer=partial(MambaLayer, keeper=mamba2.Mamba2),
        scopes=("backbone", ""),
        names=("embeddings", "layers", "norm_f", "lm_head"),
    ),
    layers=state_layers,
    inner=lambda fields: 0,
    keys={**KEYS, "num_attention_heads": "num_heads", "rms_norm_eps": "layer_norm_epsilon"},
    fixed={"use_bias": False},
    eos_token_ids=(2,),
    defaults={
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "max_position_embeddings": 1_048_576,
    },
)

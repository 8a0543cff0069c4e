"""Zamba2 (Glorioso et al. 2024, arXiv 2411.15242): Mamba-2 layers; some first read attention and an
MLP over the residual stream and the token's embedding. A few such blocks take turns, and each layer
adds its own products of narrow matrices to theirs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models.decoder import Decoder
from kvik.models.mamba2 import GROUPS, HEAD_DIM, HEADS, SIZE, TAPS, Mamba2, mamba2_state
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.layers import BESIDE, LEGACY_TYPES, LINEAR, LayerSpec
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5  # of the norm of a Mamba-2 layer's outputs, whatever config.json says for others
KEYS = {
    HEADS: "n_mamba_heads",
    HEAD_DIM: "mamba_headdim",
    GROUPS: "mamba_ngroups",
    SIZE: "mamba_d_state",
    TAPS: "mamba_d_conv",
}
KINDS = "layers_block_type"
RANK, ADAPTED = "adapter_rank", "use_shared_attention_adapter"


class Narrow:
    """A product of two narrow matrices, which is added to that of a shared one (LoRA, Hu et al.
    2021, arXiv 2106.09685)."""

    def __init__(self, builder: LayerBuilder, inputs: int, rank: int, outputs: int) -> None:
        linear = partial(builder.linear, bias=False)
        self.down = linear("0", inputs, rank, role="q_down")
        self.up = linear("1", rank, outputs, role="wide_gates")

    def __call__(self, x: Tensor, ctx: ForwardContext, shared: Tensor) -> Tensor:
        """x [tokens, inputs], shared [tokens, outputs] -> [tokens, outputs]."""
        return self.up(self.down(x, ctx), ctx, shared)


class SharedBlock:
    """The matrices and norms of attention and an MLP, which several layers have.

    Args:
        uses: number of these layers.
    """

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int, uses: int) -> None:
        hidden, facts = spec.hidden_size, spec.layers[layer]
        kv_heads, dim = spec.heads(facts)
        self.builder = builder
        attention, mlp = builder.at("self_attn"), builder.at("feed_forward")
        linear = partial(attention.linear, bias=False, uses=uses)
        widths = [heads * dim for heads in (spec.query_heads(facts), kv_heads, kv_heads)]
        self.qkv = [
            linear(f"{part}_proj", 2 * hidden, width, role="qkv")
            for part, width in zip("qkv", widths, strict=True)
        ]
        self.o = linear("o_proj", widths[0], hidden, role="o")
        linear, inner = partial(mlp.linear, bias=False, uses=uses), spec.intermediate_size
        self.gate_up = linear("gate_up_proj", hidden, 2 * inner, role="gate_up")
        self.down = linear("down_proj", inner, hidden, role="down")
        self.activate = builder.activated("gelu_and_mul")
        self.norm = builder.rms_norm("input_layernorm", 2 * hidden, spec.norm_eps)
        self.mlp_norm = builder.rms_norm("pre_ff_layernorm", hidden, spec.norm_eps)


class BlockUse:
    """A shared block in one of its layers: the products that the layer adds, and its attention.

    Args:
        number: of the layer, among those with such blocks.
    """

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, number: int, shared: SharedBlock
    ) -> None:
        hidden, facts = spec.hidden_size, spec.layers[layer]
        kv_heads, dim = spec.heads(facts)
        rank, inner = facts.shared_rank, spec.intermediate_size
        heads, self.shared = (spec.query_heads(facts), kv_heads, kv_heads), shared
        self.sizes = [(count, dim) for count in heads]
        self.narrow: list[Narrow] = []
        if spec.wiring == ADAPTED:
            scopes = [f"self_attn.linear_{part}_adapter_list.{number}" for part in "qkv"]
            self.narrow = [
                Narrow(shared.builder.at(scope), 2 * hidden, rank, count * dim)
                for scope, count in zip(scopes, heads, strict=True)
            ]
        mlp = shared.builder.at(f"feed_forward.gate_up_proj_adapter_list.{number}")
        self.narrow_mlp = Narrow(mlp, hidden, rank, 2 * inner)
        self.attend = builder.attention(layer, facts, dim, (dim / 2) ** -0.5)
        self.linear = builder.linear("linear", hidden, hidden, bias=False, role="streams")

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """x, the residual stream and the embedding [tokens, 2 * hidden], rotation [tokens,
        head_dim] or None -> [tokens, hidden]."""
        shared = self.shared
        x = shared.norm(x)
        parts = [linear(x, ctx) for linear in shared.qkv]
        if self.narrow:
            parts = [add(x, ctx, part) for add, part in zip(self.narrow, parts, strict=True)]
        q, k, v = (part.unflatten(1, size) for part, size in zip(parts, self.sizes, strict=True))
        x = shared.mlp_norm(shared.o(self.attend(q, k, v, ctx, rotation), ctx))
        gate_up = self.narrow_mlp(x, ctx, shared.gate_up(x, ctx))
        return self.linear(shared.down(shared.activate(gate_up), ctx), ctx)


class Zamba2Layer:
    """Mamba-2, which in some layers reads the residual stream plus the output of a shared block.

    Args:
        use: of a shared block; None: the layer has none.
    """

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, use: BlockUse | None
    ) -> None:
        state, self.use = spec.layers[layer].state, use
        assert state is not None
        inside = builder if use is None else builder.at("mamba_decoder")
        self.norm = inside.rms_norm("input_layernorm", spec.hidden_size, spec.norm_eps)
        self.mixer = Mamba2(spec, inside.at("mamba"), layer, state, eps=EPS)
        self.join, self.add = builder.joined(), builder.scaled_sum(1.0)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        inputs = x
        if self.use is not None:
            assert ctx.token_inputs is not None
            inputs = self.add(self.use(self.join(x, ctx.token_inputs), rotation, ctx), x)
        return self.mixer(self.norm(inputs), x, None, ctx)


class Zamba2(Decoder):
    """The language model."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        self.shared: dict[int, SharedBlock] = {}
        self.uses = 0
        names = "embed_tokens", "layers", "final_layernorm", "lm_head"
        super().__init__(spec, builder, self._layer, names=names)
        self.copied = builder.weighted_sums(1, (1.0,))

    def _layer(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> Zamba2Layer:
        facts = spec.layers[layer]
        if not facts.beside:
            return Zamba2Layer(spec, builder, layer, None)
        owner = layer if facts.weights_from is None else facts.weights_from
        scope = builder.at("shared_transformer")
        if owner == layer:
            uses = 1 + sum(other.weights_from == layer for other in spec.layers)
            self.shared[layer] = SharedBlock(spec, scope, layer, uses)
        else:
            builder.skip("shared_transformer")  # in some files again
        use = BlockUse(spec, builder, layer, self.uses, self.shared[owner])
        self.uses += 1
        return Zamba2Layer(spec, builder, layer, use)

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [tokens, hidden] from `enter` -> a copy, as layers may overwrite x."""
        return self.copied(x, None)


def zamba2_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with Mamba-2, and those with a shared block, too, by `layers_block_type`."""
    kinds = [LEGACY_TYPES.get(kind, kind) for kind in fields.strings(KINDS)]
    if len(kinds) != layers or set(kinds) - {LINEAR, BESIDE} or BESIDE not in kinds:
        reason = f"must have {layers} entries, mamba or hybrid, and at least one of the latter"
        raise fields.error(KINDS, f"{reason}, not {shown(fields.raw(KINDS))}")
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    if 2 * hidden % heads or 2 * hidden // heads % 2:
        reason = f"must divide {2 * hidden}, twice the hidden size, into even sizes, not {heads}"
        raise fields.error("num_attention_heads", reason)
    inner = hidden * fields.integer("mamba_expand", 1, 64, 2)
    state = mamba2_state(fields, KEYS, "use_conv_bias", inner)
    rope = read_rope(fields, positions) if fields.boolean("use_mem_rope", False) else None
    count = fields.integer("num_mem_blocks", 1, layers, 1)
    rank = fields.integer(RANK, 1, MAX_WIDTH, 128)
    numbers = [layer for layer, kind in enumerate(kinds) if kind == BESIDE]
    owners = {n: numbers[i % count] for i, n in enumerate(numbers)}
    return tuple(
        LayerSpec(
            None,
            rope,
            state=state,
            beside=True,
            head_dim=2 * hidden // heads,
            token_input=hidden if layer == numbers[0] else 0,  # the embedding, which all read
            weights_from=None if owners[layer] == layer else owners[layer],
            shared_rank=rank,
        )
        if kind == BESIDE
        else LayerSpec(state=state)
        for layer, kind in enumerate(kinds)
    )


def zamba2_wiring(fields: Fields) -> str:
    """Return whether layers add products to the shared matrices of attention, too."""
    return ADAPTED if fields.boolean(ADAPTED, False) else ""


ZAMBA2 = Architecture(
    "Zamba2ForCausalLM",
    "zamba2",
    "Zamba2",
    Zamba2,
    layers=zamba2_layers,
    wiring=zamba2_wiring,
    activations=("gelu",),
    tied=True,
    eos_token_ids=(2,),
    keys=KEYS,
    fixed={"add_bias_linear": False, "use_long_context": False},
    inner=lambda fields: fields.integer(
        "intermediate_size", 1, MAX_WIDTH, 4 * fields.integer("hidden_size", 1, MAX_WIDTH)
    ),
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 2560,
        "num_hidden_layers": 54,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "mamba_d_state": 64,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_headdim": "auto",
        KINDS: (
            *("mamba", *(*["mamba"] * 5, "hybrid") * 7, *["mamba"] * 4, "hybrid"),
            *("mamba", "mamba", "mamba", "hybrid", "mamba", "mamba"),
        ),
    },
)

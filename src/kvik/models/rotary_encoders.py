"""Encoders with rotary positions: NomicBERT (Nussbaum et al. 2024, arXiv 2402.01613), GTE (Zhang et
al. 2024, arXiv 2407.19669), Jina embeddings v3 (Sturua et al. 2024, arXiv 2409.10173) and EuroBERT
(Boizard et al. 2025, arXiv 2503.05500).

The first three are BERTs in which every token has the first token type; EuroBERT is a Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from kvik.errors import shown
from kvik.models.bert import OTHER_HEADS, bert_classifier
from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    MakeLayer,
    NormedSumLayer,
    feed_forward,
    plain_mlp,
)
from kvik.models.llama import LLAMA
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec, rotary_layers
from kvik.spec.model import ModelFacts
from kvik.spec.pooling import mean_vectors
from kvik.spec.rope import MAX_POSITIONS

# Keys of published files, with the only value that kvik supports.
USUAL: Mapping[str, object] = {
    "activation_function": "swiglu",
    "moe_every_n_layers": 0,
    "num_experts": 0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
}
NomicLayer = partial(
    NormedSumLayer,
    attention=partial(GroupedQueryAttention, scope="attn", qkv=("Wqkv",), o="out_proj"),
    feed=partial(feed_forward, gate_up=("fc12", "fc11"), down="fc2"),
    norms=("norm1", "norm2"),
)


NOMIC_NAMES = ("embeddings.word_embeddings", "encoder.layers", "", "")


def typed_encoder(
    spec: ModelFacts,
    builder: LayerBuilder,
    make_layer: MakeLayer,
    scopes: tuple[str, ...],
    names: tuple[str, str, str, str],
    embed_norm: str,
) -> Decoder:
    """Return an encoder with token types; for the other arguments see `Decoder`."""
    builder.skip(*OTHER_HEADS)
    builder.at(*scopes).skip("pooler")
    types = "embeddings.token_type_embeddings" if spec.token_types else ""
    return Decoder(
        spec,
        builder,
        make_layer,
        scopes=scopes,
        names=names,
        embed_norm=embed_norm,
        types=types,
    )


def nomic_bert(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    scopes = ("nomic_bert", "bert", "")
    return typed_encoder(spec, builder, NomicLayer, scopes, NOMIC_NAMES, "emb_ln")


def nomic_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    for key, usual in USUAL.items():
        if (value := fields.raw(key)) not in (None, usual):
            raise fields.error(key, f"must be {usual}, not {shown(value)}")
    return seeing_layers(fields, layers, positions)


def seeing_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Rotary positions; every query sees all keys."""
    (layer, *_) = rotary_layers(fields, layers, positions)
    return (replace(layer, bidirectional=MAX_POSITIONS),) * layers


NOMIC_BERT = Architecture(
    "NomicBertModel",
    "nomic_bert",
    "NomicBERT, for embeddings",
    nomic_bert,
    layers=nomic_layers,
    rms_norm=False,
    pooled=mean_vectors,
    keys={"rms_norm_eps": "layer_norm_eps"},
    older={
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    },
    fixed={
        "causal": False,
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "rotary_emb_interleaved": False,
    },
    defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2, "rope_theta": 1000.0},
    gguf="nomic-bert",
    gguf_names={
        "token_embd": "embeddings.word_embeddings",
        "token_embd_norm": "emb_ln",
        "token_types": "embeddings.token_type_embeddings",
        "blk": "encoder.layers",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
)
NOMIC_BERT_MASKED = replace(NOMIC_BERT, name="NomicBertForMaskedLM", gguf=None)


GteLayer = partial(
    NormedSumLayer,
    attention=partial(GroupedQueryAttention, scope="attention", qkv=("qkv_proj",)),
    feed=partial(
        feed_forward,
        gate_up=("up_gate_proj",),
        activation="gelu_and_mul",
        up_first=True,
        down_bias=True,
    ),
    norms=("attn_ln", "mlp_ln"),
)


def gte(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    scopes, names = ("new", "gte", ""), ("embeddings.word_embeddings", "encoder.layer", "", "")
    return typed_encoder(spec, builder, GteLayer, scopes, names, "embeddings.LayerNorm")


def gte_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Published files have a scaling "ntk", of the base and then of all frequencies."""
    for key, usual in {"logn_attention_scale": False, "position_embedding_type": "rope"}.items():
        if (value := fields.raw(key)) not in (None, usual):
            raise fields.error(key, f"must be {usual}, not {shown(value)}")
    scaling = fields.inside("rope_scaling")
    if scaling.raw("type") == "ntk":
        factor = scaling.number("factor", 1.0, 1e6)
        hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
        dim = hidden // fields.integer("num_attention_heads", 1, hidden)
        theta = fields.number("rope_theta", 1.0, 1e12, 10_000.0) * factor
        linear = {"type": "linear", "factor": factor ** (2 / dim)}
        fields = fields.changed({"rope_theta": theta, "rope_scaling": linear})
    return seeing_layers(fields, layers, positions)


GTE = Architecture(
    "NewModel",
    "new",
    "GTE, for embeddings",
    gte,
    layers=gte_layers,
    activations=("gelu",),
    qkv_bias=True,
    o_bias=True,
    rms_norm=False,
    pooled=mean_vectors,
    keys={"rms_norm_eps": "layer_norm_eps"},
    fixed={"logn_attention_clip1": False},
    defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 1},
)
GTE_IN_TRANSFORMERS = replace(
    GTE,
    name="GteModel",
    model_type="gte",
    defaults={**GTE.defaults, "rope_theta": 160_000.0},
)
GTE_MASKED = replace(GTE_IN_TRANSFORMERS, name="GteForMaskedLM")
GTE_CLASSIFIER = replace(
    GTE,
    name="NewForSequenceClassification",
    models="GTE, for classes",
    pooled=partial(bert_classifier, dense="new.pooler.dense"),
)
GTE_CLASSIFIER_IN_TRANSFORMERS = replace(
    GTE_IN_TRANSFORMERS,
    name="GteForSequenceClassification",
    models="GTE, for classes",
    pooled=partial(bert_classifier, dense="gte.pooler.dense"),
)


JinaLayer = partial(
    NormedSumLayer,
    attention=partial(GroupedQueryAttention, scope="mixer", qkv=("Wqkv",), o="out_proj"),
    feed=partial(plain_mlp, up="fc1", down="fc2"),
    norms=("norm1", "norm2"),
)


def jina(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    return typed_encoder(spec, builder, JinaLayer, ("roberta", ""), NOMIC_NAMES, "emb_ln")


JINA = Architecture(
    "JinaEmbeddingsV3Model",
    "jina_embeddings_v3",
    "Jina embeddings v3",
    jina,
    layers=seeing_layers,
    activations=("gelu",),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    rms_norm=False,
    gated_mlp=False,
    pooled=mean_vectors,
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={"layer_norm_eps": 1e-5, "type_vocab_size": 1, "rope_theta": 20_000.0},
)
JINA_MASKED = replace(JINA, name="JinaEmbeddingsV3ForMaskedLM")


def eurobert(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    builder.skip("lm_head", "dense", "classifier")  # heads for other tasks
    return Decoder(spec, builder, names=("embed_tokens", "layers", "norm", ""))


EUROBERT = replace(
    LLAMA,
    name="EuroBertModel",
    model_type="eurobert",
    models="EuroBERT",
    make=eurobert,
    layers=seeing_layers,
    pooled=mean_vectors,
    defaults={"rms_norm_eps": 1e-5},
    gguf=None,
)
EUROBERT_MASKED = replace(EUROBERT, name="EuroBertForMaskedLM")

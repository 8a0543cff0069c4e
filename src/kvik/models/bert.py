"""BERT (Devlin et al. 2018, arXiv 1810.04805), RoBERTa (Liu et al. 2019, arXiv 1907.11692),
XLM-RoBERTa (Conneau et al. 2019, arXiv 1911.02116), CamemBERT, DistilBERT (Sanh et al. 2019, arXiv
1910.01108), ELECTRA (Clark et al. 2020, arXiv 2003.10555) and MPNet (Song et al. 2020, arXiv
2004.09297): encoders with learned positions, which normalise after attention and MLP.

RoBERTa's positions begin after the row of the padding token, and it has one token type. DistilBERT
and MPNet have none. MPNet's attention adds a learned number to each score, by the distance of query
and key. In a classifier, the vector of the first token is mapped to the labels through a dense
layer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    MakeLayer,
    MakePositions,
    NormedSumLayer,
    plain_mlp,
)
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec, encoder_layers
from kvik.spec.model import ModelFacts
from kvik.spec.network import PositionTable
from kvik.spec.pooling import PooledLayer, PoolingSpec, classifier, mean_vectors, read_labels

# Heads for other tasks.
OTHER_HEADS = (
    *("cls", "lm_head", "classifier", "qa_outputs", "discriminator_predictions"),
    *("generator_predictions", "generator_lm_head", "pre_classifier"),
    *("vocab_transform", "vocab_layer_norm", "vocab_projector"),
)
bert_mlp = partial(plain_mlp, up="intermediate.dense", down="output.dense", scope="")
BertLayer = partial(
    NormedSumLayer,
    attention=partial(
        GroupedQueryAttention,
        scope="attention",
        qkv=("self.query", "self.key", "self.value"),
        o="output.dense",
    ),
    feed=bert_mlp,
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)


def positions_and_types(spec: ModelFacts, builder: LayerBuilder) -> PositionTable:
    return builder.at("embeddings").embedding(
        "position_embeddings",
        spec.max_position_embeddings,
        spec.hidden_size,
        skipped=spec.skipped_positions,
        types=("token_type_embeddings", spec.token_types),
    )


class Bert(Decoder):
    """The encoder.

    Args:
        scope: of all names, in checkpoints that have one.
        layers: name of the layers.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        scope: str = "bert",
        make_layer: MakeLayer = BertLayer,
        make_positions: MakePositions = positions_and_types,
        layers: str = "encoder.layer",
    ) -> None:
        builder.skip(*OTHER_HEADS)
        trunk = builder.at(scope, "")
        trunk.skip("pooler")
        trunk.at("embeddings").ignore("position_ids", "token_type_ids")
        super().__init__(
            spec,
            builder,
            make_layer,
            scopes=(scope, ""),
            names=("embeddings.word_embeddings", layers, "", ""),
            make_positions=make_positions,
            embed_norm="embeddings.LayerNorm",
        )


BUCKETS = 32  # of distances in MPNet, half of them for keys after the query
FURTHEST = 128  # greater distances are in the last bucket


def bucket(distance: int) -> int:
    """Return the bucket of the distance from a query to a key: the first ones have one distance
    each, the others grow in logarithmic steps (T5, Raffel et al. 2020, section 2.1)."""
    side, exact = BUCKETS // 2, BUCKETS // 4
    far = abs(distance)
    if far >= exact:
        steps = math.log(far / exact) / math.log(FURTHEST / exact) * (side - exact)
        far = min(exact + int(steps), side - 1)
    return far + side * (distance > 0)


def mpnet(spec: ModelFacts, builder: LayerBuilder) -> Bert:
    places = [bucket(distance) for distance in range(-FURTHEST, FURTHEST + 1)]
    encoder = builder.at("mpnet", "").at("encoder")
    attention = partial(
        GroupedQueryAttention,
        scope="attention",
        qkv=("attn.q", "attn.k", "attn.v"),
        o="attn.o",
        distances=encoder.distances("relative_attention_bias", BUCKETS, spec.num_heads, places),
    )
    norms = ("attention.LayerNorm", "output.LayerNorm")
    layer = partial(NormedSumLayer, attention=attention, feed=bert_mlp, norms=norms)
    return Bert(spec, builder, "mpnet", layer, positions)


def positions(spec: ModelFacts, builder: LayerBuilder) -> PositionTable:
    rows, skipped = spec.max_position_embeddings, spec.skipped_positions
    table = builder.at("embeddings")
    return table.embedding("position_embeddings", rows, spec.hidden_size, skipped=skipped)


DistilBertLayer = partial(
    NormedSumLayer,
    attention=partial(
        GroupedQueryAttention, scope="attention", qkv=("q_lin", "k_lin", "v_lin"), o="out_lin"
    ),
    feed=partial(plain_mlp, up="lin1", down="lin2", scope="ffn"),
    norms=("sa_layer_norm", "output_layer_norm"),
)
distilbert = partial(
    Bert,
    scope="distilbert",
    make_layer=DistilBertLayer,
    make_positions=positions,
    layers="transformer.layer",
)


def electra_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    size = fields.integer("embedding_size", 1, MAX_WIDTH, 128)
    if size != hidden:
        raise fields.error("embedding_size", f"must be hidden_size, {hidden}, not {size}")
    return encoder_layers(fields, layers, positions)


def mpnet_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    buckets = fields.integer("relative_attention_num_buckets", 1, 1 << 16, BUCKETS)
    if buckets != BUCKETS:
        reason = f"must be {BUCKETS}, not {buckets}"
        raise fields.error("relative_attention_num_buckets", reason)
    return tuple(
        replace(layer, distances=True) for layer in encoder_layers(fields, layers, positions)
    )


def bert_classifier(
    fields: Fields,
    hidden: int,
    eps: float,
    dense: str = "bert.pooler.dense",
    out: str = "",
    function: str = "tanh",
) -> PoolingSpec:
    """Return the head of a classifier.

    Args:
        dense, function: name and activation of its first layer.
        out: name of the last layer in "classifier".
    """
    labels = len(read_labels(fields))
    first = PooledLayer(dense, hidden, hidden, function=function)
    return classifier(fields, "cls", first, PooledLayer(f"classifier{out}", hidden, labels))


roberta_classifier = partial(bert_classifier, dense="classifier.dense", out=".out_proj")


_encoder = partial(
    Architecture,
    layers=encoder_layers,
    activations=("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    rms_norm=False,
    gated_mlp=False,
    rotary=False,
    keys={"rms_norm_eps": "layer_norm_eps"},
    fixed={"is_decoder": False, "add_cross_attention": False},
)
_bert = partial(_encoder, make=Bert, defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2})
_roberta = partial(
    _encoder,
    make=partial(Bert, scope="roberta"),
    skips_padding=True,
    defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2},
)
BERT = _bert(
    "BertModel",
    "bert",
    "BERT, for embeddings",
    pooled=mean_vectors,
    # Files of RoBERTa and XLM-RoBERTa have the same name; their positions begin with the first row.
    gguf="bert",
    gguf_names={
        "token_embd": "embeddings.word_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "blk": "encoder.layer",
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
        "cls": "classifier.dense",
        "cls.output": "classifier.out_proj",
    },
)
BERT_MASKED = _bert("BertForMaskedLM", "bert", "BERT, for embeddings", pooled=mean_vectors)
BERT_CLASSIFIER = _bert(
    "BertForSequenceClassification", "bert", "BERT, for classes", pooled=bert_classifier
)
ROBERTA = _roberta("RobertaModel", "roberta", "RoBERTa, for embeddings", pooled=mean_vectors)
ROBERTA_MASKED = replace(ROBERTA, name="RobertaForMaskedLM")
ROBERTA_CLASSIFIER = _roberta(
    "RobertaForSequenceClassification",
    "roberta",
    "RoBERTa, for classes",
    pooled=roberta_classifier,
)
XLM_ROBERTA = _roberta(
    "XLMRobertaModel", "xlm-roberta", "XLM-RoBERTa, for embeddings", pooled=mean_vectors
)
XLM_ROBERTA_MASKED = replace(XLM_ROBERTA, name="XLMRobertaForMaskedLM")
XLM_ROBERTA_CLASSIFIER = _roberta(
    "XLMRobertaForSequenceClassification",
    "xlm-roberta",
    "XLM-RoBERTa, for classes",
    pooled=roberta_classifier,
)
MPNET = _encoder(
    "MPNetModel",
    "mpnet",
    "MPNet, for embeddings",
    make=mpnet,
    layers=mpnet_layers,
    pooled=mean_vectors,
    skips_padding=True,
    defaults={"layer_norm_eps": 1e-12},
)
MPNET_MASKED = replace(MPNET, name="MPNetForMaskedLM")
MPNET_CLASSIFIER = replace(
    MPNET,
    name="MPNetForSequenceClassification",
    models="MPNet, for classes",
    pooled=roberta_classifier,
)
CAMEMBERT = replace(ROBERTA, name="CamembertModel", model_type="camembert", models="CamemBERT")
CAMEMBERT_MASKED = replace(CAMEMBERT, name="CamembertForMaskedLM")
CAMEMBERT_CLASSIFIER = replace(
    ROBERTA_CLASSIFIER,
    name="CamembertForSequenceClassification",
    model_type="camembert",
    models="CamemBERT, for classes",
)
ELECTRA = _bert(
    "ElectraModel",
    "electra",
    "ELECTRA",
    make=partial(Bert, scope="electra"),
    layers=electra_layers,
    pooled=mean_vectors,
)
ELECTRA_CLASSIFIER = replace(
    ELECTRA,
    name="ElectraForSequenceClassification",
    models="ELECTRA, for classes",
    pooled=partial(bert_classifier, dense="classifier.dense", out=".out_proj", function="gelu"),
)
DISTILBERT = _encoder(
    "DistilBertModel",
    "distilbert",
    "DistilBERT, for embeddings",
    make=distilbert,
    pooled=mean_vectors,
    keys={
        "rms_norm_eps": "layer_norm_eps",
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    },
    defaults={"layer_norm_eps": 1e-12},
)
DISTILBERT_MASKED = replace(DISTILBERT, name="DistilBertForMaskedLM")
DISTILBERT_CLASSIFIER = replace(
    DISTILBERT,
    name="DistilBertForSequenceClassification",
    models="DistilBERT, for classes",
    pooled=partial(bert_classifier, dense="pre_classifier", function="relu"),
)

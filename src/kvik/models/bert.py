"""BERT (Devlin et al. 2018, arXiv 1810.04805), RoBERTa (Liu et al. 2019, arXiv 1907.11692) and
XLM-RoBERTa (Conneau et al. 2019, arXiv 1911.02116): encoders with learned positions, which
normalise after attention and MLP.

RoBERTa's positions begin after the row of the padding token, and it has one token type. In a
classifier, the vector of the first token is mapped to the labels through a dense layer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.decoder import Decoder, GroupedQueryAttention, NormedSumLayer, plain_mlp
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import encoder_layers
from kvik.spec.model import ModelFacts
from kvik.spec.network import PositionTable
from kvik.spec.pooling import PooledLayer, PoolingSpec, classifier, mean_vectors, read_labels

BertLayer = partial(
    NormedSumLayer,
    attention=partial(
        GroupedQueryAttention,
        scope="attention",
        qkv=("self.query", "self.key", "self.value"),
        o="output.dense",
    ),
    feed=partial(plain_mlp, up="intermediate.dense", down="output.dense", scope=""),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)


class Bert(Decoder):
    """The encoder.

    Args:
        scope: of all names, in checkpoints that have one.
    """

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, scope: str = "bert") -> None:
        builder.skip("cls", "lm_head", "classifier")  # heads for other tasks
        trunk = builder.at(scope, "")
        trunk.skip("pooler")
        trunk.at("embeddings").ignore("position_ids", "token_type_ids")
        super().__init__(
            spec,
            builder,
            BertLayer,
            scopes=(scope, ""),
            names=("embeddings.word_embeddings", "encoder.layer", "", ""),
            make_positions=positions_and_types,
            embed_norm="embeddings.LayerNorm",
        )


def positions_and_types(spec: ModelFacts, builder: LayerBuilder) -> PositionTable:
    return builder.at("embeddings").embedding(
        "position_embeddings",
        spec.max_position_embeddings,
        spec.hidden_size,
        skipped=spec.skipped_positions,
        types=("token_type_embeddings", spec.token_types),
    )


def bert_classifier(
    fields: Fields, hidden: int, eps: float, dense: str = "bert.pooler.dense", out: str = ""
) -> PoolingSpec:
    """Return the head of a classifier.

    Args:
        dense, out: names of its first layer, and of the last one in "classifier".
    """
    labels = len(read_labels(fields))
    first = PooledLayer(dense, hidden, hidden, function="tanh")
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
BERT = _bert("BertModel", "bert", "BERT, for embeddings", pooled=mean_vectors)
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

"""The architectures that kvik runs: one row each, from the file of its network."""

from __future__ import annotations

from collections.abc import Mapping

from kvik.models.bert import (
    BERT,
    BERT_MASKED,
    BERT_SCORES,
    ROBERTA,
    ROBERTA_SCORES,
    XLM_ROBERTA,
    XLM_ROBERTA_SCORES,
)
from kvik.models.cohere import COHERE, COHERE2
from kvik.models.deepseek import DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE
from kvik.models.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from kvik.models.falcon import FALCON
from kvik.models.gemma import EMBEDDING_GEMMA, GEMMA, GEMMA2, GEMMA3, GEMMA3_IMAGES
from kvik.models.gemma4 import GEMMA4, GEMMA4_IMAGES
from kvik.models.glm4 import GLM, GLM4, GLM4_MOE
from kvik.models.gpt2 import GPT2_MODEL
from kvik.models.gpt_neox import GPT_NEO, GPT_NEOX, GPTJ
from kvik.models.gpt_oss import GPT_OSS
from kvik.models.granite import GRANITE, GRANITE4, GRANITE_MOE
from kvik.models.lfm2 import LFM2, LFM2_MOE
from kvik.models.llama import (
    LLAMA,
    MIMO,
    MINISTRAL3,
    MISTRAL,
    MISTRAL3_IMAGES,
    QWEN2,
    SEED_OSS,
    SMOLLM3,
)
from kvik.models.llama4 import LLAMA4, LLAMA4_IMAGES
from kvik.models.mixtral import MINIMAX_M2, MIXTRAL
from kvik.models.modernbert import MODERNBERT, MODERNBERT_MASKED, MODERNBERT_SCORES
from kvik.models.nemotron import ARCEE, NEMOTRON
from kvik.models.olmo2 import EXAONE4, OLMO2, OLMO3, OLMOE
from kvik.models.opt import OPT
from kvik.models.phi import PHI, PHI3, PHIMOE, PHIMOE_ORIGINAL
from kvik.models.qwen3 import QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_SCORES
from kvik.models.qwen3_5 import (
    QWEN3_5,
    QWEN3_5_IMAGES,
    QWEN3_5_MOE,
    QWEN3_5_MOE_IMAGES,
    QWEN3_NEXT,
)
from kvik.models.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from kvik.models.stablelm import STABLELM
from kvik.models.starcoder2 import STARCODER2
from kvik.spec.declare import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    row.name: row
    for row in (
        *(LLAMA, MISTRAL, MINISTRAL3, MISTRAL3_IMAGES, QWEN2, QWEN3, SMOLLM3, STABLELM, PHI3, GLM4),
        *(QWEN2_MOE, QWEN3_NEXT, QWEN3_5_MOE, QWEN3_5_MOE_IMAGES),
        *(MIXTRAL, QWEN3_MOE, OLMOE, GRANITE_MOE, GLM4_MOE, MINIMAX_M2, GPT_OSS),
        *(LLAMA4, LLAMA4_IMAGES),
        *(DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE, PHIMOE, PHIMOE_ORIGINAL),
        *(LFM2_MOE, ERNIE4_5, ERNIE4_5_MOE, NEMOTRON, ARCEE, GLM),
        *(QWEN2_VL, QWEN2_5_VL, QWEN3_VL, MIMO, GPT_NEO, GPTJ),
        *(
            GEMMA,
            GEMMA2,
            GEMMA3,
            GEMMA3_IMAGES,
            GEMMA4,
            GEMMA4_IMAGES,
            GRANITE,
            GRANITE4,
            OLMO2,
            OLMO3,
            EXAONE4,
            COHERE,
            COHERE2,
            SEED_OSS,
            STARCODER2,
            GPT_NEOX,
            PHI,
            FALCON,
            OPT,
            LFM2,
            QWEN3_5,
            QWEN3_5_IMAGES,
            GPT2_MODEL,
        ),
        *(BERT, BERT_MASKED, BERT_SCORES, ROBERTA, ROBERTA_SCORES),
        *(XLM_ROBERTA, XLM_ROBERTA_SCORES, MODERNBERT, MODERNBERT_MASKED, MODERNBERT_SCORES),
        *(EMBEDDING_GEMMA, QWEN3_SCORES),
    )
}

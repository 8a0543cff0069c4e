"""The architectures that kvik runs: the rows of each file of networks."""

from __future__ import annotations

from collections.abc import Mapping

from kvik.models import (
    afmoe,
    apertus,
    bailing_hybrid,
    bamba,
    bert,
    bitnet,
    bloom,
    cohere,
    dbrx,
    deepseek,
    ernie4_5,
    falcon,
    falcon_h1,
    flint,
    gemma,
    gemma3n,
    gemma4,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    hy4,
    jamba,
    kimi_linear,
    kolibri1,
    laguna,
    lfm2,
    llama,
    llama4,
    mamba,
    mimo_v2,
    minicpm,
    minimax_m3,
    mixtral,
    modernbert,
    mpt,
    nemotron,
    nemotron_h,
    olmo2,
    olmo_hybrid,
    opt,
    persimmon,
    phi,
    pure_mamba2,
    qwen3,
    qwen3_5,
    qwen_vl,
    stablelm,
    starcoder2,
    step3p7,
)
from kvik.spec.declare import Architecture

FILES = (
    *(llama, qwen3, stablelm, phi, glm4, qwen3_5, mixtral, olmo2, granite, gpt_oss, llama4),
    *(deepseek, lfm2, ernie4_5, nemotron, nemotron_h, qwen_vl, gpt_neox, gemma, gemma4, cohere),
    *(afmoe, apertus, bamba, hunyuan, minicpm, starcoder2, falcon, opt, gpt2, bert, modernbert),
    *(gemma3n, olmo_hybrid, falcon_h1, kimi_linear, laguna, kolibri1, persimmon, pure_mamba2),
    *(mamba, jamba, mimo_v2, flint, dbrx, bitnet, bloom, mpt, hy4, minimax_m3, bailing_hybrid),
    step3p7,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    row.name: row for file in FILES for row in vars(file).values() if isinstance(row, Architecture)
}

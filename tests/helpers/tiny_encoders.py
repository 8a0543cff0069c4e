"""Tiny random encoders and rerankers made by transformers, with a tokenizer of words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [f"w{i}" for i in range(90)]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
ROBERTA = {"max_position_embeddings": 130, "pad_token_id": 1, "type_vocab_size": 1}
DISTIL = {"dim": 32, "hidden_dim": 56, "n_layers": 3, "n_heads": 2}
MPNET = {"max_position_embeddings": 130, "pad_token_id": 1}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
MODERN = {
    **SPECIAL_TOKENS,
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 2,
    "local_attention": 11,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
EMBEDDING_GEMMA = {
    "head_dim": 16,
    "num_key_value_heads": 1,
    "sliding_window": 11,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "query_pre_attn_scalar": 20,
    "use_bidirectional_attention": True,
}
# Class of a model -> its configuration beyond `SIZES`.
ENCODERS: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "BertForMaskedLM": {},
    "RobertaModel": ROBERTA,
    "RobertaForMaskedLM": ROBERTA,
    "XLMRobertaModel": ROBERTA,
    "XLMRobertaForMaskedLM": ROBERTA,
    "CamembertModel": ROBERTA,
    "CamembertForMaskedLM": ROBERTA,
    "DistilBertModel": DISTIL,
    "DistilBertForMaskedLM": DISTIL,
    "ElectraModel": {},
    "MPNetModel": MPNET,
    "MPNetForMaskedLM": MPNET,
    "NomicBertModel": {},
    "NomicBertForMaskedLM": {},
    "JinaEmbeddingsV3Model": {"pad_token_id": 1},
    "JinaEmbeddingsV3ForMaskedLM": {"pad_token_id": 1},
    "EuroBertModel": {**SPECIAL_TOKENS, "num_key_value_heads": 1},
    "EuroBertForMaskedLM": SPECIAL_TOKENS,
    "GteModel": {},
    "GteForMaskedLM": {"type_vocab_size": 0},
    "ModernBertModel": MODERN,
    "ModernBertForMaskedLM": MODERN,
    "Gemma3TextModel": EMBEDDING_GEMMA,
}
RERANKERS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {},
    "RobertaForSequenceClassification": ROBERTA,
    "XLMRobertaForSequenceClassification": ROBERTA,
    "CamembertForSequenceClassification": ROBERTA,
    "DistilBertForSequenceClassification": DISTIL,
    "ElectraForSequenceClassification": {},
    "MPNetForSequenceClassification": MPNET,
    "GteForSequenceClassification": {},
    "ModernBertForSequenceClassification": MODERN | {"classifier_pooling": "mean"},
}
# The same with several labels, and decoders of several families.
CLASSIFIERS: dict[str, dict[str, Any]] = RERANKERS | {
    "LlamaForSequenceClassification": {"num_key_value_heads": 1},
    "Qwen3ForSequenceClassification": {"num_key_value_heads": 1, "head_dim": 16},
    "GPT2ForSequenceClassification": {"n_inner": 56, "bos_token_id": 2, "eos_token_id": 3},
    "PhiForSequenceClassification": {},
}
_KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")


def save_encoder(folder: Path, name: str, *, seed: int = 0, **options: Any) -> Any:
    """Make a tiny random model of a transformers class, and save it to a folder."""
    family = next(name.removesuffix(kind) for kind in _KINDS if name.endswith(kind))
    facts = SIZES | ENCODERS.get(name, {}) | CLASSIFIERS.get(name, {}) | options
    if name in CLASSIFIERS:
        facts.setdefault("num_labels", 1)
    if family == "Electra":
        facts["embedding_size"] = facts["hidden_size"]
    config = getattr(transformers, f"{family}Config")(**facts)
    model = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            gain = parameter.dim() == 1 and parameter_name.endswith("weight")
            parameter.normal_(1.0 if gain else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return model


def hidden_states(model: Any, ids: list[int]) -> torch.Tensor:
    """The last hidden states of transformers, [tokens, hidden]."""
    mask = torch.ones(1, len(ids), dtype=torch.long)
    with torch.inference_mode():
        found = model.base_model(torch.tensor([ids]), attention_mask=mask)
    return found.last_hidden_state[0]


def word_tokenizer(*, typed: bool = True) -> Tokenizer:
    """Return a tokenizer of the words w0, w1 and so on.

    Args:
        typed: the second text of a pair has type 1, as in BERT; else two separators are between the
            texts, as in RoBERTa.
    """
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if typed else "[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def save_tokenizer(folder: Path, *, typed: bool = True) -> None:
    word_tokenizer(typed=typed).save(str(folder / "tokenizer.json"))


def words(length: int, seed: int = 0) -> str:
    """Return a text of `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(0, 90, (length,), generator=generator).tolist())


def save_modules(
    folder: Path,
    pooling: str,
    dense: Sequence[tuple[int, int]] = (),
    *,
    normalise: bool = False,
    **sentences: Any,
) -> list[torch.nn.Linear]:
    """Write the modules of sentence-transformers after a network, with random dense layers.

    Args:
        pooling: its name in their file.
        dense: inputs and outputs of each dense layer, without activation.
        sentences: content of config_sentence_transformers.json.
    """
    base = "sentence_transformers.models"
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalise]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{base}.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir()
    facts = {"word_embedding_dimension": 32, f"pooling_mode_{pooling}": True}
    (folder / paths[1] / "config.json").write_text(json.dumps(facts))
    layers = []
    for path, (inputs, outputs) in zip(paths[2:], dense, strict=False):
        torch.manual_seed(inputs)
        layer = torch.nn.Linear(inputs, outputs)
        facts = {
            "in_features": inputs,
            "out_features": outputs,
            "bias": True,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        (folder / path / "config.json").write_text(json.dumps(facts))
        tensors = {f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}
        save_file(tensors, folder / path / "model.safetensors")
        layers.append(layer)
    if sentences:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(sentences))
    return layers


def save_judge(folder: Path, yes: int, no: int) -> None:
    """Write modules that score by the logits of two tokens."""
    base = "sentence_transformers"
    modules = [
        {"path": "", "type": f"{base}.base.modules.transformer.Transformer"},
        {"path": "1_LogitScore", "type": f"{base}.cross_encoder.modules.logit_score.LogitScore"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    tokens = {"true_token_id": yes, "false_token_id": no}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))


def change_config(folder: Path, **facts: Any) -> None:
    """Change keys of config.json, or remove those that are None."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | facts
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

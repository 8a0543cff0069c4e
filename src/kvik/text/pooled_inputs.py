"""Prepares texts to embed and pairs of texts to score, in the format of the model's training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvik.errors import ParamError, shown
from kvik.spec.pooling import PoolingSpec
from kvik.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Format of Qwen3-Reranker (Zhang et al. 2025, arXiv 2506.05176), which answers with yes or no.
QWEN3_TASK = "Judge whether the Document meets the requirements based on the Query"
QWEN3_JUDGE = (
    f"<|im_start|>system\n{QWEN3_TASK} and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
QWEN3_PAIR = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"
QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class PooledInput:
    """A prompt to embed or score."""

    ids: list[int]  # of its tokens
    second_text: int = 0  # see `EngineRequest`


def prompt_before(pooling: PoolingSpec | None, name: str | None) -> str:
    """Return the prompt to put before a text to embed.

    Args:
        name: of one of the model's prompts; None: the default one, if any.

    Raises:
        ParamError: the model has no such prompt.
    """
    prompts = dict(pooling.prompts) if pooling is not None else {}
    if name is None:
        return prompts.get(pooling.default_prompt, "") if pooling is not None else ""
    if name not in prompts:
        choices = f"one of {', '.join(prompts)}" if prompts else "left out: this model has none"
        raise ParamError("prompt_name", f"must be {choices}, not {shown(name)}")
    return prompts[name]


def text_input(
    tokenizer: Tokenizer,
    text: str,
    *,
    pooling: PoolingSpec | None,
    limit: int | None,
    special: bool = True,
) -> PooledInput:
    """Tokenise a text to embed.

    Args:
        limit: tokens to keep: special ones and the beginning of the text; or, for models without
            pooling facts, its end, as for prompts to complete; None: all.
        special: add special tokens.
    """
    if pooling is None and limit is not None:
        return ids_input(pooling, tokenizer.encode(text, special), limit)
    return PooledInput(tokenizer.encode_texts((text,), limit, special=special)[0])


def ids_input(pooling: PoolingSpec | None, ids: list[int], limit: int | None) -> PooledInput:
    """Return token ids to embed; for `limit` see `text_input`."""
    if limit is None:
        return PooledInput(ids)
    return PooledInput(ids[-limit:] if pooling is None else ids[:limit])


def pair_input(
    tokenizer: Tokenizer,
    first: str,
    second: str,
    *,
    pooling: PoolingSpec,
    instruction: str | None,
    limit: int | None,
) -> PooledInput:
    """Tokenise a pair of texts to score, such as a query and a document.

    Args:
        instruction: what makes a pair a good match, for models that take one; None: their default.
        limit: tokens to keep, the longer text being cut at its end; None: all.

    Raises:
        ParamError: the model takes no instruction.
    """
    if pooling.template == "qwen3":
        template = tokenizer.chat_template or ""
        if "'document'" in template.replace('"', "'") and QWEN3_TASK not in template:
            raise ParamError(
                "model", "writes pairs with its own chat template, which kvik does not run"
            )
        prompts = dict(pooling.prompts)
        task = instruction or prompts.get(pooling.default_prompt) or INSTRUCTION
        start, end = tokenizer.encode(QWEN3_JUDGE, False), tokenizer.encode(QWEN3_END, False)
        pair = tokenizer.encode(QWEN3_PAIR.format(task, first, second), False)
        if limit is not None:
            pair = pair[: max(1, limit - len(start) - len(end))]
        return PooledInput([*start, *pair, *end])
    if instruction is not None:
        raise ParamError("instruction", "must be left out: this model reads none")
    first = prompt_before(pooling, None) + first
    return PooledInput(*tokenizer.encode_texts((first, second), limit))


WHATEVER_FITS = -1  # of `truncate_prompt_tokens`; the value is vLLM's


def truncation(requested: int | None, context: int, num_output: int = 0) -> int | None:
    """Return how many tokens of a prompt `truncate_prompt_tokens` keeps; None: all.

    Args:
        num_output: output tokens that must fit into the context after a prompt that is cut to
            `WHATEVER_FITS`.

    Raises:
        ParamError: it would keep no token, or more than fit into the context.
    """
    if requested == WHATEVER_FITS:
        return max(1, context - num_output)
    if requested is not None and not 1 <= requested <= context:
        allowed = f"must be {WHATEVER_FITS} or in [1, {context}] (max_model_len), not {requested}"
        raise ParamError("truncate_prompt_tokens", allowed)
    return requested


def check_dimensions(pooling: PoolingSpec | None, hidden: int, dimensions: int | None) -> None:
    """Raise ParamError if vectors of the model cannot be cut to the requested length."""
    spec = pooling or PoolingSpec("")
    if dimensions is not None and not spec.can_cut(dimensions, hidden):
        raise ParamError("dimensions", f"must be {spec.allowed(hidden)}, not {dimensions}")


def default_pooling(pooling: PoolingSpec | None) -> str:
    """Return the pooling of a request that names none."""
    return pooling.kind if pooling is not None and not pooling.scores else "mean"


def scoring(pooling: PoolingSpec | None) -> PoolingSpec:
    """Return the pooling of a reranker, which scores pairs; raise ParamError for other models."""
    if pooling is None or not pooling.scores:
        raise ParamError("model", "gives no scores: it is not a reranker")
    if len(pooling.labels) > 1:
        raise ParamError("model", f"gives {len(pooling.labels)} classes, and no single score")
    return pooling


def classifying(pooling: PoolingSpec | None) -> PoolingSpec:
    """Return the pooling of a classifier; raise ParamError for other models."""
    if pooling is None or not pooling.labels:
        raise ParamError("model", "gives no classes: it is no classifier")
    return pooling


def check_text(value: object) -> str:
    """Return a text of a pair; raise ParamError if it is anything else, such as token ids."""
    if not isinstance(value, str):
        raise ParamError("prompt", "must be a text if there is a second one")
    return value


def paired(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of texts: a single first text with each second one, or both in parallel.

    Raises:
        ParamError: there are several first texts, and another number of second ones.
    """
    if len(first) == 1:
        return [(first[0], text) for text in second]
    if len(first) != len(second):
        raise ParamError(
            "text_2", f"must have as many texts as text_1 ({len(first)}), not {len(second)}"
        )
    return list(zip(first, second, strict=True))

"""The routes of the OpenAI API, and of the tokenizer beside it."""

from __future__ import annotations

from functools import partial

from kvik.server.openai.answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    Embeddings,
    Model,
    Models,
    Tokenized,
    TokenizerInfo,
)
from kvik.server.openai.chat import chat
from kvik.server.openai.chat_request import ChatRequest
from kvik.server.openai.completion_request import CompletionRequest
from kvik.server.openai.completions import completions
from kvik.server.openai.embedding_request import EmbeddingRequest
from kvik.server.openai.embeddings import embeddings
from kvik.server.openai.invocations import Invocation, invocations
from kvik.server.openai.models import model, models
from kvik.server.openai.tokenize import detokenize, tokenize, tokenizer_info
from kvik.server.openai.tokenize_request import DetokenizeRequest, TokenizeRequest
from kvik.server.parts import Parts
from kvik.server.route import Route


def routes(parts: Parts) -> list[Route]:
    return [
        Route(
            "/v1/chat/completions",
            partial(chat, parts),
            body=ChatRequest,
            answer=ChatCompletion,
            note="Answer a conversation.",
        ),
        Route(
            "/v1/completions",
            partial(completions, parts),
            body=CompletionRequest,
            answer=Completion,
            note="Go on with texts.",
        ),
        Route(
            "/v1/embeddings",
            partial(embeddings, parts),
            body=EmbeddingRequest,
            answer=Embeddings,
            note="A vector for each text, pooled from hidden states.",
        ),
        Route(
            "/invocations",
            partial(invocations, parts),
            body=Invocation,
            note="Any of the three, as its body says.",
        ),
        Route(
            "/v1/models",
            partial(models, parts),
            method="GET",
            answer=Models,
            note="The model that is served.",
        ),
        Route(
            "/v1/models/{model:path}",
            partial(model, parts),
            method="GET",
            answer=Model,
            note="One model.",
        ),
        Route(
            "/tokenize",
            partial(tokenize, parts),
            body=TokenizeRequest,
            answer=Tokenized,
            note="Token ids of a text or a conversation.",
        ),
        Route(
            "/detokenize",
            partial(detokenize, parts),
            body=DetokenizeRequest,
            answer=Detokenized,
            note="Text of token ids.",
        ),
        Route(
            "/tokenizer_info",
            partial(tokenizer_info, parts),
            method="GET",
            answer=TokenizerInfo,
            note="Special tokens, chat template and sizes.",
        ),
    ]

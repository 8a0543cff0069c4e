"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvik.server.openai.fields import Name, Prompt

MAX_INPUTS = 2048


class EmbeddingRequest(Struct, kw_only=True):
    """Texts of which one vector each is wanted."""

    input: Prompt
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    pooling: (
        Annotated[
            Literal["mean", "last"], Meta(description="of the final hidden states; default mean")
        ]
        | None
    ) = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
    add_special_tokens: bool | None = None

    user: str | None = None
    metadata: Any = None

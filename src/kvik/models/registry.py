"""The architectures that kvik runs: one row each, from the file of its network."""

from __future__ import annotations

from collections.abc import Mapping

from kvik.models.gpt2 import GPT2_MODEL
from kvik.models.llama import LLAMA, MISTRAL, QWEN2
from kvik.models.olmo2 import OLMO2
from kvik.models.qwen3 import QWEN3
from kvik.spec.declare import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    row.name: row for row in (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GPT2_MODEL)
}

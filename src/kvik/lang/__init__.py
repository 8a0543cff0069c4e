"""Programs: Python functions that write a text together with a model.

A program gets a `State`, which it extends: by text, turns of a conversation, what the model
generates and what it selects. `run`, `run_batch` and `stream` run programs on an `LLM` or on a
`kvik serve` elsewhere (`docs/programs.md`).
"""

from kvik.lang.program import State, run, run_batch, stream

__all__ = ["State", "run", "run_batch", "stream"]

"""Programs: Python functions that write a text together with a model.

A program gets a `State` and extends it by text, turns of a conversation, generated text and
selected choices. `run`, `run_batch` and `stream` run programs on an `LLM` or on a remote
`kvik serve` (`docs/programs.md`).
"""

from kvik.lang.program import State, run, run_batch, stream

__all__ = ["State", "run", "run_batch", "stream"]

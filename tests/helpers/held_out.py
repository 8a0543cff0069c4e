"""A story that no model was trained on, to measure quality."""

from __future__ import annotations

from kvik.evaluate.windows import held_out_texts

(TEXT,) = held_out_texts()

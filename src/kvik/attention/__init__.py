"""Attention over the paged KV cache: one seam (`base.py`), several backends."""

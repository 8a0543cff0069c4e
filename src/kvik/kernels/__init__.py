"""Operations of a forward pass: one contract (`ops.py`), several implementations."""

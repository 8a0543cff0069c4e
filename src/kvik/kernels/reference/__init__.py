"""The plain-torch meaning of every operation. Clear rather than fast."""

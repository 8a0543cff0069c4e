"""The definition of every operation in plain torch. Clear rather than fast."""

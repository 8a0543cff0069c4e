"""Weight formats: how a linear layer is stored and multiplied."""

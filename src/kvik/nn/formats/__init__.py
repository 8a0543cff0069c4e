"""Weight formats: how checkpoints store linear layers."""

"""What a model should cost on a machine: memory, rooflines, money, advice."""

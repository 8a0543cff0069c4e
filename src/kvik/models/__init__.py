"""Architectures: one file each, written with the layers of `nn` and read like the paper."""

"""Triton kernels for GPUs: the rows of `Ops` and paged attention."""

"""At which sizes a decoding step is captured on a GPU, and what that takes."""

from __future__ import annotations

# What a driver keeps of a kernel in a captured graph: its arguments, its launch, and its place
# among the others. Not measured yet; a guess on the safe side.
BYTES_PER_KERNEL = 16 << 10
KERNELS_PER_LAYER, OTHER_KERNELS = 16, 32  # launched by one forward


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two up to 8, then multiples of it: above, padding adds an eighth at most on
    average, and weights are read once whatever the size."""
    sizes = {size for size in (1, 2, 4) if size < max_num_seqs}
    return (*sorted(sizes), *range(8, max_num_seqs, 8), max_num_seqs)


def graph_bytes(layers: int) -> int:
    """Of one captured forward, beside the memory that all share."""
    return (KERNELS_PER_LAYER * layers + OTHER_KERNELS) * BYTES_PER_KERNEL

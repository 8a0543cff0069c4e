"""Sizes of the tiles of matrix products, and the number of splits of their inputs. They depend only
on the kind of product, the class of the number of tokens and the shape, so that a row's sum has one
order in a class.

The numbers follow from counting instructions, registers and bytes in flight, for a GPU of about 132
processors that needs 24 to 32 KiB in flight on each to keep its memory busy. Those of few tokens
were chosen among about a dozen on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvik.kernels.triton.launch import ceil_div


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile of a product."""

    # outputs, tokens: per program.
    outputs: int
    tokens: int
    num_warps: int
    stages: int  # steps of 128 inputs that are loaded or being loaded
    # Most splits of the inputs; only for tiles that all tokens fit into, or two of them.
    splits: int = 1
    programs: int = 256  # inputs are split until there are this many


MIN_OUTPUTS = 32  # of a tile

# Few tokens: reading weights dominates the time. 64 outputs and 128 inputs of four bits are 4 KiB;
# each program has three such tiles in flight, and about six programs fit on a processor. Classes
# differ by the unused columns that tensor cores compute. Parts of sums are written and read once,
# 4 bytes per token, so with more tokens there are fewer splits, to limit these bytes.
FEW = (
    Tile(outputs=64, tokens=8, num_warps=4, stages=4, splits=16),
    Tile(outputs=64, tokens=16, num_warps=4, stages=4, splits=16),
    Tile(outputs=64, tokens=32, num_warps=4, stages=4, splits=8),
    Tile(outputs=64, tokens=64, num_warps=4, stages=3, splits=4),
)
# For four bits with zero points, instructions are nearly as scarce as bytes. So only two warps
# share the work other than unpacking (x, addresses, waiting), and there are more programs. Zero
# points are subtracted from the sums of this tile, which takes a second product; tiles with more
# columns, which leave no tensor cores idle, subtract them from weights.
FEW_INT4 = Tile(outputs=64, tokens=8, num_warps=2, stages=4, splits=16, programs=512)
# More tokens: their tiles read the same weights, from the L2 cache. There are counters for splits
# of two tiles of tokens.
SOME = Tile(outputs=64, tokens=64, num_warps=4, stages=3, splits=2)
MORE = Tile(outputs=64, tokens=64, num_warps=4, stages=4)
# Many tokens: the tensor cores dominate the time. 128 x 128 sums are 64 registers of 256 threads.
MANY = Tile(outputs=128, tokens=128, num_warps=8, stages=3)
# Kinds that need a second product of the same size (groups with minima), or registers for
# conversions (E4M3 as fp16), have half as many sums.
MANY_NARROW = Tile(outputs=128, tokens=64, num_warps=8, stages=3)
# fp32 is multiplied without tensor cores, with both factors in registers.
FEW_FP32 = Tile(outputs=MIN_OUTPUTS, tokens=8, num_warps=4, stages=2, splits=16)
MANY_FP32 = Tile(outputs=64, tokens=32, num_warps=8, stages=2)

# Weights in words are multiplied as they are by up to this many tokens. With more, it takes less
# time to widen them once and to multiply floats.
MAX_IN_WORDS = 256
# Memory for widened weights: a whole matrix of 14336 x 4096, or part of a larger one.
WIDENED_BYTES = 128 << 20

MIN_STEPS = 4  # of 128 inputs per split; shorter ones would mostly fill the pipeline


def tile_in_words(tokens: int, *, fp32: bool, narrow: bool, int4: bool) -> Tile:
    """Return the tile of a product with a weight in words; see `tile_for`."""
    if fp32 or narrow or not FEW[-1].tokens < tokens <= MAX_IN_WORDS:
        return tile_for(tokens, narrow=narrow, fp32=fp32, int4=int4)
    return SOME if tokens <= 2 * SOME.tokens else MORE


def tile_for(tokens: int, *, narrow: bool = False, fp32: bool = False, int4: bool = False) -> Tile:
    """Return the smallest tile that holds all tokens, or one that is repeated."""
    if fp32:
        return FEW_FP32 if tokens <= FEW_FP32.tokens else MANY_FP32
    if int4 and tokens <= FEW_INT4.tokens:
        return FEW_INT4
    for tile in FEW:
        if tokens <= tile.tokens:
            return tile
    return MANY_NARROW if narrow else MANY


def tile_of_experts(
    pairs: int, experts: int, *, narrow: bool = False, fp32: bool = False, int4: bool = False
) -> Tile:
    """Return the tile for the mean number of tokens per expert.

    Args:
        pairs: number of (token, expert) pairs.
    """
    return tile_for(ceil_div(pairs, experts), narrow=narrow, fp32=fp32, int4=int4)


def tokens_of_experts(experts: int, active: int) -> set[int]:
    """Return the largest number of tokens of each class in which experts have the same tile."""
    return {tile.tokens * experts // active for tile in FEW}


def splits_for(tile: Tile, rows: int, steps: int) -> int:
    """Return the number of splits, a power of two: enough to occupy the GPU, as long as splits have
    enough steps."""
    row_tiles = ceil_div(rows, tile.outputs)
    max_splits = min(tile.splits, steps // MIN_STEPS)
    splits = 1
    while 2 * splits <= max_splits and row_tiles * splits < tile.programs:
        splits *= 2
    return splits

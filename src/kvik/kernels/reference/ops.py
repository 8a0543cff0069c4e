"""The reference table: what every other implementation is tested against."""

from __future__ import annotations

from kvik.kernels.ops import Ops
from kvik.kernels.reference.activation import gelu_tanh, silu_and_mul
from kvik.kernels.reference.draw import draw, probabilities
from kvik.kernels.reference.kv_cache import copy_blocks, store_kv
from kvik.kernels.reference.linear import linear, matrix, matrix_rows, pack_rows
from kvik.kernels.reference.norm import layer_norm, rms_norm
from kvik.kernels.reference.penalties import penalize
from kvik.kernels.reference.rotary import rotary
from kvik.kernels.reference.rows import add, gather_rows, largest

REFERENCE = Ops(
    matrix=matrix,
    pack_rows=pack_rows,
    linear=linear,
    matrix_rows=matrix_rows,
    gather_rows=gather_rows,
    add=add,
    largest=largest,
    penalize=penalize,
    draw=draw,
    probabilities=probabilities,
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    rotary=rotary,
    silu_and_mul=silu_and_mul,
    gelu_tanh=gelu_tanh,
    store_kv=store_kv,
    copy_blocks=copy_blocks,
)

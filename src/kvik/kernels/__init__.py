"""Operations of a forward pass: one contract, several implementations.

`ops.py` is the contract, a row for each operation. `reference/` is its meaning in plain torch,
`torch_ops.py` the same with fewer calls. `weights.py` says what a weight means, `packing.py` how
matrices are stored in files, `rounding.py`, `fp8.py` and `kv_rounding.py` how numbers are rounded;
`upload.py` takes arrays of the host to a device.

`cpu/` calls the native kernels of `csrc/` and records them. `triton/` holds the kernels for GPUs, a
file for each idea: `draw.py` penalises and samples without sorting, `rotary.py` rotates, rounds and
stores K and V in one launch, `attention_paged.py` says which sequences take which attention kernel,
`attention_shapes.py` and `matrix_shapes.py` how work is divided.
"""

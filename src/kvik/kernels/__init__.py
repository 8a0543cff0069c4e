"""Operations of a forward pass: one contract, several implementations.

`ops.py` is the contract, with an entry for each operation. `reference/` defines each operation in
plain torch, `torch_ops.py` does the same with fewer calls. `weights.py` defines weights,
`packing.py` how matrices are stored in files, `rounding.py`, `fp8.py` and `kv_rounding.py` how
numbers are rounded; `upload.py` copies host arrays to a device. `cut_ops.py` divides matrices among
processes, which `torch_group.py` connects.

`cpu/` calls the native kernels of `csrc/` and records them. `triton/` holds the kernels for GPUs:
`draw.py` penalises and samples without sorting, `rotary.py` rotates, rounds and stores K and V in
one launch, `attention_paged.py` selects an attention kernel for each sequence,
`attention_shapes.py` and `matrix_shapes.py` define how work is divided.
"""

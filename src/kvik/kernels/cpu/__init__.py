"""Native kernels for CPUs (C++, `csrc/`), called for the operations of `Ops`."""

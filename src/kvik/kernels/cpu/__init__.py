"""Native kernels for CPUs (C++, `csrc/`): the rows of `Ops` and paged attention."""

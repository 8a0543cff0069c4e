"""One file per engine that `kvik bench compare` can run, and their shared protocol."""

"""The pure heart of the engine: standard library only, no clock, no I/O, no torch."""

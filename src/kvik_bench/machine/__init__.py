"""Measures the limits of this machine, for `kvik calibrate`."""

"""What this machine can do: `kvik calibrate`."""

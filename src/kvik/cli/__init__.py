"""The `kvik` command: `main.py` and one file per verb."""

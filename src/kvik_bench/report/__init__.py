"""What a benchmark found, and how it is shown."""

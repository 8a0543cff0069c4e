"""Compares kvik with other engines, each in a separate process."""

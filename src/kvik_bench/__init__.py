"""Measures what kvik costs: loads, clocks, comparisons, reports."""

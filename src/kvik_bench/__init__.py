"""What it does cost: loads, clocks, comparisons, reports."""

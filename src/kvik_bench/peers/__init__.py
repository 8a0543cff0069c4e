"""kvik beside other engines, each run in a process of its own."""

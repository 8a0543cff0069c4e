"""Benchmarks of an engine in this process, or in a fresh one."""

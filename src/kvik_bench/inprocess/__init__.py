"""Benchmarks of an engine in this process or a fresh one."""

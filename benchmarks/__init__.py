"""Benchmarks of elastane, each run as `python -m benchmarks.NAME`."""

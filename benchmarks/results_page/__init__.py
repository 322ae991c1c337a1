"""Writes docs/results.md and its pictures from the results: `python -m benchmarks.results_page`."""

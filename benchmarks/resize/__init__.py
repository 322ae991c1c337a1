"""How long workers wait when others come, go, die or hang: `python -m benchmarks.resize`."""

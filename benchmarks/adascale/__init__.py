"""AdaScale beside other rules on five tasks: `python -m benchmarks.adascale`."""

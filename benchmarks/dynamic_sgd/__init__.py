"""What a change of batch does under several ramps: `python -m benchmarks.dynamic_sgd`."""

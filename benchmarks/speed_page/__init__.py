"""The page on speed, made of the results of the benchmarks that time steps, loading and starts."""

"""Examples that run on real data from package registries."""

"""Chaos: workers and launcher of a real job come and go at random, and every sample is counted."""

"""Which rules keep an AdamW run's quality in larger batches, on a small language model."""

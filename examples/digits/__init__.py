"""The digits example: one schedule, tuned at batch 16, trained at batch 256 and 1,024."""

"""Elastane inside the training loops of other frameworks; each needs that framework."""

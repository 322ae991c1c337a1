"""Optimizers under every rule and a change of batch: whether they train, and resume to the bit."""

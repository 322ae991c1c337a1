"""Noise scale from one gradient a step, beside the truth and beside two gradients a step."""

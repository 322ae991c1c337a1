"""What a window leaves behind that is not to count: kept before it, put back after it.

Knows models and generators; nothing of windows, steps or workers.
"""

from __future__ import annotations

import torch
from torch import nn

from elastane.rng import rng_state, set_rng_state

__all__ = ["Rehearsal"]


class Rehearsal:
    """Remembers, when built, the buffers and random generators that a forward pass changes.

    A rehearsal is a whole window on real samples whose gradients are thrown away: it pays for all
    that a first step pays for, before other workers would have to wait for it.

    Args:
        model: whose buffers (such as running statistics) are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._device = next(model.parameters()).device
        self._rng = rng_state(rank=0, device=self._device)

    @torch.no_grad()
    def undo(self) -> None:
        """Put them back."""
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        set_rng_state(self._rng, rank=0, device=self._device)

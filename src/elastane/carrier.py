"""A few numbers that ride on a bucket of gradients, and are summed with it.

Knows tensors; nothing of what the numbers are, or of how a bucket is reduced.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MOST_ELEMENTS", "Carrier"]

MOST_ELEMENTS = 1 << 19
"""Longest bucket that is copied for the sake of a few numbers: 2 MB of float32."""


class Carrier:
    """A buffer for a bucket and a vector behind it. It is kept, so no step allocates one."""

    def __init__(self) -> None:
        self._buffer = self._numbers = torch.zeros(0)
        self.gradients = self._buffer
        """Where the bucket lies in what `load` returned."""
        self.vector: Tensor | None = None
        """What rides behind the bucket, in the bucket's precision; `None` if nothing does."""

    def takes(self, bucket: Tensor) -> bool:
        """Return whether a bucket is short and exact enough. All ranks answer alike."""
        exact = bucket.dtype in (torch.float32, torch.float64)
        return exact and bucket.numel() <= MOST_ELEMENTS

    def load(self, bucket: Tensor, vector: Tensor) -> Tensor:
        """Return both as one tensor, to be reduced in place of the bucket."""
        length, size = len(bucket), len(bucket) + len(vector)
        kept = self._buffer
        if (len(kept), kept.dtype, kept.device) != (size, bucket.dtype, bucket.device):
            self._buffer = bucket.new_empty(size)
            self.gradients, self._numbers = self._buffer.split([length, size - length])
        self.gradients.copy_(bucket)
        self.vector = self._numbers
        self.vector.copy_(vector)
        return self._buffer

    def unload(self) -> None:
        """Carry nothing, for now."""
        self.vector = None

"""What one rank tells of its training: what it saw, and what the library said of each step.

Knows a model's weights and a step's result; nothing of features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elastane import StepResult
from elastane.elastic.whole import gathered
from elastane.sharding import local_of

__all__ = ["Recorder", "weights_of"]


class Recorder:
    """Takes one rank's training down, as tensors, numbers and strings.

    Args:
        model: the bare module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._start = self._before = weights_of(model)
        self._seen: list[list[int]] = []
        self._windows: list[dict[str, Any]] = []

    @property
    def num_windows(self) -> int:
        """Windows that have ended."""
        return len(self._windows)

    @property
    def num_committed(self) -> int:
        """Windows that moved something."""
        return sum(not window["skipped"] for window in self._windows)

    def saw(self, indices: Tensor, *, weight: int) -> None:
        """Take a micro-batch down, unless it only keeps the others company."""
        if weight:
            self._seen.append(indices.tolist())

    def ended(self, result: StepResult, *, loss_scale: float) -> None:
        """Take the end of a window down."""
        now, moments = weights_of(self._model), result.moments
        self._windows.append(
            {
                "micro_batches": self._seen,
                "skipped": result.skipped,
                "moved": not torch.equal(now, self._before),
                "gain": result.gain,
                "moments": None if moments is None else (moments.variance, moments.sqr_norm),
                "grad_norm": result.grad_norm,
                "loss_scale": loss_scale,
            }
        )
        self._seen, self._before = [], now

    def finished(self) -> dict[str, Any]:
        """Return all that was taken down."""
        return {
            "windows": self._windows,
            "start": self._start,
            "weights": self._before,
            "num_held": sum(local_of(p).numel() for p in self._model.parameters()),
            "buffers": {n: b.double() for n, b in self._model.named_buffers() if b.ndim},
        }


def weights_of(model: nn.Module) -> Tensor:
    """Return a copy of all weights in one float64 vector; collective if the model is sharded."""
    whole = gathered(list(model.parameters()), keep=True)
    return torch.cat([parameter.double().reshape(-1) for parameter in whole])

"""The ways to tell the noise scale from one gradient a step, all on one trajectory.

Knows moments and the layers' norms; nothing of tasks or of what is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elastane.layers import LayerNorms
from elastane.noise import MomentAverage, Moments, noise_scale

__all__ = ["CANDIDATES", "Estimators", "Watched", "dot", "pair_moments"]

CANDIDATES = ("layers", "pair", "lag 2", "buffer")


def pair_moments(gradient: Tensor, other: Tensor, *, product: float, batch: int) -> Moments:
    """Return `s = B |g - g'|^2 / 2` and `mu^2 = g.g'`: two gradients as if at the same weights."""
    distance = dot(gradient, gradient) + dot(other, other) - 2 * product
    return Moments(variance=batch / 2 * distance, sqr_norm=product)


def dot(left: Tensor, right: Tensor) -> float:
    """Return the inner product, summed in float64."""
    return float(left.double() @ right.double())


@dataclass(kw_only=True)
class Estimators:
    """All candidates on one trajectory; each keeps what it needs of the past."""

    batch: int
    momentum: float
    smoothing: float
    averages: dict[str, MomentAverage] = field(
        default_factory=lambda: dict.fromkeys(CANDIDATES, MomentAverage())
    )
    _past: list[Tensor] = field(default_factory=list)
    _buffer: Tensor | None = None
    _weight: float = 0.0

    def see(self, gradient: Tensor, *, by_layers: Moments) -> None:
        """Take a step's gradient, and what its layers said."""
        self._take("layers", by_layers)
        for name, other in zip(("pair", "lag 2"), reversed(self._past), strict=False):
            self._take(name, self._paired(gradient, other, product=dot(gradient, other)))
        buffer = self._buffer
        if buffer is not None and self.momentum:
            product = dot(gradient, buffer) / self._weight
            self._take("buffer", self._paired(gradient, gradient, product=product))
        self._buffer = gradient if buffer is None else self.momentum * buffer + gradient
        self._weight = self.momentum * self._weight + 1
        self._past = [*self._past[-1:], gradient]

    def _paired(self, gradient: Tensor, other: Tensor, *, product: float) -> Moments:
        return pair_moments(gradient, other, product=product, batch=self.batch)

    def _take(self, name: str, moments: Moments) -> None:
        self.averages[name] = self.averages[name].updated(moments, smoothing=self.smoothing)

    def noise_scales(self) -> dict[str, float | None]:
        """Return each candidate's noise scale, `None` where it has none to tell."""
        read = {name: average.read() for name, average in self.averages.items()}
        return {name: None if one is None else noise_scale(one) for name, one in read.items()}


@dataclass(kw_only=True)
class Watched:
    """A model whose weights are one vector, its mean gradient, and what its layers say of it."""

    model: nn.Module

    def __post_init__(self) -> None:
        self._parameters = list(self.model.parameters())
        self._layers = LayerNorms(self.model)
        self.weights = torch.cat([one.detach().reshape(-1) for one in self._parameters])
        parts = self.weights.split([one.numel() for one in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.data = part.view_as(parameter)

    def gradient(self, inputs: Tensor, targets: Tensor, loss: Any) -> Tensor:
        """Return the gradient of the mean loss."""
        parts = torch.autograd.grad(loss(self.model(inputs), targets), self._parameters)
        return torch.cat([part.reshape(-1) for part in parts])

    def told(self, inputs: Tensor, targets: Tensor, loss: Any) -> tuple[Tensor, Moments]:
        """Return the gradient of the mean loss, and the moments that the layers tell."""
        self.model.zero_grad()
        with self._layers.watching():
            self._layers.begin(len(inputs))
            loss(self.model(inputs), targets).backward()
            told = self._layers.told([self._parameters], loss_scale=1.0, scale_of_gradients=1.0)
        moments = self._layers.moments([float(one) for one in told], batch_samples=len(inputs))
        assert moments is not None
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        return torch.cat([one.reshape(-1) for one in gradients]), moments[0]

"""The oracle's formulas on plain numbers: averages, gain, and the ramp after a change of batch.

Written from the mathematics alone; must not know elastane.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.oracle.job import BASE_BATCH

__all__ = ["Averages", "Ramp", "gain_of", "ramped"]

RAMP_STEPS_PER_RATIO = 8


@dataclass(slots=True)
class Averages:
    """Weighted sums of one group's raw moments, and the weight in them."""

    variance: float = 0.0
    sqr_norm: float = 0.0
    weight: float = 0.0

    def add(self, variance: float, sqr_norm: float, *, theta: float) -> None:
        """Take one more step's moments up, and forget the share `1 - theta` of the others."""
        self.variance = theta * self.variance + (1 - theta) * variance
        self.sqr_norm = theta * self.sqr_norm + (1 - theta) * sqr_norm
        self.weight = theta * self.weight + (1 - theta)


@dataclass(slots=True)
class Ramp:
    """How the factor gets to the rule's after a change of batch.

    `buffer` is what the velocity `u` of old gradients is multiplied by before the step.
    """

    batch: float = 0.0
    begin: float = 1.0
    applied: float = 1.0
    steps: int = 0
    length: float = 0.0
    buffer: float = 1.0


def gain_of(variance: float, sqr_norm: float, *, scale: float) -> float:
    """Return `r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2)` of moments clamped at zero."""
    sigma2, mu2 = max(variance, 0.0) / BASE_BATCH, max(sqr_norm, 0.0)
    return 1.0 if sigma2 == mu2 == 0 else (sigma2 + mu2) / (sigma2 / scale + mu2)


def ramped(ramp: Ramp, target: float, *, batch: float) -> float:
    """Return `f0 + min((t - t0) / T, 1) (rule - f0)` after a change of batch; a fall is at once.

    Where the factor grows by that, old gradients move the weights as far as before.
    """
    before, is_changed = ramp.applied, ramp.batch != 0 and batch != ramp.batch
    if is_changed:
        ratio = max(batch / ramp.batch, target / ramp.applied)
        ramp.length = 0.0 if target < ramp.applied else RAMP_STEPS_PER_RATIO * ratio
        ramp.begin, ramp.steps = ramp.applied, 0
    is_on_the_way = is_changed or 0 < ramp.length > ramp.steps - 1
    share = min(ramp.steps / ramp.length, 1.0) if ramp.length else 1.0
    ramp.batch, ramp.steps = batch, ramp.steps + 1
    ramp.applied = target if share == 1 else ramp.begin + share * (target - ramp.begin)
    grows = is_on_the_way and ramp.applied > before
    ramp.buffer = before / ramp.applied if grows else 1.0
    return ramp.applied

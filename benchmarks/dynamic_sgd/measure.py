"""What a change of batch did to the loss: how high it rose, and how long it stayed up.

Pure arithmetic on losses of a fixed held-out batch after each step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["WINDOW", "peak_ratio", "recover_steps", "running_means", "update_variances"]

WINDOW = 5
_LEVEL = 1.05


def running_means(losses: Sequence[float]) -> list[float]:
    """Return the means of each five losses that follow one another."""
    return [
        statistics.fmean(losses[i : i + WINDOW]) for i in range(max(len(losses) - WINDOW + 1, 1))
    ]


def peak_ratio(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the largest running mean after the change over the last one before it."""
    return max(running_means(after)) / running_means(before)[-1]


def recover_steps(before: Sequence[float], after: Sequence[float]) -> int:
    """Return how many steps after the change the running mean is back for good.

    Back is at most 5 % above the last one before the change. It is 0 where it never rose further,
    and the number of steps looked at where it had not come back by then.
    """
    level = _LEVEL * running_means(before)[-1]
    means = running_means(after)
    above = [place for place, mean in enumerate(means) if mean > level]
    if not above:
        return 0
    return len(after) if above[-1] == len(means) - 1 else above[-1] + WINDOW


def update_variances(
    factors: Sequence[float], *, ratio: float, momentum: float, velocity_kept: bool = False
) -> list[float]:
    """Return the variance of each update after a change over that before it, by the noise model.

    With white noise the buffer's variance is at first 1, or `1/k^2` where the buffer was divided,
    and `V <- mu^2 V + (1 - mu^2) / k` with each new gradient; an update's is `m^2 V`.

    Args:
        factors: `m`, of each step after the change, relative to that before.
        ratio: `k`, new batch over old.
        momentum: `mu`.
        velocity_kept: whether the buffer was divided by the ratio.
    """
    buffer = 1 / ratio**2 if velocity_kept else 1.0
    variances: list[float] = []
    for factor in factors:
        buffer = momentum**2 * buffer + (1 - momentum**2) / ratio
        variances.append(factor**2 * buffer)
    return variances

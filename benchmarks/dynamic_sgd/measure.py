"""What a change of batch did to the loss: how high it rose, and how long it stayed up.

Pure arithmetic on losses of a fixed held-out batch after each step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

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
    steps: Iterable[tuple[float, float]], *, ratio: float, momentum: float
) -> list[float]:
    """Return the variance of each update after a change over that before it, by the noise model.

    With white noise the buffer's variance is at first 1, and `V <- (mu c)^2 V + (1 - mu^2) / k`
    with each new gradient; an update's is `m^2 V`.

    Args:
        steps: `(m, c)` of each step after the change: the factor relative to that before, and what
            the buffer is multiplied by.
        ratio: `k`, new batch over old.
        momentum: `mu`.
    """
    buffer = 1.0
    variances: list[float] = []
    for factor, kept in steps:
        buffer = (momentum * kept) ** 2 * buffer + (1 - momentum**2) / ratio
        variances.append(factor**2 * buffer)
    return variances

"""What is made of the times: ratios of each round, their middle, and how sure it is.

Pure arithmetic; knows nothing of models or processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["interval_of_mean", "interval_of_median", "ratio_row"]

_RESAMPLES, _LEVEL = 2_000, 0.95
_WIDEST = 0.01


def interval_of_median(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the median, at 95 %.

    References:
        Efron, Bootstrap methods: another look at the jackknife (1979).
    """
    chosen = _resamples(len(values), seed=seed)
    return _interval(np.median(np.asarray(values)[chosen], axis=1))


def interval_of_mean(
    own: Sequence[float], other: Sequence[float], *, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of `sum own / sum other`, round by round drawn."""
    chosen = _resamples(len(own), seed=seed)
    return _interval(np.asarray(own)[chosen].sum(1) / np.asarray(other)[chosen].sum(1))


def _resamples(count: int, *, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(count, size=(_RESAMPLES, count))


def _interval(found: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(found, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def ratio_row(
    cpu: Sequence[float],
    wall: Sequence[float],
    *,
    plain_cpu: Sequence[float],
    plain_wall: Sequence[float],
) -> dict[str, Any]:
    """Return the ratios of a method's times to a plain step's.

    The median is over the rounds. `cpu_mean` is of all rounds together: where a round is shorter
    than from one measured step to the next, the median would see only those between.
    """
    ratios = [own / plain for own, plain in zip(cpu, plain_cpu, strict=True)]
    walls = [own / plain for own, plain in zip(wall, plain_wall, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else None
    q1, median, q3 = quartiles or (ratios[0],) * 3
    low, high = interval_of_median(ratios)
    mean_low, mean_high = interval_of_mean(cpu, plain_cpu)
    numbers = {
        "cpu_ratio": median,
        "cpu_mean": sum(cpu) / sum(plain_cpu),
        "cpu_q1": q1,
        "cpu_q3": q3,
        "cpu_low": low,
        "cpu_high": high,
        "cpu_mean_low": mean_low,
        "cpu_mean_high": mean_high,
        "wall_ratio": statistics.median(walls),
    }
    return {
        **{name: round(value, 4) for name, value in numbers.items()},
        "resolved": high - low < _WIDEST,
        "mean_resolved": mean_high - mean_low < _WIDEST,
        "rounds": len(ratios),
    }

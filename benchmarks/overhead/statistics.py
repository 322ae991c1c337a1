"""What is made of the times: ratios of each round, their median, and how sure it is.

Pure arithmetic; knows nothing of models or processes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["interval_of_median", "ratio_row"]

_RESAMPLES, _LEVEL = 2_000, 0.95
_WIDEST = 0.01


def interval_of_median(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the median, at 95 %.

    References:
        Efron, Bootstrap methods: another look at the jackknife (1979).
    """
    chooser = random.Random(seed)
    medians = sorted(
        statistics.median(chooser.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    cut = round((1 - _LEVEL) / 2 * _RESAMPLES)
    return medians[cut], medians[-cut - 1]


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
    return {
        "cpu_ratio": round(median, 4),
        "cpu_mean": round(sum(cpu) / sum(plain_cpu), 4),
        "cpu_q1": round(q1, 4),
        "cpu_q3": round(q3, 4),
        "cpu_low": round(low, 4),
        "cpu_high": round(high, 4),
        "resolved": high - low < _WIDEST,
        "wall_ratio": round(statistics.median(walls), 4),
        "rounds": len(ratios),
    }

"""Means and spreads for the tables' rows.

Knows numbers only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

__all__ = ["mean", "shown", "spread"]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of those values that there are, or `None`, to six digits."""
    known = [value for value in values if value is not None]
    return float(f"{statistics.fmean(known):.6g}") if known else None


def spread(values: Iterable[float | None]) -> float | None:
    """Return the standard deviation of a sample, `None` for fewer than two, to six digits."""
    known = [value for value in values if value is not None]
    return float(f"{statistics.stdev(known):.6g}") if len(known) > 1 else None


def shown(value: float | None) -> str:
    """Return a number as tables on the terminal have it.

    Example:
        >>> shown(0.123456), shown(None)
        ('0.1235', '-')
    """
    return "-" if value is None else f"{value:.4g}"

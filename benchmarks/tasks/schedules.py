"""Schedules of the tasks: multipliers of the learning rate by the part of a run that is done.

Know nothing of steps, rules or batches, so that one serves at every scale.
"""

from __future__ import annotations

import math

__all__ = ["cosine", "warm_cosine"]


def cosine(part: float) -> float:
    """Return `(1 + cos(pi * part)) / 2`: 1 at the start, 0 at the end and behind it."""
    return (1 + math.cos(math.pi * min(part, 1.0))) / 2


_WARM_PART = 0.03


def warm_cosine(part: float) -> float:
    """Return `cosine`, but rising in a straight line from 0 over the first 3 %."""
    return cosine(part) * min(part / _WARM_PART, 1.0) if part > 0 else 1e-3

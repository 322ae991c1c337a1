"""Schedules of the tasks: multipliers of the learning rate by the part of a run that is done.

Know nothing of steps, rules or batches, so that one serves at every scale.
"""

from __future__ import annotations

import math

__all__ = ["cosine"]


def cosine(part: float) -> float:
    """Return `(1 + cos(pi * part)) / 2`: 1 at the start, 0 at the end and behind it."""
    return (1 + math.cos(math.pi * min(part, 1.0))) / 2

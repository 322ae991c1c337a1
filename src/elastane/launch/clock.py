"""A clock for silence: it stands still while this process does, so nobody else is blamed for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["AwakeClock"]


class AwakeClock:
    """Seconds that this process has been awake; reading it more rarely than `gap_s` slows it.

    Args:
        gap_s: the most that it moves between two readings.
        source: the clock beneath.

    Example:
        >>> beneath = iter([0.0, 0.25, 60.25])
        >>> clock = AwakeClock(source=lambda: next(beneath))
        >>> clock.now(), clock.now()
        (0.25, 0.75)
    """

    def __init__(self, *, gap_s: float = 0.5, source: Callable[[], float] = time.monotonic) -> None:
        self._gap_s = gap_s
        self._source = source
        self._lock = threading.Lock()
        self._last = source()
        self._awake = 0.0

    def now(self) -> float:
        """Return the seconds so far."""
        with self._lock:
            present = self._source()
            self._awake += min(present - self._last, self._gap_s)
            self._last = present
            return self._awake

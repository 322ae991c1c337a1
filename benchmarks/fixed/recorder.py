"""Times methods of live objects, each without those that it calls, and takes its own price off.

Knows functions and clocks; nothing of what they do.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["BESIDE", "Recorder"]

BESIDE = " (beside the step)"
"""Ends the name of a part of which other threads did something."""

_CALLS, _REPEATS = 500, 15


class Recorder:
    """Adds up the time of the parts of a step.

    A part's time is that of its functions less that of other parts' functions which they called.
    What another thread does is kept apart. Each call's price is known from calls of a function
    that does nothing: what lies between the two looks at the clock counts to the part, the rest to
    the part that called.

    Args:
        clock: returns nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self._thread = threading.get_ident()
        self._frames: list[list[int]] = []
        self._totals: dict[str, list[int]] = {}
        self._inner_ns = self._outer_ns = 0.0
        self._calibrate()

    @property
    def call_ns(self) -> float:
        """What a timed call costs."""
        return self._inner_ns + self._outer_ns

    def timed(
        self, part: str, function: Callable[..., Any], *, whole: bool = False
    ) -> Callable[..., Any]:
        """Return a function that counts its time to a part.

        Args:
            part: name of the part.
            function: does the work.
            whole: whether the timed functions that it calls count to the part too.
        """
        frames, clock, thread = self._frames, self.clock, self._thread
        total = self._totals.setdefault(part, [0, 0, 0])  # nanoseconds, calls, calls inside

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return self._beside(part + BESIDE, function, *args, **kwargs)
            if frames and frames[-1][2]:
                return function(*args, **kwargs)
            frame = [0, 0, whole]  # nanoseconds and number of the calls inside
            frames.append(frame)
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent = clock() - began
                frames.pop()
                total[0] += spent - frame[0]
                total[1] += 1
                total[2] += frame[1]
                if frames:
                    frames[-1][0] += spent
                    frames[-1][1] += 1

        return call

    def _beside(self, part: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = self.clock()
        try:
            return function(*args, **kwargs)
        finally:
            spent = self.clock() - began
            total = self._totals.setdefault(part, [0, 0, 0])
            total[0] += spent
            total[1] += 1

    def timed_iterator(self, part: str, source: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator whose turns count to a part."""
        turn = self.timed(part, source.__next__)
        while True:
            try:
                value = turn()
            except StopIteration:
                return
            yield value

    def wrap(self, owner: object, part: str, *names: str, whole: bool = False) -> None:
        """Have an object's methods count to a part from now on."""
        for name in names:
            setattr(owner, name, self.timed(part, getattr(owner, name), whole=whole))

    def step(self, step_ns: int) -> dict[str, float]:
        """Return the microseconds of each part since the last call, and of the step.

        Args:
            step_ns: of the step, with all that timing cost.
        """
        parts: dict[str, float] = {}
        inside = 0.0
        for name, (spent, calls, called) in list(self._totals.items()):
            own = spent - self._inner_ns * calls - self._outer_ns * called
            if calls:
                parts[name] = own / 1e3
            if not name.endswith(BESIDE):
                step_ns -= round(self.call_ns * calls)
                inside += own
            self._totals[name][:] = 0, 0, 0
        return {**parts, "rest": (step_ns - inside) / 1e3, "step": step_ns / 1e3}

    def _calibrate(self) -> None:
        def nothing() -> None:
            pass

        call, total = self.timed("", nothing), self._totals[""]
        inner, both = [], []
        for _ in range(_REPEATS):
            plain_ns, wrapped_ns = self._ns_of_a_call(nothing), self._ns_of_a_call(call)
            inner.append(max(total[0] / _CALLS - plain_ns, 0.0))
            both.append(wrapped_ns - plain_ns)
            total[:] = 0, 0, 0
        self._inner_ns = statistics.median(inner)
        self._outer_ns = statistics.median(both) - self._inner_ns
        del self._totals[""]

    def _ns_of_a_call(self, function: Callable[[], None]) -> float:
        began = self.clock()
        for _ in range(_CALLS):
            function()
        return (self.clock() - began) / _CALLS

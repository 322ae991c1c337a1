"""Builds events and hands each to every sink.

Knows nothing of what the sinks do with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from elastane.errors import ArgumentError, describe
from elastane.telemetry.sink import Sink


class Telemetry:
    """Where a run's events go: to every sink, in order; with no sinks, nowhere at once.

    Args:
        sinks: The receivers. They are closed with this object.
        clock: Gives the time of an event in seconds since 1970.

    Example:
        >>> class Printer:
        ...     def write(self, event):
        ...         print(event)
        ...     def close(self):
        ...         print("closed")
        >>> with Telemetry([Printer()], clock=lambda: 12.5) as telemetry:
        ...     telemetry.emit("pause", reason="evaluation", seconds=3.0, step=100)
        {'event': 'pause', 'time': 12.5, 'reason': 'evaluation', 'seconds': 3.0, 'step': 100}
        closed
    """

    def __init__(self, sinks: Sequence[Sink], *, clock: Callable[[], float] = time.time) -> None:
        self._sinks = tuple(sinks)
        self._clock = clock

    @property
    def enabled(self) -> bool:
        """Whether anybody listens; if not, values need not be fetched from the device."""
        return bool(self._sinks)

    def emit(self, kind: str, /, **fields: object) -> None:
        """Hand one event to every sink.

        Args:
            kind: What happened; the kinds and their fields are listed in `elastane.telemetry`.
            **fields: Plain values: None, bool, int, float, str, and lists and dicts of them.

        Raises:
            ArgumentError: A field is called ``event`` or ``time``.
        """
        if not self._sinks:
            return
        for name in ("event", "time"):
            if name in fields:
                rule = f"this name holds the {'kind' if name == 'event' else 'time'} of an event"
                raise ArgumentError(
                    describe(name, fields[name], rule=rule, way_out="Rename the field.")
                )
        event = {"event": kind, "time": self._clock(), **fields}
        for sink in self._sinks:
            sink.write(event)

    def close(self) -> None:
        """Close every sink, also when closing one of them fails."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

"""Shows a run's progress on a terminal.

Knows which fields of a step a person wants to see; starts no thread and writes to no file.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from elastane.errors import check_whole

_REFRESH_S = 0.1
_WIDE_COLUMNS = 100  # on a narrower terminal the numbers take all the room, and the bar has none


class ProgressBar:
    """A bar of progress in base steps, with loss, learning rate, gain, workers, time left.

    The last step may be worth more than was left; the bar then ends at `num_steps` all the same.

    Writes nothing at all where the console is not a terminal. While it is shown, what is printed
    to a terminal appears above it.

    Args:
        num_steps: Length of the training in base steps.
        console: Where to draw; the terminal behind standard error by default.

    Raises:
        ArgumentError: `num_steps` is no whole number of at least 1.
    """

    def __init__(self, *, num_steps: int, console: Console | None = None) -> None:
        way_out = "Give the number of base steps of the whole training."
        self._num_steps = check_whole("num_steps", num_steps, at_least=1, way_out=way_out)
        self._console = Console(stderr=True) if console is None else console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._drawn_at = -math.inf
        self._closed = False

    def write(self, event: Mapping[str, object], /) -> None:
        """Move the bar if the event is a step; draw at most ten times a second."""
        if event["event"] != "step" or self._closed or not self._console.is_terminal:
            return
        completed = min(_as_float(event.get("progress")) or 0.0, self._num_steps)
        if self._progress is None:
            self._progress = _bar(self._console)
            # A resumed run starts in the middle; told as an update, it would count as speed.
            self._task = self._progress.add_task(
                "", total=self._num_steps, completed=int(completed), numbers=_numbers(event)
            )
            self._progress.start()
        now = time.monotonic()
        draw = now - self._drawn_at >= _REFRESH_S
        self._drawn_at = now if draw else self._drawn_at
        self._progress.update(
            self._task, completed=completed, numbers=_numbers(event), refresh=draw
        )

    def close(self) -> None:
        """Draw the last state and give the terminal back."""
        self._closed = True
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _bar(console: Console) -> Progress:
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8))
    return Progress(
        TextColumn("base step {task.completed:,.0f}/{task.total:,.0f}"),
        *([bar] if console.width >= _WIDE_COLUMNS else []),
        TextColumn("{task.percentage:3.0f}%"),
        # On a narrow terminal these shrink, and the time left stays whole.
        TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("left", table_column=Column(no_wrap=True, min_width=4)),
        console=console,
        auto_refresh=False,
        expand=True,
        # Rich would send standard output to this console even if it goes to a file or pipe.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )


def _numbers(event: Mapping[str, object]) -> str:
    loss, lr, gain = (_as_float(event.get(name)) for name in ("loss", "lr", "gain"))
    return (
        f"loss {_shown(loss, '.4f')} lr {_shown(lr, '.3g')} gain {_shown(gain, '.2f')} "
        f"workers {event.get('world_size', '–')}"
    )


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _as_float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None

"""What a plot needs to know of a run, taken from its events.

Knows the meaning of events; nothing of pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastane.telemetry import read_events
from elastane.telemetry.reader import folder_of

Event = Mapping[str, object]
Array = NDArray[np.float64]
METRIC_PREFIX = "metric_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity of one run, where it is known and finite; all three are ``(num_points,)``."""

    steps: Array
    progress: Array
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of membership. `pause_s` is None where it isn't known."""

    step: float
    progress: float
    world_size: int | None
    cause: str
    pause_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's events, sorted by what they are; void and skipped steps are not among `steps`."""

    name: str
    start: Event
    steps: Sequence[Event]
    evaluations: Sequence[Event]
    changes: Sequence[Change]
    num_skipped: int

    def series(self, field: str) -> Series:
        """Return a field of the steps."""
        return _series(self.steps, field=field)

    def metric(self, name: str) -> Series:
        """Return a metric of the evaluations, named without its prefix."""
        return _series(self.evaluations, field=METRIC_PREFIX + name)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that have a value, without their prefix, as they first appear."""
        names = (name for event in self.evaluations for name in event)
        known = dict.fromkeys(name for name in names if name.startswith(METRIC_PREFIX))
        bare = (name.removeprefix(METRIC_PREFIX) for name in known)
        return [name for name in bare if self.metric(name).values.size]


def read_runs(run_dirs: Sequence[str | PathLike[str]]) -> list[Run]:
    """Return the runs in these folders, each under the shortest name that tells it apart."""
    folders = run_folders(run_dirs)
    names = short_names([folder.resolve() for folder in folders])
    return [
        run_from_events(read_events(folder), name=name)
        for folder, name in zip(folders, names, strict=True)
    ]


def run_folders(run_dirs: Sequence[str | PathLike[str]]) -> list[Path]:
    """Return the folder of each run once; a run may be named by its file of events too.

    Example:
        >>> [str(folder) for folder in run_folders(["a", "b/events.jsonl", "./a", "b/"])]
        ['a', 'b']
    """
    folders: dict[Path, Path] = {}
    for folder in map(folder_of, run_dirs):
        folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or as many parts as it takes to tell them apart.

    Example:
        >>> short_names([Path("/runs/a/seed0"), Path("/runs/b/seed0")])
        ['a/seed0', 'b/seed0']
    """
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]


def run_from_events(events: Iterable[Event], *, name: str) -> Run:
    """Return the run that these events tell of."""
    everything = list(events)
    kept = _without_void_steps(everything)
    starts = [event for event in everything if event["event"] == "start"]
    return Run(
        name=name,
        start=starts[-1] if starts else {},
        steps=[event for event in kept if event["event"] == "step"],
        evaluations=[event for event in kept if event["event"] == "evaluation"],
        changes=[_change(event) for event in kept if event["event"] == "membership"],
        num_skipped=sum(_is_skipped(event) for event in everything),
    )


def number(event: Event, field: str) -> float:
    """Return a field as a float; NaN where it is missing, null or no number."""
    value = event.get(field)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _series(events: Sequence[Event], *, field: str) -> Series:
    rows = [(number(e, "step"), number(e, "progress"), number(e, field)) for e in events]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    table = table[np.isfinite(table).all(axis=1)]
    return Series(steps=table[:, 0], progress=table[:, 1], values=table[:, 2])


def _without_void_steps(events: Iterable[Event]) -> list[Event]:
    """Return the committed steps, evaluations and changes that later ones did not replace.

    A resumed run goes on from its checkpoint: step numbers come again, and what was written for
    them and after them the first time is void. The resume itself becomes a change.
    """
    kept: list[Event] = []
    last: Event = {}
    resumed: Event | None = None
    started = False
    for event in events:
        kind = event["event"]
        if kind == "start":
            resumed = event if started else None
            started = True
        elif kind == "step" and not _is_skipped(event) and "step" in event:
            if number(event, "step") <= number(last, "step"):
                kept = [old for old in kept if not _is_void(old, step=number(event, "step"))]
            if resumed is not None:
                kept.append(_resume(resumed, first=event))
                resumed = None
            kept.append(event)
            last = event
        elif kind in ("evaluation", "membership"):
            kept.append(event)
    return kept


def _is_skipped(event: Event) -> bool:
    return event["event"] == "step" and bool(event.get("skipped"))


def _is_void(old: Event, *, step: float) -> bool:
    """Whether an earlier event is of a past that `step`, coming again, has replaced."""
    if old["event"] == "membership":  # it may have come just before this step
        return number(old, "step") > step
    return number(old, "step") >= step


def _resume(start: Event, *, first: Event) -> Event:
    fields = {name: first.get(name) for name in ("step", "progress")}
    world_size = start.get("world_size")
    return {"event": "membership", "cause": "resumed", "world_size": world_size, **fields}


def _change(event: Event) -> Change:
    world_size, pause_s = number(event, "world_size"), number(event, "pause_s")
    return Change(
        step=number(event, "step"),
        progress=number(event, "progress"),
        world_size=int(world_size) if math.isfinite(world_size) else None,
        cause=str(event.get("cause", "changed")),
        pause_s=pause_s if math.isfinite(pause_s) else None,
    )

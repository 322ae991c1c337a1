"""Reads the events of a run folder.

Knows the file format, one JSON object a line; nothing of what the events mean.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from elastane.errors import ArgumentError, StateError, describe

EVENTS_NAME = "events.jsonl"


def read_events(run_dir: str | PathLike[str]) -> list[dict[str, object]]:
    """Return the events of a run, oldest first; a run that is still going on may be read too.

    A last line that was cut short (the writer was killed, or is writing) is left out.

    Args:
        run_dir: Folder of the run, which holds ``events.jsonl``.

    Raises:
        ArgumentError: The folder holds no ``events.jsonl``.
        StateError: A line other than the last is not a whole event.
    """
    path = Path(run_dir) / EVENTS_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        rule = f"holds no {EVENTS_NAME}"
        way_out = "Give the folder that the run was told to write to."
        raise ArgumentError(describe("run_dir", str(run_dir), rule=rule, way_out=way_out)) from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    events = [(number, parse_event(line)) for number, line in numbered]
    if events and events[-1][1] is None:
        events.pop()
    for number, event in events:
        if event is None:
            raise StateError(
                f"{path}, line {number}: not a whole event, though lines follow. "
                "Delete the line if you can do without it."
            )
    return [event for _, event in events if event is not None]


def parse_event(line: bytes) -> dict[str, object] | None:
    """Return the event on this line, or None if the line is not a whole one."""
    try:
        event = json.loads(line)
    except ValueError:  # both broken JSON and broken UTF-8
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    return event

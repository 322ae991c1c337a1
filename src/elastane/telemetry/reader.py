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
        run_dir: Folder of the run, which holds ``events.jsonl``, or the path of that file.

    Raises:
        ArgumentError: The folder holds no ``events.jsonl``.
        StateError: A line is no event, and isn't the beginning of one at the file's end either.
    """
    path = folder_of(run_dir) / EVENTS_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        rule = f"holds no {EVENTS_NAME}"
        way_out = "Give the folder that the run was told to write to."
        raise ArgumentError(describe("run_dir", str(run_dir), rule=rule, way_out=way_out)) from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    events = [(number, parse_event(line)) for number, line in numbered]
    # Whole lines end in a newline, so that one without it was cut short, if it is an event at all.
    if events and events[-1][1] is None and lines[-1].startswith(b"{"):
        events.pop()
    for number, event in events:
        if event is None:
            raise StateError(
                f"{path}, line {number}: not a whole event ({_beginning(lines[number - 1])}). "
                "Delete the line if you can do without it."
            )
    return [event for _, event in events if event is not None]


def folder_of(run_dir: str | PathLike[str]) -> Path:
    """Return the folder of a run that is named by its folder or by its file of events."""
    path = Path(run_dir)
    return path.parent if path.name == EVENTS_NAME and not path.is_dir() else path


def _beginning(line: bytes, *, num_letters: int = 30) -> str:
    """Return the first letters of a line that may hold anything, in one line of plain text."""
    text = line.decode(errors="replace")
    return ascii(text if len(text) <= num_letters else text[:num_letters] + "...")


def parse_event(line: bytes) -> dict[str, object] | None:
    """Return the event on this line, or None if the line is not a whole one."""
    try:
        event = json.loads(line)
    except ValueError:  # both broken JSON and broken UTF-8
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    return event

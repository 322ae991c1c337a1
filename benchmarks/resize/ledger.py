"""What has been measured so far, kept in a file so that a long benchmark can be gone on with.

Knows the file's form; nothing of how anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.resize.measure import Change

__all__ = ["Ledger"]


class Ledger:
    """Remembers the changes of each part of a plan, and what else was measured.

    Args:
        path: of the file, or `None` to keep it in memory.
        plan: what the measurements must have in common.
    """

    def __init__(self, path: Path | None, *, plan: Mapping[str, object]) -> None:
        self._path = path
        self._held: dict[str, Any] = {"plan": dict(plan), "parts": {}, "others": {}}
        if path is not None and path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["plan"] != self._held["plan"]:
                raise click.ClickException(
                    f"{path} is of another plan, {held['plan']}: give another file, or remove it"
                )
            self._held = held

    def changes(self, part: str) -> list[Change]:
        """Return the changes of a part."""
        rows = self._part(part)["changes"]
        times = "ready_to_first_step_ms"
        return [Change(**{**row, times: tuple(row[times])}) for row in rows]

    def stalled(self, part: str) -> int:
        """Return how many changes of a part never came to their end."""
        return self._part(part)["stalled"]

    def add(self, part: str, changes: Sequence[Change], *, stalled: int) -> None:
        """Remember further changes of a part."""
        held = self._part(part)
        rows = [*held["changes"], *(asdict(change) for change in changes)]
        self._held["parts"][part] = {"changes": rows, "stalled": held["stalled"] + stalled}
        self._write()

    def other(self, name: str) -> Any:
        """Return what else was measured under a name, or `None`."""
        return self._held["others"].get(name)

    def put(self, name: str, value: Any) -> None:
        """Remember something else under a name."""
        self._held["others"][name] = value
        self._write()

    def _part(self, part: str) -> dict[str, Any]:
        return self._held["parts"].get(part, {"changes": [], "stalled": 0})

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self._held, indent=1) + "\n", encoding="utf-8")

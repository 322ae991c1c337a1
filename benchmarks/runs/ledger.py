"""Which runs there are to be, and what became of those that have ended: one JSON line for each.

Knows files; nothing of what a run does. Each line is written as soon as its run has ended, so that
what was interrupted can go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

__all__ = ["Entry", "Ledger", "Run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a plan.

    Attributes:
        name: no other run has it.
        does: name of the function that carries it out.
        spec: what that function is told; JSON values.
        needs: names of runs whose records it is given, and which come before it.
        group: runs that cost about the same.
        base_steps: about what it costs, in base steps of its task,
        evaluations: and in evaluations.
    """

    name: str
    does: str
    spec: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    group: str
    base_steps: float = 0.0
    evaluations: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How a run ended.

    Attributes:
        name: of the run.
        group: of the run.
        record: what it measured; `None` if it failed.
        failure: why it failed.
        process_s: processor time that it took.
        commit: of the program.
    """

    name: str
    group: str
    record: Mapping[str, Any] | None = None
    failure: str | None = None
    process_s: float = 0.0
    commit: str = ""


@dataclass(slots=True)
class Ledger:
    """Remembers entries, in a file of its folder.

    Attributes:
        folder: for it and for whatever else the runs write.
        settings: what all its runs have in common; those of another ledger are refused.
        resume: whether to go on from one that is there. Runs that failed are tried again, and so
            are those whose record names `files` of the folder that are there no longer.
    """

    folder: Path
    settings: Mapping[str, Any]
    resume: bool = False
    _entries: dict[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            self._write({"settings": dict(self.settings)})
            return
        if not self.resume:
            way_out = "go on with it (--resume), or give another folder (--out)"
            raise click.ClickException(f"{self._path} holds runs already: {way_out}")
        self._read()

    @property
    def _path(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def process_s(self) -> float:
        """Processor time of all runs so far."""
        return sum(entry.process_s for entry in self._entries.values())

    @property
    def entries(self) -> Sequence[Entry]:
        """All entries, the oldest first."""
        return list(self._entries.values())

    def record(self, name: str) -> Mapping[str, Any] | None:
        """Return what a run measured, or `None` if it hasn't, or failed."""
        entry = self._entries.get(name)
        return None if entry is None else entry.record

    def records(self, names: Iterable[str]) -> list[Mapping[str, Any]]:
        """Return what those of the runs measured that have ended."""
        found = (self.record(name) for name in names)
        return [record for record in found if record is not None]

    def failure(self, name: str) -> str | None:
        """Return why a run failed, if it did."""
        entry = self._entries.get(name)
        return None if entry is None else entry.failure

    def add(self, entry: Entry) -> None:
        """Write down how a run ended."""
        self._entries[entry.name] = entry
        self._write(asdict(entry))

    def _write(self, values: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def _read(self) -> None:
        text = self._path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # the last line may have been cut off by a power cut
        if whole != text:
            self._path.write_text(whole, encoding="utf-8")
        head, *lines = (json.loads(line) for line in whole.splitlines())
        if head["settings"] != dict(self.settings):
            way_out = "give another folder (--out)"
            raise click.ClickException(f"{self._path} is of {head['settings']}: {way_out}")
        entries = [Entry(**line) for line in lines]
        self._entries = {entry.name: entry for entry in entries if self._stands(entry)}

    def _stands(self, entry: Entry) -> bool:
        files = (entry.record or {}).get("files", ())
        return entry.failure is None and all((self.folder / file).exists() for file in files)

"""What can be seen of the job from outside: its files, read as they grow.

Knows the run folder's files and the workers' records; does nothing to anybody.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.job import Job
from benchmarks.chaos.records import Step, record_path

__all__ = ["View", "Watch"]

_CHECKPOINT_EVENT = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is to be seen now.

    Attributes:
        generation: number of the newest.
        members: its worker ids by rank.
        last_steps: newest step that each live worker wrote.
        pids: of all live workers.
        target: how many workers were asked for last.
        max_workers: how many may be.
        stopped: workers that a SIGSTOP holds.
        checkpoints: whether the job writes checkpoints.
    """

    generation: int = 0
    members: tuple[int, ...] = ()
    last_steps: Mapping[int, Step] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    target: int = 1
    max_workers: int = 1
    stopped: frozenset[int] = frozenset()
    checkpoints: bool = False

    @property
    def healthy(self) -> tuple[int, ...]:
        """Members that have made a step in the newest generation."""
        return tuple(
            worker
            for worker in self.members
            if worker in self.last_steps
            and self.last_steps[worker].generation == self.generation
            and worker in self.pids
            and worker not in self.stopped
        )

    @property
    def starting(self) -> tuple[int, ...]:
        """Live workers that are no members yet."""
        known = {*self.members, *self.stopped}
        return tuple(worker for worker in self.pids if worker not in known)

    def is_settled(self, *, at_step: int) -> bool:
        """Return whether all members have reached a step, and nobody is still to leave."""
        reached = all(self.last_steps[worker].step >= at_step for worker in self.healthy)
        return reached and 0 < len(self.members) == len(self.healthy) <= self.target


class _Tail:
    """The lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the new whole lines but `part` lines, which nobody needs here."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if not line.startswith(b'{"kind": "part"'):
                yield json.loads(line)


class Watch:
    """Looks at a job.

    Args:
        job: whose files.
        target: how many workers it starts with.
        checkpoints: whether it writes checkpoints.
    """

    def __init__(self, job: Job, *, target: int, checkpoints: bool) -> None:
        self._job = job
        self._generations = _Tail(job.run_dir / "generations.jsonl")
        self._records: dict[int, _Tail] = {}
        self._last_steps: dict[int, Step] = {}
        self._generation: dict[str, Any] = {"number": 0, "members": []}
        self._checkpoints = checkpoints
        self._known_checkpoints: set[str] = set()
        self.target = target
        self.stopped: set[int] = set()

    def look(self) -> View:
        """Return what is to be seen now."""
        self._job.check()
        for line in self._generations.lines():
            self._generation = line
        pids = self._job.pids()
        self.stopped &= set(pids)
        for worker in pids:
            self._read(worker)
        if self._checkpoints:
            self._note_checkpoints()
        return View(
            generation=self._generation["number"],
            members=tuple(self._generation["members"]),
            last_steps={w: self._last_steps[w] for w in pids if w in self._last_steps},
            pids=pids,
            target=self.target,
            max_workers=self._job.max_workers,
            stopped=frozenset(self.stopped),
            checkpoints=self._checkpoints,
        )

    def _read(self, worker: int) -> None:
        path = record_path(self._job.folder, worker)
        for line in self._records.setdefault(worker, _Tail(path)).lines():
            if line.pop("kind") == "step":
                self._last_steps[worker] = Step(**line)

    def _note_checkpoints(self) -> None:
        """Write down each checkpoint that was published: only the newest few are kept."""
        for path in (self._job.run_dir / "checkpoints").glob("step-*/manifest.json"):
            name = path.parent.name
            if name not in self._known_checkpoints:
                self._known_checkpoints.add(name)
                self._write_down(path)

    def _write_down(self, path: Path) -> None:
        try:
            body = json.loads(path.read_text())["body"]
        except FileNotFoundError:
            return
        line = {key: body[key] for key in ("generation", "step")} | {"event": _CHECKPOINT_EVENT}
        with (self._job.folder / "checkpoints.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

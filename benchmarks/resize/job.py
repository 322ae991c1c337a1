"""A job under `elastane run` in the driver's hands: records, memberships, and what is done to it.

Knows the command, its control socket and its run folder; nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.launched import LaunchedJob
from benchmarks.resize.measure import STEPS_AFTER, Line, Membership, steps_of
from elastane.launch.folder import GENERATIONS_NAME
from elastane.launch.jobs import Job, ask, find_job

__all__ = [
    "ROOT",
    "WORKER",
    "RunningJob",
    "StalledError",
    "Tail",
    "ending_on_sigterm",
    "worker_environment",
]

ROOT = Path(__file__).parents[2]
WORKER = "benchmarks.resize.worker"
STEPS_BEFORE = 20
_LIMIT_S = 60.0
_POLL_S = 0.02


class StalledError(Exception):
    """Something that was waited for did not come within the limit."""


class Tail:
    """Reads what was appended to a file of JSON lines since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the new whole lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


@dataclass(slots=True, kw_only=True)
class _Job(LaunchedJob):
    """The job's processes.

    Attributes:
        digits: file of the digits.
        parameters: of the model.
        follow_mb: `ELASTANE_FOLLOW_MB` of the workers; `None` is the usual one.
        marks: whether they write down the parts of changes.
    """

    worker = WORKER

    digits: Path
    parameters: int
    follow_mb: float | None
    marks: bool

    @property
    def records_dir(self) -> Path:
        """Folder of the workers' records."""
        return self.folder / "records"

    def arguments(self) -> Sequence[str]:
        """Return what workers are given."""
        return (
            *("--digits", str(self.digits), "--records", str(self.records_dir)),
            *("--parameters", str(self.parameters)),
            *([] if self.follow_mb is None else ["--follow-mb", str(self.follow_mb)]),
            *(["--marks"] if self.marks else []),
        )


class RunningJob:
    """A job, for the length of a block; nothing of it is left afterwards.

    Args:
        folder: an empty one, for all that it writes.
        digits: file of the digits.
        parameters: of the model.
        most_workers: that it may have, and has at first.
        hang_limit_s: after which a worker that keeps the others waiting is left behind.
        follow_mb: parameters in MB from which on newcomers follow; `None` is the usual number.
        marks: whether workers write down the parts of changes (`benchmarks.resize.marks`).

    Attributes:
        records: lines of each worker, oldest first.
        memberships: all that were published, oldest first.
        hang_limit_s: as given.
    """

    def __init__(
        self,
        folder: Path,
        *,
        digits: Path,
        parameters: int,
        most_workers: int,
        hang_limit_s: float,
        follow_mb: float | None = None,
        marks: bool = False,
    ) -> None:
        self.hang_limit_s = hang_limit_s
        self._job = _Job(
            folder=folder,
            name=f"resize-{os.getpid()}-{time.monotonic_ns()}",
            max_workers=most_workers,
            digits=digits,
            parameters=parameters,
            follow_mb=follow_mb,
            marks=marks,
        )
        self._tails: dict[Path, Tail] = {}
        self._generations = Tail(self._job.run_dir / GENERATIONS_NAME)
        self.records: dict[int, list[Line]] = defaultdict(list)
        self.memberships: list[Membership] = []

    def __enter__(self) -> Self:
        self._job.records_dir.mkdir(parents=True)
        self._unix_offset_s = time.time() - time.monotonic()
        self._job.launch({"--hang-limit": str(self.hang_limit_s)})
        return self

    def __exit__(self, *_: object) -> None:
        self._job.end()

    def refresh(self) -> None:
        """Read what has been written since the last look."""
        for path in self._job.records_dir.glob("*.jsonl"):
            for values in self._tails.setdefault(path, Tail(path)).new():
                line = Line(**values)
                self.records[line.worker].append(line)
        for values in self._generations.new():
            self.memberships.append(
                Membership(
                    number=values["number"],
                    members=tuple(values["members"]),
                    cause=values["cause"],
                    time=values["time"] - self._unix_offset_s,
                )
            )

    def steady(self, num_workers: int) -> Membership:
        """Have so many workers, wait until they have trained for a while, and return them."""
        self.scale(num_workers)
        return self._wait_for(
            lambda: self._trained(num_workers), what=f"{num_workers} workers to train"
        )

    def scale(self, num_workers: int) -> None:
        """Ask for so many workers."""
        ask(self._control().path, "scale", n=num_workers)

    def signal(self, workers: Sequence[int], number: signal.Signals) -> None:
        """Send a signal to workers, one right after the other."""
        for pid in [self.records[worker][0].pid for worker in workers]:
            with suppress(ProcessLookupError):  # one that hung has been given up and ended
                os.kill(pid, number)

    def went_on(self, workers: Sequence[int], *, since: Membership) -> Membership:
        """Wait until just these workers have trained for a few steps after a membership.

        Returns:
            The first membership of just these workers.
        """

        def found() -> Membership | None:
            alone = (m for m in self.memberships if set(m.members) == set(workers))
            first = next((m for m in alone if m.number > since.number), None)
            if first is None:
                return None
            return first if self._have_made(STEPS_AFTER, workers, since=first.number) else None

        return self._wait_for(found, what=f"workers {workers} to go on")

    def _trained(self, num_workers: int) -> Membership | None:
        newest = self.memberships[-1] if self.memberships else None
        if newest is None or len(newest.members) != num_workers:
            return None
        enough = self._have_made(STEPS_BEFORE, newest.members, since=newest.number)
        return newest if enough else None

    def _have_made(self, num_steps: int, workers: Sequence[int], *, since: int) -> bool:
        made = [
            sum(line.generation >= since for line in steps_of(self.records[worker][-200:]))
            for worker in workers
        ]
        return min(made, default=0) >= num_steps

    def _said(self) -> str:
        """Return the launcher's own last messages, without those of the workers."""
        lines = self._job.log.read_text(errors="replace").splitlines()
        own = [line for line in lines if not line.startswith("[worker ")]
        return "\n".join(own[-20:])

    def _control(self) -> Job:
        self._wait_for(lambda: self.memberships, what="the first membership")
        return find_job(str(self._job.run_dir))

    def _wait_for(self, found: Callable[[], Any], *, what: str) -> Any:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            self.refresh()
            result = found()
            if result:
                return result
            if time.monotonic() > deadline or not self._job.is_running:
                raise StalledError(f"waited for {what} in vain; the launcher said:\n{self._said()}")
            time.sleep(_POLL_S)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Leave a block in the ordinary way on SIGTERM, so that nothing is left behind."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def worker_environment() -> dict[str, str]:
    """Return the environment of everything that is measured: one thread a process."""
    return LaunchedJob.environment | os.environ

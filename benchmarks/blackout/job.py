"""The job of the blackout benchmark: starts `elastane run`, and kills all of it at once or in turn.

Knows processes and the control socket; nothing of checkpoints, or of what is trained.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.chaos.audit import orphans
from elastane.errors import ElastaneError
from elastane.launch.jobs import ask, find_job

__all__ = ["BlackoutError", "Job", "wait_until"]

_ROOT = Path(__file__).parents[2]
_ANSWER_LIMIT_S = 60.0
_POLL_S = 0.001
_VANISH_LIMIT_S = 20.0
_QUIET_ROUNDS, _BETWEEN_ROUNDS_S = 3, 0.02


class BlackoutError(Exception):
    """The job did not do what it must; the benchmark is over."""


def wait_until(fact: Callable[[], bool], *, limit_s: float, what: str) -> None:
    """Wait for something that no event tells of.

    Raises:
        BlackoutError: it did not happen in time.
    """
    deadline = time.monotonic() + limit_s
    while not fact():
        if time.monotonic() > deadline:
            raise BlackoutError(f"{what} did not happen within {limit_s:g} s")
        time.sleep(_POLL_S)


@dataclass(slots=True, kw_only=True)
class Job:
    """One job, of which all processes may be killed, and which is started again.

    Attributes:
        folder: of the benchmark; the run folder is `run` in it.
        name: of the job; no other job on the machine has it.
        max_workers: most workers.
    """

    folder: Path
    name: str
    max_workers: int
    _launcher: subprocess.Popen[bytes] | None = None

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Leave nothing of the job behind when a block ends."""
        try:
            yield
        finally:
            self.kill()

    def start(self, num_workers: int) -> None:
        """Start the job, for the first time or again, with so many workers."""
        options = {
            "--workers": f"1:{self.max_workers}",
            "--initial": str(num_workers),
            "--run-dir": str(self.run_dir),
            "--job": self.name,
        }
        given = [one for option in options.items() for one in option]
        script = ["-m", "benchmarks.blackout.worker", str(self.folder)]
        with (self.folder / "launcher.log").open("ab") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "elastane", "run", *given, *script],
                cwd=_ROOT,
                env={"OMP_NUM_THREADS": "1"} | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends the job itself
            )

    def scale(self, num_workers: int) -> None:
        """Have so many workers: a launcher that finds an earlier one's record keeps its number."""
        answers: list[Any] = []

        def answered() -> bool:
            self.check()
            with suppress(ConnectionError, TimeoutError, ElastaneError):
                socket = find_job(str(self.run_dir)).path
                answers.append(ask(socket, "scale", n=num_workers).result)
            return bool(answers)

        wait_until(answered, limit_s=_ANSWER_LIMIT_S, what="an answer to 'scale'")

    def check(self) -> None:
        """Raise if the launcher has ended by itself."""
        code = self._launcher.poll() if self._launcher else None
        if code is not None:
            raise BlackoutError(f"the launcher ended with exit code {code}")

    def wait(self, *, limit_s: float) -> int:
        """Wait for the end of the launcher and return its exit code."""
        assert self._launcher is not None
        try:
            return self._launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise BlackoutError(f"the job was not over within {limit_s:g} s") from None

    def kill(self, *, launcher_first: bool = True, gaps_s: Iterable[float] = ()) -> None:
        """Kill launcher and workers, then whatever else there is.

        Args:
            launcher_first: whether the launcher is killed before the workers, or after them.
            gaps_s: seconds to let pass after each, as far as they go.
        """
        deeds: list[Callable[[], None]] = [self._launcher.kill] if self._launcher else []
        workers = [partial(_kill, pid) for pid in orphans(self.name, patience_s=0.0)]
        deeds = [*deeds, *workers] if launcher_first else [*workers, *deeds]
        for deed, gap_s in zip_longest(deeds, gaps_s, fillvalue=None):
            if deed is None:
                break
            deed()
            time.sleep(gap_s or 0.0)
        if self._launcher is not None:
            self._launcher.wait()
            self._launcher = None
        self._sweep()

    def _sweep(self) -> None:
        """Kill what was just being started."""
        deadline, quiet = time.monotonic() + _VANISH_LIMIT_S, 0
        while quiet < _QUIET_ROUNDS:
            alive = orphans(self.name, patience_s=0.0)
            quiet = 0 if alive else quiet + 1
            for pid in alive:
                _kill(pid)
            if time.monotonic() > deadline:
                raise BlackoutError(f"processes {alive} can't be killed")
            time.sleep(_BETWEEN_ROUNDS_S)


def _kill(pid: int) -> None:
    """Kill a worker with all that it started, as the leader of its process group."""
    with suppress(ProcessLookupError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)

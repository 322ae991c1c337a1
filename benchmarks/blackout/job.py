"""The job of the blackout benchmark: all of it is killed at once or in turn, and started again.

Knows processes; nothing of checkpoints, or of what is trained.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from benchmarks.chaos.audit import orphans
from benchmarks.launched import JobError, LaunchedJob

__all__ = ["Job"]

_VANISH_LIMIT_S = 20.0
_STOP_S = 0.01  # a system call that a worker is in ends first
_QUIET_ROUNDS, _BETWEEN_ROUNDS_S = 3, 0.02


@dataclass(slots=True, kw_only=True)
class Job(LaunchedJob):
    """One job, of which all processes may be killed, and which is started again."""

    worker = "benchmarks.blackout.worker"

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Leave nothing of the job behind when a block ends."""
        try:
            yield
        finally:
            self.kill()

    def start(self, num_workers: int) -> None:
        """Start the job, for the first time or again, with so many workers."""
        self.launch({"--initial": str(num_workers)})

    def freeze(self) -> None:
        """Stop all workers where they are; they can be killed, or go on."""
        self._signal(signal.SIGSTOP)
        time.sleep(_STOP_S)

    def thaw(self) -> None:
        """Let workers that were stopped go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, *, launcher_first: bool = True, gaps_s: Iterable[float] = ()) -> None:
        """Kill launcher and workers, then whatever else there is.

        Args:
            launcher_first: whether the launcher is killed before the workers, or after them.
            gaps_s: seconds to let pass after each, as far as they go.
        """
        # Not waited for: a checkpoint that is to be cut takes a few milliseconds to write.
        deeds: list[Callable[[], None]] = [self._launcher.kill] if self._launcher else []
        workers = [partial(_kill, pid) for pid in orphans(self.name, patience_s=0.0)]
        deeds = [*deeds, *workers] if launcher_first else [*workers, *deeds]
        for deed, gap_s in zip_longest(deeds, gaps_s, fillvalue=None):
            if deed is None:
                break
            deed()
            time.sleep(gap_s or 0.0)
        self.kill_launcher()
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
                raise JobError(f"processes {alive} can't be killed")
            time.sleep(_BETWEEN_ROUNDS_S)


def _kill(pid: int) -> None:
    """Kill a worker with all that it started, as the leader of its process group."""
    with suppress(ProcessLookupError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)

"""The job of the chaos benchmark: its launcher may be killed, and nothing of it is left behind.

Knows processes and the run folder's lists; nothing of what is done to whom.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from benchmarks.chaos.audit import orphans
from benchmarks.launched import LaunchedJob

__all__ = ["Job"]

_STACKS_S = 1.0
_ROUNDS, _BETWEEN_ROUNDS_S = 3, 0.05


@dataclass(slots=True, kw_only=True)
class Job(LaunchedJob):
    """One job, whose launcher may be killed and started again.

    Attributes:
        hang_limit_s: as `elastane run` takes it.
    """

    worker = "benchmarks.chaos.worker"
    # Torch looks up the name of its peer at each connection, which takes 5 s where a name server
    # does not answer: nobody is asked here, all is on this machine.
    environment = LaunchedJob.environment | {"RES_OPTIONS": "attempts:0"}

    hang_limit_s: float

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the launcher; at the end of the block nothing of the job is left."""
        try:
            self.start_launcher()
            yield
        finally:
            self._end()

    def start_launcher(self) -> None:
        """Start the launcher, for the first time or again."""
        self.launch({"--hang-limit": str(self.hang_limit_s), "--max-respawns": "1000"})

    def stop(self, *, limit_s: float) -> int:
        """Have the job stop and return the launcher's exit code."""
        self.ask("stop")
        return self.wait(limit_s=limit_s)

    def ask_for_stacks(self) -> None:
        """Have the workers write to their logs what they are doing."""
        for pid in self.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(_STACKS_S)

    def _end(self) -> None:
        self.kill_launcher()
        for _ in range(_ROUNDS):  # one that was just being started shows up late
            for pid in orphans(self.name, patience_s=0.0):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_BETWEEN_ROUNDS_S)

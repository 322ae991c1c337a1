"""The job of the chaos benchmark: starts `elastane run`, asks it, and leaves no process behind.

Knows processes, the control socket and the run folder's lists; nothing of what is done to whom.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.audit import orphans
from elastane.errors import ElastaneError
from elastane.launch.jobs import ask, find_job

__all__ = ["ChaosError", "Job", "wait_until"]

_ANSWER_LIMIT_S = 60.0
_POLL_S = 0.01
_STACKS_S = 1.0
_ROUNDS, _BETWEEN_ROUNDS_S = 3, 0.05
# Torch looks up the name of its peer at each connection, which takes 5 s where a name server does
# not answer: nobody is asked here, all is on this machine.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0"}


class ChaosError(Exception):
    """The job did not do what it must; the run is over."""


def wait_until(fact: Callable[[], bool], *, limit_s: float, what: str) -> None:
    """Wait for something that no event tells of.

    Raises:
        ChaosError: it did not happen in time.
    """
    deadline = time.monotonic() + limit_s
    while not fact():
        if time.monotonic() > deadline:
            raise ChaosError(f"{what} did not happen within {limit_s:g} s")
        time.sleep(_POLL_S)


@dataclass(slots=True, kw_only=True)
class Job:
    """One job, whose launcher may be killed and started again.

    Attributes:
        folder: of the chaos run; the run folder is `run` in it.
        name: of the job; no other job on the machine has it.
        max_workers: most workers.
        hang_limit_s: as `elastane run` takes it.
    """

    folder: Path
    name: str
    max_workers: int
    hang_limit_s: float
    _launcher: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the launcher; at the end of the block nothing of the job is left."""
        try:
            self.start_launcher()
            yield
        finally:
            self._end()

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def start_launcher(self) -> None:
        """Start the launcher, for the first time or again in the same run folder."""
        options = {
            "--workers": f"1:{self.max_workers}",
            "--run-dir": str(self.run_dir),
            "--job": self.name,
            "--hang-limit": str(self.hang_limit_s),
            "--max-respawns": "1000",
        }
        given = [one for option in options.items() for one in option]
        script = ["-m", "benchmarks.chaos.worker", str(self.folder)]
        with (self.folder / "launcher.log").open("ab") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "elastane", "run", *given, *script],
                env=_ENVIRONMENT | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends the job itself
            )

    def kill_launcher(self) -> None:
        """Kill the launcher; the workers live on."""
        assert self._launcher is not None
        self._launcher.kill()
        self._launcher.wait()
        self._launcher = None

    def check(self) -> None:
        """Raise if the launcher has ended by itself."""
        code = self._launcher.poll() if self._launcher else None
        if code is not None:
            raise ChaosError(f"the launcher ended with exit code {code}")

    def ask(self, command: str, **values: Any) -> Any:
        """Return the launcher's answer; one that is starting is waited for."""
        answers: list[Any] = []

        def answered() -> bool:
            self.check()
            with suppress(ConnectionError, TimeoutError, ElastaneError):
                answers.append(ask(find_job(str(self.run_dir)).path, command, **values).result)
            return bool(answers)

        wait_until(answered, limit_s=_ANSWER_LIMIT_S, what=f"an answer to {command!r}")
        return answers[0]

    def stop(self, *, limit_s: float) -> int:
        """Have the job stop and return the launcher's exit code."""
        self.ask("stop")
        assert self._launcher is not None
        try:
            return self._launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ChaosError(f"the job did not stop within {limit_s:g} s") from None

    def pids(self) -> dict[int, int]:
        """Return the process ids of the live workers by worker id, as the agent recorded them."""
        found: dict[int, int] = {}
        for path in (self.run_dir / "agents").glob("*.json"):
            found |= {one["worker"]: one["pid"] for one in json.loads(path.read_text()).values()}
        return found

    def ask_for_stacks(self) -> None:
        """Have the workers write to their logs what they are doing."""
        for pid in self.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(_STACKS_S)

    def _end(self) -> None:
        if self._launcher is not None:
            self.kill_launcher()
        for _ in range(_ROUNDS):  # one that was just being started shows up late
            for pid in orphans(self.name, patience_s=0.0):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_BETWEEN_ROUNDS_S)

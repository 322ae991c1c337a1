"""A job that a benchmark starts under `elastane run`, asks by its control socket, and kills.

Knows processes and the run folder; nothing of what is trained, done to it or measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from elastane.errors import ElastaneError
from elastane.launch.jobs import ask, find_job

__all__ = ["JobError", "LaunchedJob", "wait_until"]

_ROOT = Path(__file__).parents[1]
_ANSWER_LIMIT_S, _END_LIMIT_S = 60.0, 30.0
_POLL_S = 0.01


class JobError(Exception):
    """The job did not do what it must; the run is over."""


def wait_until(
    fact: Callable[[], bool], *, limit_s: float, what: str, poll_s: float = _POLL_S
) -> None:
    """Wait for something that no event tells of.

    Raises:
        JobError: it did not happen in time.
    """
    deadline = time.monotonic() + limit_s
    while not fact():
        if time.monotonic() > deadline:
            raise JobError(f"{what} did not happen within {limit_s:g} s")
        time.sleep(poll_s)


@dataclass(slots=True, kw_only=True)
class LaunchedJob:
    """One job, whose launcher may be killed and started again in the same run folder.

    Attributes:
        folder: of the benchmark; the worker's script gets it. The run folder is `run` in it.
        name: of the job; no other job on the machine has it.
        max_workers: most workers.
        worker: the module that workers run.
        environment: of launcher and workers where the user's own doesn't say.

    Workers get the folder as their argument; `arguments` may be another function.
    """

    folder: Path
    name: str
    max_workers: int
    worker: ClassVar[str]
    environment: ClassVar[dict[str, str]] = {"OMP_NUM_THREADS": "1"}
    _launcher: subprocess.Popen[bytes] | None = None

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """File of what the launcher says, and the workers through it."""
        return self.folder / "launcher.log"

    @property
    def is_running(self) -> bool:
        """Whether the launcher was started and lives."""
        return self._launcher is not None and self._launcher.poll() is None

    def arguments(self) -> Sequence[str]:
        """Return what workers are given."""
        return (str(self.folder),)

    def launch(self, options: dict[str, str]) -> None:
        """Start the launcher, for the first time or again, with further options."""
        options = {
            "--workers": f"1:{self.max_workers}",
            "--run-dir": str(self.run_dir),
            "--job": self.name,
            **options,
        }
        given = [one for option in options.items() for one in option]
        with self.log.open("ab") as log:
            self._launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "elastane", "run", *given),
                    *("-m", self.worker, *self.arguments()),
                ],
                cwd=_ROOT,
                env=self.environment | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends the job itself
            )

    def kill_launcher(self) -> None:
        """Kill the launcher, if it lives; the workers live on."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
            self._launcher = None

    def check(self) -> None:
        """Raise if the launcher has ended by itself."""
        code = self._launcher.poll() if self._launcher else None
        if code is not None:
            raise JobError(f"the launcher ended with exit code {code}")

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

    def wait(self, *, limit_s: float) -> int:
        """Wait for the end of the launcher and return its exit code."""
        assert self._launcher is not None
        try:
            return self._launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise JobError(f"the job was not over within {limit_s:g} s") from None

    def pids(self) -> dict[int, int]:
        """Return the process ids of the live workers by worker id, as the agent recorded them."""
        found: dict[int, int] = {}
        for path in (self.run_dir / "agents").glob("*.json"):
            found |= {one["worker"]: one["pid"] for one in json.loads(path.read_text()).values()}
        return found

    def end(self) -> None:
        """Leave nothing of the job behind."""
        if self._launcher is None:
            return
        try:
            ask(find_job(str(self.run_dir)).path, "kill")
        except (ElastaneError, OSError):  # it is not up yet, or over already
            self._launcher.terminate()
        try:
            self.wait(limit_s=_END_LIMIT_S)
        except JobError:
            self.kill_launcher()
            for pid in self.pids().values():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

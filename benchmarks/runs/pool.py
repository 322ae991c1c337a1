"""Carries out the runs of a plan, some side by side, each in a process of one thread.

Knows plan and ledger; nothing of what the runs do. A run whose process dies is a failed run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Condition
from typing import IO, Any

from benchmarks.runs.ledger import Entry, Ledger, Run

__all__ = ["Worker", "carry_out", "workers"]

_ROOT = Path(__file__).parents[2]
_END_LIMIT_S = 10.0


@contextmanager
def workers(module: str, *, count: int, folder: Path) -> Iterator[list[Worker]]:
    """Have processes that carry out runs, for the length of a block; they start when needed.

    Args:
        module: whose functions carry runs out; imported by each process.
        count: runs side by side.
        folder: for their log.
    """
    with (folder / "workers.log").open("a") as log:
        made = [Worker(module, log=log) for _ in range(count)]
        try:
            yield made
        finally:
            for worker in made:
                worker.leave()


def carry_out(
    runs: Sequence[Run],
    *,
    ledger: Ledger,
    by: Sequence[Worker],
    commit: str = "",
    may_start: Callable[[], bool] = lambda: True,
    tell: Callable[[Entry], None] = lambda _: None,
) -> None:
    """Carry out what is not in the ledger; come back when nothing more can start.

    Args:
        runs: in the order in which they are to start; those that need others wait for them.
        ledger: takes each run's end.
        by: the processes that do it, each one run after the other.
        commit: of the program, for the ledger.
        may_start: asked before each run.
        tell: told of each run's end.
    """
    queue = _Queue(runs, ledger=ledger, commit=commit, may_start=may_start, tell=tell)
    with ThreadPoolExecutor(len(by)) as threads:
        try:
            for served in [threads.submit(_serve, worker, queue) for worker in by]:
                served.result()
        except BaseException:
            queue.close()
            for worker in by:
                worker.kill()
            raise


def _serve(worker: Worker, queue: _Queue) -> None:
    while (taken := queue.take()) is not None:
        run, needs = taken
        queue.end(run, worker.carry_out(run, needs))


class _Queue:
    """Hands out the runs, to several threads."""

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        ledger: Ledger,
        commit: str,
        may_start: Callable[[], bool],
        tell: Callable[[Entry], None],
    ) -> None:
        self._waiting = [run for run in runs if ledger.record(run.name) is None]
        self._ledger, self._commit = ledger, commit
        self._may_start, self._tell = may_start, tell
        self._changed = Condition()
        self._at_work = 0

    def take(self) -> tuple[Run, dict[str, Any]] | None:
        """Return the next run that can start, with the records that it needs; wait for one."""
        with self._changed:
            while self._waiting and self._may_start():
                self._drop_hopeless()
                ready = next((run for run in self._waiting if self._is_ready(run)), None)
                if ready is not None:
                    self._waiting.remove(ready)
                    self._at_work += 1
                    return ready, {name: self._ledger.record(name) for name in ready.needs}
                if not self._at_work:
                    return None
                self._changed.wait()
            return None

    def end(self, run: Run, found: dict[str, Any]) -> None:
        """Take a run's end; after `close` there is none."""
        with self._changed:
            self._at_work -= 1
            if not found.get("unfinished"):
                self._note(Entry(name=run.name, group=run.group, **found))
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def _is_ready(self, run: Run) -> bool:
        return all(self._ledger.record(name) is not None for name in run.needs)

    def _drop_hopeless(self) -> None:
        """Have the runs fail that need one that failed."""
        for run in list(self._waiting):
            broken = [name for name in run.needs if self._ledger.failure(name)]
            if broken:
                self._waiting.remove(run)
                why = f"it needs {broken[0]!r}, which failed"
                self._note(Entry(name=run.name, group=run.group, failure=why))

    def _note(self, entry: Entry) -> None:
        entry = replace(entry, commit=self._commit)
        self._ledger.add(entry)
        self._tell(entry)


class Worker:
    """A process that carries out runs; when it has died, the next run starts another one.

    Args:
        module: whose functions carry runs out.
        log: takes what they say.
    """

    def __init__(self, module: str, *, log: IO[str]) -> None:
        self._command = [sys.executable, "-m", "benchmarks.runs.worker", module]
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._killed = False

    def carry_out(self, run: Run, needs: dict[str, Any]) -> dict[str, Any]:
        """Return how a run ended."""
        if self._killed:
            return {"unfinished": True}
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        task = {"does": run.does, "spec": dict(run.spec), "needs": needs}
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        if self._killed:
            return {"unfinished": True}
        self.leave()
        return {"failure": f"its process ended with exit code {process.returncode}"}

    def leave(self) -> None:
        """Have the process end after its run, and wait for that."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End the process now; its run does not count."""
        self._killed = True
        process = self._process
        if process is not None:
            process.kill()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                cwd=_ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the driver, which ends its workers itself
            )
        return self._process

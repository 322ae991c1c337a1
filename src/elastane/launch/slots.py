"""The places of one agent: starts a worker in each, sees its end at once, leaves nothing behind.

Knows processes, process groups and log files; nothing of stores or generations.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    SubprocessContext,
    start_processes,
)

from elastane.launch.folder import log_paths

__all__ = ["Ended", "Process", "Slots", "born_of"]

_TORCH_LOG = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
_UNWATCHED_POLL_S = 0.005  # where the system has no pidfd


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A worker that ended, in which slot, and its exit code, if that could be known."""

    worker: int
    slot: int
    code: int | None


@dataclass(slots=True, kw_only=True)
class Process:
    """A worker's process.

    Attributes:
        worker: its id.
        pid: its process id; it leads a process group.
        born: when it began, as the system tells it: a number that is used again begins later.
        context: that started it, or `None` for one that outlived its launcher.
        handle: its pidfd, or -1.
        kill_at: when its group is killed, if it was asked to end.
    """

    worker: int
    pid: int
    born: str
    context: SubprocessContext | None = None
    handle: int = -1
    kill_at: float | None = None


class Slots:
    """The workers of an agent by slot; for the length of a block.

    Args:
        run_dir: the run's folder, for logs.
        command: program and arguments of a worker.
    """

    def __init__(self, run_dir: Path, *, command: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._command = tuple(command)
        self._processes: dict[int, Process] = {}
        self._waker, self._wake_end = os.pipe()
        os.set_blocking(self._wake_end, False)
        # In the main thread torch would set signal handlers of its own; elsewhere it only warns.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="elastane start")

    def __enter__(self) -> Self:
        self._torch_level = _TORCH_LOG.level
        _TORCH_LOG.setLevel(logging.ERROR)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        _TORCH_LOG.setLevel(self._torch_level)
        self._starter.shutdown()
        os.close(self._waker)
        os.close(self._wake_end)

    @property
    def workers(self) -> dict[int, Process]:
        """The live workers by slot."""
        return dict(self._processes)

    def start(self, slot: int, *, worker: int, environment: Mapping[str, str]) -> Process:
        """Start a worker in a free slot."""
        context = self._starter.submit(self._launch, worker, dict(environment)).result()
        process = _watch(worker, context.pids()[0], context=context)
        self._processes[slot] = process
        return process

    def adopt(self, slot: int, *, worker: int, pid: int, born: str) -> bool:
        """Watch a worker of an earlier launcher and return whether it still lives."""
        if not born or born_of(pid) != born:
            return False
        self._processes[slot] = _watch(worker, pid, context=None)
        return True

    def end(self, worker: int, *, grace_s: float) -> None:
        """Ask a worker to end, and kill its process group after a grace; 0 kills at once."""
        for process in self._processes.values():
            if process.worker == worker:
                process.kill_at = time.monotonic() + grace_s
                if grace_s > 0:
                    _signal(process.pid, signal.SIGTERM)
        self._kill_due()

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return the workers that ended; wait for one, or for `wake`, if there is none yet.

        They are still to be buried: their process groups may live.
        """
        self._kill_due()
        handles = [p.handle for p in self._processes.values() if p.handle >= 0]
        blind = len(handles) < len(self._processes)
        limit_s = min(timeout_s, _UNWATCHED_POLL_S) if blind else timeout_s
        readable, _, _ = select.select([self._waker, *handles], [], [], limit_s)
        if self._waker in readable:
            os.read(self._waker, 4096)
        ends = [(slot, process, _exit(process)) for slot, process in self._processes.items()]
        return [
            Ended(worker=process.worker, slot=slot, code=end.code)
            for slot, process, end in ends
            if end is not None
        ]

    def wake(self) -> None:
        """Have `wait` return at once. Any thread may call this, and a signal handler."""
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_end, b"\0")

    def bury(self, slot: int) -> None:
        """Kill what is left of an ended worker's process group, and free its slot."""
        process = self._processes.pop(slot)
        if process.context is not None:
            # Its leader is not waited for yet, so the group's number can't be another's.
            process.context.subprocess_handlers[0].close(signal.SIGKILL)
            process.context.subprocess_handlers[0].proc.wait()
            process.context.close()
        else:
            _kill_group(process.pid)
        if process.handle >= 0:
            os.close(process.handle)

    def kill_all(self) -> None:
        """Kill every process group and wait for its leader."""
        for slot, process in list(self._processes.items()):
            _kill_group(process.pid)
            while process.context is None and _exit(process) is None:
                time.sleep(_UNWATCHED_POLL_S)
            self.bury(slot)

    def _launch(self, worker: int, environment: dict[str, str]) -> SubprocessContext:
        context = start_processes(
            name="worker",
            entrypoint=self._command[0],
            args={0: self._command[1:]},
            envs={0: environment},
            logs_specs=_WorkerLogs(self._run_dir, worker),
        )
        assert isinstance(context, SubprocessContext)
        return context

    def _kill_due(self) -> None:
        for process in self._processes.values():
            if process.kill_at is not None and time.monotonic() >= process.kill_at:
                _kill_group(process.pid)


class _WorkerLogs(LogsSpecs):
    """Sends a worker's output to the run folder: files outlive a launcher, pipes do not."""

    def __init__(self, run_dir: Path, worker: int) -> None:
        self._out, self._err = log_paths(run_dir, worker)
        super().__init__(log_dir=str(self._out.parent))

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of the only process."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        error_file = str(self._err.with_suffix(".json"))
        envs[0]["TORCHELASTIC_ERROR_FILE"] = error_file
        return LogsDest(
            stdouts={0: str(self._out)}, stderrs={0: str(self._err)}, error_files={0: error_file}
        )

    @property
    def root_log_dir(self) -> str:
        """The folder of all logs."""
        return str(self._out.parent)


@dataclass(frozen=True, slots=True)
class _Exit:
    code: int | None


def _watch(worker: int, pid: int, *, context: Any) -> Process:
    handle = -1
    with suppress(OSError):  # an old kernel, or a process that is gone already
        handle = os.pidfd_open(pid)
    return Process(worker=worker, pid=pid, born=born_of(pid), context=context, handle=handle)


def _exit(process: Process) -> _Exit | None:
    """Return how a process ended, or `None`; the process stays to be waited for."""
    if process.context is None:
        return None if born_of(process.pid) == process.born else _Exit(code=None)
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    killed = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return _Exit(code=-info.si_status if killed else info.si_status)


def born_of(pid: int) -> str:
    """Return the system's start time of a live process, or "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)

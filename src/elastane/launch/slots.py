"""The places of one agent: starts a worker in each, sees its end at once, leaves nothing behind.

Knows processes, process groups and log files; nothing of stores or generations.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
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
    """A worker that ended.

    Attributes:
        worker: its id.
        slot: where it was.
        code: exit code, if that could be known.
        index: number of its process that ended so.
    """

    worker: int
    slot: int
    code: int | None
    index: int = 0


@dataclass(slots=True, kw_only=True)
class Process:
    """A worker's process; of several the first one, its leader, which has the others.

    Attributes:
        worker: its id.
        pid: its process id; it leads a process group.
        born: when it began, as the system tells it: a number that is used again begins later.
        context: that started it, or `None` for one that outlived its launcher.
        handle: its pidfd, or -1.
        kill_at: when its group is killed, if it was asked to end.
        index: its number among the worker's processes.
        followers: the worker's other processes; they live and die together.
    """

    worker: int
    pid: int
    born: str
    context: SubprocessContext | None = None
    handle: int = -1
    kill_at: float | None = None
    index: int = 0
    followers: tuple[Process, ...] = ()

    @property
    def team(self) -> tuple[Process, ...]:
        """All processes of the worker."""
        return (self, *self.followers)


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

    def start(
        self, slot: int, *, worker: int, environments: Sequence[Mapping[str, str]]
    ) -> Process:
        """Start a worker in a free slot.

        Args:
            slot: the slot.
            worker: its id.
            environments: variables to set for each of its processes.
        """
        context = self._starter.submit(self._launch, worker, environments).result()
        pids = [context.pids()[index] for index in range(len(environments))]
        process = self._processes[slot] = _watch(worker, pids, context=context)
        return process

    def adopt(self, slot: int, *, worker: int, pids: Sequence[int], born: Sequence[str]) -> bool:
        """Watch a worker of an earlier launcher; return whether it still lives.

        Args:
            slot: where it is.
            worker: its id.
            pids: of its processes. If one is gone the others are killed.
            born: when each of them began.
        """
        alive = [bool(b) and born_of(pid) == b for pid, b in zip(pids, born, strict=True)]
        if all(alive):
            self._processes[slot] = _watch(worker, pids, context=None)
            return True
        for pid in itertools.compress(pids, alive):
            _kill_group(pid)
        return False

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
        if not self._ended():
            everyone = [one for process in self._processes.values() for one in process.team]
            alive = [one.handle for one in everyone if _exit(one) is None]
            handles = [handle for handle in alive if handle >= 0]
            blind = len(handles) < len(alive)
            limit_s = min(timeout_s, _UNWATCHED_POLL_S) if blind else timeout_s
            readable, _, _ = select.select([self._waker, *handles], [], [], limit_s)
            if self._waker in readable:
                os.read(self._waker, 4096)
        return self._ended()

    def _ended(self) -> list[Ended]:
        """Return the workers of which a process failed, or all processes ended."""
        ends = [(slot, one, _end_of(one)) for slot, one in self._processes.items()]
        return [
            Ended(worker=process.worker, slot=slot, code=code, index=index)
            for slot, process, (code, index) in ((a, b, end) for a, b, end in ends if end)
        ]

    def wake(self) -> None:
        """Have `wait` return at once. Any thread may call this, and a signal handler."""
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_end, b"\0")

    def bury(self, slot: int) -> None:
        """Kill what is left of an ended worker's process group, and free its slot."""
        process = self._processes.pop(slot)
        if process.context is not None:
            # Their leaders are not waited for yet, so the groups' numbers can't be another's.
            for handler in process.context.subprocess_handlers.values():
                handler.close(signal.SIGKILL)
                handler.proc.wait()
            process.context.close()
        for one in process.team:
            if process.context is None:
                _kill_group(one.pid)
            if one.handle >= 0:
                os.close(one.handle)

    def kill_all(self) -> None:
        """Kill every process group and wait for its leader."""
        for slot, process in list(self._processes.items()):
            for one in process.team:
                _kill_group(one.pid)
            while process.context is None and _end_of(process) is None:
                time.sleep(_UNWATCHED_POLL_S)
            self.bury(slot)

    def _launch(self, worker: int, environments: Sequence[Mapping[str, str]]) -> SubprocessContext:
        numbers = range(len(environments))
        context = start_processes(
            name="worker",
            entrypoint=self._command[0],
            args=dict.fromkeys(numbers, self._command[1:]),
            envs={number: dict(environments[number]) for number in numbers},
            logs_specs=_WorkerLogs(self._run_dir, worker),
        )
        assert isinstance(context, SubprocessContext)
        return context

    def _kill_due(self) -> None:
        for process in self._processes.values():
            if process.kill_at is not None and time.monotonic() >= process.kill_at:
                for one in process.team:
                    _kill_group(one.pid)


class _WorkerLogs(LogsSpecs):
    """Sends a worker's output to the run folder: files outlive a launcher, pipes do not."""

    def __init__(self, run_dir: Path, worker: int) -> None:
        self._run_dir = run_dir
        self._worker = worker
        super().__init__(log_dir=self.root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of each process."""
        Path(self.root_log_dir).mkdir(parents=True, exist_ok=True)
        paths = {index: log_paths(self._run_dir, self._worker, index=index) for index in envs}
        errors = {index: f"{err.parent / err.stem}.json" for index, (_, err) in paths.items()}
        for index, environment in envs.items():
            environment["TORCHELASTIC_ERROR_FILE"] = errors[index]
        return LogsDest(
            stdouts={index: str(out) for index, (out, _) in paths.items()},
            stderrs={index: str(err) for index, (_, err) in paths.items()},
            error_files=errors,
        )

    @property
    def root_log_dir(self) -> str:
        """The folder of all logs."""
        return str(log_paths(self._run_dir, self._worker)[0].parent)


@dataclass(frozen=True, slots=True)
class _Exit:
    code: int | None


def _watch(worker: int, pids: Sequence[int], *, context: Any) -> Process:
    team: list[Process] = []
    for index, pid in enumerate(pids):
        handle = -1
        with suppress(OSError):  # an old kernel, or a process that is gone already
            handle = os.pidfd_open(pid)
        known: dict[str, Any] = {"born": born_of(pid), "context": context, "handle": handle}
        team.append(Process(worker=worker, pid=pid, index=index, **known))
    return replace(team[0], followers=tuple(team[1:]))


def _end_of(process: Process) -> tuple[int | None, int] | None:
    """Return code and number of the process that ended a worker, or `None` while it goes on.

    One that failed ends it; else it ends with the last one, since the others may have work left.
    """
    ends = [(end, one.index) for one in process.team if (end := _exit(one)) is not None]
    failed = [(end.code, index) for end, index in ends if end.code]
    if failed:
        return failed[0]
    return (ends[0][0].code, 0) if len(ends) == len(process.team) else None


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

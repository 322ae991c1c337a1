"""The jobs of this user that run on this machine: how to list, find and ask them.

Knows one line of JSON each way; nothing of what a launcher does with a command, nor of torch.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastane.errors import ArgumentError, ElastaneError, StateError, describe
from elastane.launch.socket_paths import is_job_name, is_live, live_sockets, paths_of

__all__ = ["LAUNCHER_NAME", "Answer", "Job", "ask", "find_job", "wait_until_gone"]

LAUNCHER_NAME = "launcher.json"

_ANSWER_LIMIT_S = 10.0
_POLL_S = 0.1
_ERRORS = {one.__name__: one for one in ElastaneError.__subclasses__()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that runs.

    Attributes:
        name: of the job.
        run_dir: the run's folder, from the root.
        pid: process id of its launcher.
        path: of its control socket.
    """

    name: str
    run_dir: str
    pid: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a launcher answered, and the job that it runs."""

    job: Job
    result: Any


def ask(
    path: Path, command: str, *, timeout_s: float = _ANSWER_LIMIT_S, **values: object
) -> Answer:
    """Send one command to the launcher behind a socket and return its answer.

    Raises:
        ConnectionError: the launcher is gone.
        TimeoutError: it does not answer.
        ElastaneError: it refused; the error is of the class that it raised.
    """
    request = json.dumps({"command": command, **values}).encode() + b"\n"
    try:
        line = _exchange(path, request, timeout_s=timeout_s)
    except (TimeoutError, BlockingIOError) as error:
        raise TimeoutError(
            f"the launcher of job {path.stem} did not answer within {timeout_s:g} s: it is "
            "stopped, or its machine is very busy. Try again later."
        ) from error
    except (ConnectionError, FileNotFoundError) as error:
        raise _gone(path) from error
    if not line.endswith(b"\n"):
        raise _gone(path)
    return _read_answer(json.loads(line), path=path)


def find_job(given: str | None) -> Job:
    """Return the running job of this name or run folder, or the only one.

    Raises:
        ArgumentError: there is none, or several.
        StateError: the run folder's record of its launcher can't be read.
        TimeoutError: its launcher does not answer.
    """
    if given is None:
        live = live_sockets()
        job = _meet(live[0]) if len(live) == 1 else None
        rule = "must be given unless exactly one job runs"
    else:
        job = _job_called(given) or _job_in(Path(given))
        rule = "no job of this name runs here, nor one with this run folder"
    if job is None:
        raise ArgumentError(describe("job", given, rule=rule, way_out=_running()))
    return job


def wait_until_gone(job: Job, *, timeout_s: float) -> bool:
    """Wait for the end of a job's launcher and return whether it ended in time."""
    if sys.platform == "linux":
        return _process_ends(job.pid, timeout_s=timeout_s)
    deadline = time.monotonic() + timeout_s
    while is_live(job.path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _exchange(path: Path, request: bytes, *, timeout_s: float) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout_s)
        client.connect(os.fspath(path))
        client.sendall(request)
        with client.makefile("rb") as answers:
            return answers.readline()


def _gone(path: Path) -> ConnectionError:
    return ConnectionError(f"the launcher of job {path.stem} is gone. `elastane ps` lists jobs.")


def _read_answer(values: Mapping[str, Any], *, path: Path) -> Answer:
    if not values["ok"]:
        raise _ERRORS.get(values["error"], ElastaneError)(values["message"])
    job = Job(name=values["job"], run_dir=values["run_dir"], pid=values["pid"], path=path)
    return Answer(job=job, result=values["result"])


def _meet(path: Path) -> Job | None:
    try:
        return ask(path, "hello").job
    except ConnectionError:
        return None


def _job_called(name: str) -> Job | None:
    paths = paths_of(name) if is_job_name(name) else []
    return next((job for path in paths if (job := _meet(path)) is not None), None)


def _job_in(run_dir: Path) -> Job | None:
    """Return the job that runs in a folder; another job may have taken its name since."""
    record = run_dir / LAUNCHER_NAME
    if not record.is_file():
        return None
    try:
        name = str(json.loads(record.read_bytes())["job"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{record} is no launcher's record. Give the job's name instead."
        ) from error
    job = _job_called(name)
    return job if job is not None and Path(job.run_dir) == run_dir.resolve() else None


def _running() -> str:
    names = [_name_at(path) for path in live_sockets()]
    return f"Running: {', '.join(names)}." if names else "No job runs."


def _name_at(path: Path) -> str:
    try:
        job = _meet(path)
    except TimeoutError:
        job = None
    return path.stem if job is None else job.name


def _process_ends(pid: int, *, timeout_s: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)

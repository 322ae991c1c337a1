"""What the supervisor keeps in a run's folder: generations, the launcher's record, locks, logs.

Knows files and their form; nothing of stores or processes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastane.errors import ArgumentError, StateError, describe
from elastane.launch.jobs import LAUNCHER_NAME
from elastane.protocol import Generation

__all__ = [
    "GENERATIONS_NAME",
    "LauncherRecord",
    "add_generation",
    "lock_agent",
    "lock_run",
    "log_paths",
    "name_of",
    "newest_generation",
    "read_agent",
    "read_launcher",
    "tail_of",
    "write_agent",
    "write_launcher",
]

GENERATIONS_NAME = "generations.jsonl"
_TAIL_BYTES = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRecord:
    """What a launcher that is started again has to know of the one before it.

    Attributes:
        job: name of the job.
        pid: of the launcher.
        store: HOST:PORT of its store.
        state: "running", or how the job ended.
        target: how many workers were wanted.
        worker_ids: the last id that was given to a worker.
        attempt: how often the whole was started anew.
        agents: ids of all agents that there were.
    """

    job: str
    pid: int
    store: str
    state: str = "running"
    target: int = 1
    worker_ids: int = 0
    attempt: int = 0
    agents: list[str] = field(default_factory=list)


def read_launcher(run_dir: Path) -> LauncherRecord | None:
    """Return the record of the folder's last launcher, or `None` if there was none.

    Raises:
        StateError: the record can't be read.
    """
    path = run_dir / LAUNCHER_NAME
    if not path.exists():
        return None
    try:
        return LauncherRecord(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{path} is no launcher's record ({error}). Remove it if no job runs in this folder."
        ) from error


def write_launcher(run_dir: Path, record: LauncherRecord) -> None:
    """Replace the record of the launcher."""
    _replace(run_dir / LAUNCHER_NAME, asdict(record))


def add_generation(run_dir: Path, generation: Generation) -> None:
    """Append a generation to the folder's history."""
    with (run_dir / GENERATIONS_NAME).open("a") as file:
        file.write(generation.to_json() + "\n")


def newest_generation(run_dir: Path) -> Generation:
    """Return the last generation of the history, or generation 0; a torn line is passed over."""
    path = run_dir / GENERATIONS_NAME
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [one for line in lines[-3:] if (one := _parse(line)) is not None]
    return max(found, key=lambda one: one.number, default=Generation())


def write_agent(run_dir: Path, agent: str, workers: dict[str, Any]) -> None:
    """Replace the record of an agent's live workers."""
    _replace(run_dir / "agents" / f"{agent}.json", workers)


def read_agent(run_dir: Path, agent: str) -> dict[str, Any]:
    """Return the record of an agent's live workers; one that can't be read counts as empty."""
    try:
        return json.loads((run_dir / "agents" / f"{agent}.json").read_bytes())
    except (OSError, ValueError):
        return {}


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Keep other launchers out of a run folder for the length of a block.

    Raises:
        ArgumentError: another launcher runs there.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = _try_lock(run_dir / "launcher.lock")
    if lock is None:
        rule = "another launcher runs in this folder"
        way_out = "Choose another --run-dir, or end that job with `elastane stop`."
        raise ArgumentError(describe("run_dir", str(run_dir), rule=rule, way_out=way_out))
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def lock_agent(run_dir: Path, *, host: str, agent: str | None = None) -> Iterator[str]:
    """Take an agent id for the length of a block, and return it.

    Args:
        run_dir: the run's folder.
        host: whose first free id is taken if none is given.
        agent: the id to take.

    Raises:
        ArgumentError: an agent with the given id lives.
    """
    folder = run_dir / "agents"
    folder.mkdir(parents=True, exist_ok=True)
    number, name = 1, agent or host
    while (lock := _try_lock(folder / f"{name}.lock")) is None:
        if agent is not None:
            rule, way_out = "this agent of the job lives", "It goes on; no second one is needed."
            raise ArgumentError(describe("agent", agent, rule=rule, way_out=way_out))
        number += 1
        name = f"{host}-{number}"
    try:
        yield name
    finally:
        os.close(lock)


def name_of(worker: int, *, index: int = 0) -> str:
    """Return what a worker's process is called in logs: its id, with its number if not the first.

    Example:
        >>> name_of(3), name_of(3, index=1)
        ('3', '3.1')
    """
    return f"{worker}.{index}" if index else str(worker)


def log_paths(run_dir: Path, worker: int, *, index: int = 0) -> tuple[Path, Path]:
    """Return where standard output and standard error of a worker's process go."""
    stem = f"worker-{name_of(worker, index=index)}"
    return run_dir / "logs" / f"{stem}.out", run_dir / "logs" / f"{stem}.err"


def tail_of(path: Path, *, lines: int = 20) -> str:
    """Return the last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _parse(line: bytes) -> Generation | None:
    try:
        return Generation.from_json(line)
    except (ValueError, TypeError):
        return None


def _replace(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values))
    part.replace(path)


def _try_lock(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock

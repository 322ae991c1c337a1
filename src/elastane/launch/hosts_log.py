"""The change log beside a file of hosts: which machines came, went and failed, and why.

One JSON object a line, only ever appended. Knows the file's form; nothing of what happens.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

__all__ = ["HostChange", "add_change", "log_of", "newest_changes", "read_changes"]

Change = Literal["ADDED", "REMOVED", "FAILED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChange:
    """A line of the log.

    Attributes:
        number: grows by one with every line of the file, over all launchers.
        time: of the launcher's clock, ISO 8601 in UTC.
        change: ADDED, REMOVED or FAILED.
        host: the machine, as the file of hosts calls it.
        cause: a sentence.
        job: whose launcher wrote the line.
        slots: how many workers the machine may hold, 0 where nothing was started there.
    """

    number: int
    time: str
    change: Change
    host: str
    cause: str
    job: str
    slots: int = 0


def log_of(hosts: Path) -> Path:
    """Return where the change log of a file of hosts lies.

    Example:
        >>> log_of(Path("hosts.txt")).name
        'hosts.txt.log'
    """
    return hosts.with_name(f"{hosts.name}.log")


def add_change(
    path: Path, *, change: Change, host: str, cause: str, job: str, slots: int = 0
) -> HostChange:
    """Append a change under the next number, and return it. See `HostChange`."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another job may follow the same file
        text = _whole(file)
        number = max((one.number for one in _parse(text)), default=0) + 1
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        about = {"change": change, "host": host, "cause": cause, "job": job, "slots": slots}
        added = HostChange(number=number, time=time, **about)
        torn = bool(text) and not text.endswith(b"\n")
        file.write(b"\n" * torn + json.dumps(asdict(added)).encode() + b"\n")
    return added


def read_changes(path: Path) -> list[HostChange]:
    """Return all changes, oldest first; a torn line is passed over."""
    return _parse(path.read_bytes()) if path.exists() else []


def newest_changes(changes: Iterable[HostChange], *, job: str) -> dict[str, HostChange]:
    """Return the newest change of each host of a job."""
    return {one.host: one for one in changes if one.job == job}


def _whole(file: BinaryIO) -> bytes:
    file.seek(0, os.SEEK_SET)
    return file.read()


def _parse(text: bytes) -> list[HostChange]:
    found: list[HostChange] = []
    for line in text.splitlines():
        try:
            found.append(HostChange(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found

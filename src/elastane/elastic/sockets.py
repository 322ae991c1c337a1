"""Freeing whoever blocks on a connection: shut it. Above all, breaking a process group that blocks.

Gloo's own `abort` does not free a blocked operation, and a member that is no neighbour of a dead
one notices nothing until a time-out. Linux only (`/proc`); elsewhere the time-out must do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

__all__ = ["GroupSockets", "can_break", "shut_connections_to"]

_FILES = Path("/proc/self/fd")


def can_break() -> bool:
    """Return whether this system tells which sockets a process has open."""
    return _FILES.is_dir()


def _open_sockets() -> dict[int, str]:
    """Return this process's sockets: file descriptor -> `socket:[inode]`."""
    found: dict[int, str] = {}
    if can_break():
        for path in _FILES.iterdir():
            with suppress(OSError):  # closed in the meantime
                target = str(path.readlink())
                if target.startswith("socket:"):
                    found[int(path.name)] = target
    return found


def shut_connections_to(port: int) -> None:
    """Shut all connections of this process to a port, so that whoever waits on them goes on."""
    for number, target in _open_sockets().items():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            if copy.getpeername()[1:2] == (port,):
                _shut(number, target)


class GroupSockets:
    """Knows which sockets belong to the present process group, and can shut them from any thread.

    What a thread of somebody else opens while the group is being opened counts as the group's.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._before: dict[int, str] | None = None
        self._own: dict[int, str] = {}

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Take what is opened in the block for the group's; `shut` works inside it, too."""
        with self._lock:
            self._own, self._before = {}, _open_sockets()
        try:
            yield
        finally:
            with self._lock:
                self._own, self._before = self._opened_since(), None

    def shut(self) -> int:
        """Shut the group's sockets, so that whoever waits on them gets an error; say how many."""
        with self._lock:
            own = self._own if self._before is None else self._opened_since()
            return sum(_shut(number, target) for number, target in own.items())

    def forget(self) -> None:
        """Know of no group."""
        with self._lock:
            self._own = {}

    def _opened_since(self) -> dict[int, str]:
        before = self._before or {}
        return {fd: target for fd, target in _open_sockets().items() if before.get(fd) != target}


def _shut(number: int, target: str) -> bool:
    """Shut one connection, unless its descriptor has become another's.

    Gloo ends the process if its listening socket is shut.
    """
    try:
        if str((_FILES / str(number)).readlink()) != target:
            return False
        with socket.socket(fileno=os.dup(number)) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True

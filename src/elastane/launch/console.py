"""Shows the workers' logs on the console while they grow, each line with its worker's name.

Knows files and streams; nothing of processes: the logs go on without a console.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self, TextIO

from elastane.launch.folder import log_paths, name_of

__all__ = ["Console"]

_POLL_S = 0.1
_BLOCK_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class _Log:
    worker: int | None
    path: Path
    is_error: bool
    name: str = ""
    file: BinaryIO | None = None
    rest: bytes = b""
    ended: bool = False
    skip: bool = False


class Console:
    """Follows logs for the length of a block. Any thread may call its methods.

    Args:
        run_dir: the run's folder.
        out: where standard output goes, `None` for the present `sys.stdout`.
        err: where standard error and messages go, `None` for the present `sys.stderr`.
    """

    def __init__(
        self, run_dir: Path, *, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self._run_dir = run_dir
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._lock = threading.Lock()
        self._logs: list[_Log] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastane console", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for log in self._logs:
            log.ended = True
        self._show_all()

    def say(self, text: str) -> None:
        """Show a message of the supervisor's own."""
        with self._lock:
            _write(self._err, "".join(f"[elastane] {line}\n" for line in text.splitlines()))

    def follow(self, worker: int, *, from_end: bool = False, group_size: int = 1) -> None:
        """Show a worker's logs from now on, those of each of its processes."""
        for index in range(group_size):
            name = name_of(worker, index=index)
            paths = log_paths(self._run_dir, worker, index=index)
            logs = [
                _Log(worker=worker, name=name, path=path, is_error=is_error, skip=from_end)
                for path, is_error in zip(paths, (False, True), strict=True)
            ]
            with self._lock:
                self._logs += logs

    def follow_file(self, path: Path) -> None:
        """Show what is added to a file from now on; its lines say themselves whose they are."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        log = _Log(worker=None, path=path, is_error=False, skip=True)
        with self._lock:
            _read(log)  # opens it
            self._logs.append(log)

    def leave(self, worker: int) -> None:
        """Show the rest of an ended worker's logs and then no more."""
        with self._lock:
            for log in self._logs:
                log.ended = log.ended or log.worker == worker

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            self._show_all()

    def _show_all(self) -> None:
        with self._lock:
            for log in self._logs:
                self._show(log)
            self._logs = [log for log in self._logs if not log.ended]

    def _show(self, log: _Log) -> None:
        lines, log.rest = _read(log)
        if log.ended:
            lines, log.rest = [*lines, *([log.rest] if log.rest else [])], b""
            if log.file is not None:
                log.file.close()
        prefix = f"[worker {log.name}] " if log.name else ""
        text = "".join(f"{prefix}{line.decode(errors='replace')}\n" for line in lines)
        _write(self._err if log.is_error else self._out, text)


def _read(log: _Log) -> tuple[list[bytes], bytes]:
    """Return a log's new whole lines and what begins the next one."""
    if log.file is None:
        with suppress(FileNotFoundError):
            log.file = log.path.open("rb")
            log.file.seek(0, 2 if log.skip else 0)
    *lines, rest = (log.rest + (log.file.read(_BLOCK_BYTES) if log.file else b"")).split(b"\n")
    return lines, rest


def _write(stream: TextIO, text: str) -> None:
    """Write to a stream; a console that is gone must not end the job."""
    if text:
        with suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()

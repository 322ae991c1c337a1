"""The control socket of a running job: takes commands from `elastane scale`, `status`, `stop`.

Knows sockets, lines of JSON and the controller's four methods; nothing of workers or stores.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, Self

from elastane.errors import ArgumentError, ElastaneError, check_choice, check_whole, describe
from elastane.launch.line_server import MAX_LINE_BYTES, LineServer
from elastane.launch.socket_paths import is_live, locked, own_folder, paths_of, socket_path

__all__ = ["ControlServer", "Controller"]

_COMMANDS = ("hello", "kill", "scale", "status", "stop")
_IDLE_LIMIT_S = 10.0
_END_LIMIT_S = 2.0
_MAX_WAITING_CLIENTS = 100


class Controller(Protocol):
    """What the server calls, on its own thread, one call at a time.

    All clients wait while a method runs. Errors of elastane go to the client as they are.
    """

    def status(self) -> Mapping[str, Any]:
        """Return what `elastane status` shows."""
        ...

    def scale(self, n: int, worker: int | None = None) -> str:
        """Ask for `n` workers, and which one to give up first; return what will happen."""
        ...

    def stop(self) -> str:
        """Ask all workers to write a checkpoint and leave; return what will happen."""
        ...

    def kill(self) -> str:
        """End all workers at once; return what will happen."""
        ...


class ControlServer:
    """Answers commands for one job on its control socket, for the length of a block.

    Each line from a client is one JSON object, ``{"command": ..., ...}``; so is each answer. A
    client that takes too long is cut off.

    Args:
        controller: What is asked.
        job: Name of the job; only one of a name runs at a time.
        run_dir: The run's folder.
        idle_limit_s: Seconds that a client may take for a line, or to read an answer.

    Attributes:
        path: The control socket.

    Raises:
        ArgumentError: On enter, if a job of this name runs already or can't be called so.
        UsageError: On enter, if the folder for sockets is not safe from others.
    """

    path: Path

    def __init__(
        self,
        controller: Controller,
        *,
        job: str,
        run_dir: str | PathLike[str],
        idle_limit_s: float = _IDLE_LIMIT_S,
    ) -> None:
        self._controller = controller
        self._job = job
        self._run_dir = Path(run_dir).resolve()
        self._idle_limit_s = idle_limit_s

    def __enter__(self) -> Self:
        listener, self.path = _claim(self._job)
        self._inode = self.path.stat().st_ino
        self._server = LineServer(listener, answer=self._answer, idle_limit_s=self._idle_limit_s)
        self._thread = threading.Thread(
            target=self._server.run, name="elastane control", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The name goes while we still listen: nobody can have taken it for a dead launcher's yet.
        _give_up(self.path, inode=self._inode)
        self._server.end()
        # A method of the controller may be waiting for the thread that we are on.
        self._thread.join(_END_LIMIT_S)

    def _answer(self, line: bytes) -> bytes:
        about = {"job": self._job, "run_dir": str(self._run_dir), "pid": os.getpid()}
        return json.dumps({**about, **self._outcome(line)}).encode() + b"\n"

    def _outcome(self, line: bytes) -> Mapping[str, object]:
        try:
            return {"ok": True, "result": _plain(self._carry_out(_parse(line)))}
        except ElastaneError as error:
            return _refusal(error)
        except Exception as error:
            traceback.print_exc()  # a question must not end the launcher, nor hide its fault
            why = f"{type(error).__name__}: {error}"
            return _refusal(
                ElastaneError(f"the launcher of job {self._job} could not answer: {why}")
            )

    def _carry_out(self, request: Mapping[str, Any]) -> object:
        match check_choice("command", request.get("command"), _COMMANDS):
            case "status":
                return self._controller.status()
            case "scale":
                return self._scale(request.get("n"), request.get("worker"))
            case "stop":
                return self._controller.stop()
            case "kill":
                return self._controller.kill()
        return None

    def _scale(self, n: object, worker: object) -> str:
        way_out = "`elastane stop` ends the job."
        workers = check_whole("n", n, at_least=1, way_out=way_out)
        if worker is not None:
            way_out = "`elastane status` shows the ids of the workers."
            worker = check_whole("worker", worker, at_least=0, way_out=way_out)
        return self._controller.scale(workers, worker)


def _claim(job: str) -> tuple[socket.socket, Path]:
    """Return a listening socket for a job, and where it lies."""
    folder = own_folder()
    path = socket_path(job, folder=folder)
    with locked(folder):
        if any(is_live(one) for one in paths_of(job)):
            rule = "a job of this name runs already"
            way_out = "Choose another name, or end it with `elastane stop`."
            raise ArgumentError(describe("job", job, rule=rule, way_out=way_out))
        path.unlink(missing_ok=True)
        return _listen(path), path


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(_MAX_WAITING_CLIENTS)
    except BaseException:
        listener.close()
        raise
    return listener


def _give_up(path: Path, *, inode: int) -> None:
    """Remove a socket, unless it is no more the one that we made."""
    with suppress(FileNotFoundError), locked(path.parent):
        if path.stat().st_ino == inode:
            path.unlink()


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        way_out = 'Send {"command": "status"}, for example.'
        rule = f"a request is one JSON object on one line of at most {MAX_LINE_BYTES} bytes"
        raise ArgumentError(describe("request", line, rule=rule, way_out=way_out))
    return request


def _refusal(error: ElastaneError) -> Mapping[str, object]:
    return {"ok": False, "error": type(error).__name__, "message": str(error)}


def _plain(value: object) -> object:
    """Return `value` as JSON can hold it; numbers that are not finite become null."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)

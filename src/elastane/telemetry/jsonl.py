"""Appends events to the file of a run folder.

Knows the file format, one JSON object a line; nothing of what the events mean.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from elastane.errors import UnsupportedError, UsageError, describe
from elastane.telemetry.reader import EVENTS_NAME, parse_event


class JsonlSink:
    """Appends one JSON object a line to ``RUN_DIR/events.jsonl``; readers see whole lines only.

    Numbers that are not finite become null. An existing file is gone on with, as a resumed run
    does; if its last line was cut short, that line is removed first. The file is opened, and the
    folder created, by the first event: a sink that is only kept ready touches nothing. One process
    at a time may write.

    Args:
        run_dir: Folder of the run.

    Example:
        >>> import tempfile
        >>> from elastane.telemetry import read_events
        >>> with tempfile.TemporaryDirectory() as run_dir:
        ...     sink = JsonlSink(run_dir)
        ...     sink.write({"event": "end", "time": 0.0, "seconds": float("inf")})
        ...     sink.close()
        ...     read_events(run_dir)
        [{'event': 'end', 'time': 0.0, 'seconds': None}]
    """

    def __init__(self, run_dir: str | PathLike[str]) -> None:
        self._path = Path(run_dir) / EVENTS_NAME
        self._file: BinaryIO | None = None
        self._closed = self._has_warned = False

    def write(self, event: Mapping[str, object], /) -> None:
        """Append one event and hand it to the operating system.

        Raises:
            UnsupportedError: A value is not None, bool, int, float, str, or a list or dict of them.
            UsageError: The sink is closed.
        """
        if self._closed:
            raise UsageError(f"write to {self._path} after close(). Emit before the run ends.")
        line = json.dumps(_plain(event, name=str(event.get("event", "event"))), allow_nan=False)
        try:
            if self._file is None:
                self._file = _open(self._path)
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _give_up(self, error: OSError) -> None:
        """Lose an event rather than the training; the next one tries the file anew."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"events are lost, {self._path} can't be written: {error}", stacklevel=2)


def _open(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    _mend_last_line(file)
    return file


def _plain(value: object, *, name: str) -> object:
    """Return `value` as JSON can hold it; `name` is where it stands, for the error."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_key(key, name=name): _plain(value[key], name=f"{name}.{key}") for key in value}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name=f"{name}[{index}]") for index, item in enumerate(value)]
    rule = f"{type(value).__name__} can't be written to {EVENTS_NAME}"
    way_out = "Make it a plain number or string first; a tensor with .item()."
    raise UnsupportedError(describe(name, value, rule=rule, way_out=way_out))


def _key(key: object, *, name: str) -> str:
    if isinstance(key, str):
        return key
    rule = f"a key of {name} must be a string"
    raise UnsupportedError(describe("key", key, rule=rule, way_out="Use str(key)."))


def _mend_last_line(file: BinaryIO) -> None:
    """Leave the file with a whole last line, so that what is appended starts a new one."""
    start, line = _last_line(file)
    if parse_event(line) is None:
        file.truncate(start)
    elif not line.endswith(b"\n"):
        file.write(b"\n")


def _last_line(file: BinaryIO, *, block_bytes: int = 65536) -> tuple[int, bytes]:
    """Return where the last line starts, and the line; reads from the end, files may be long."""
    start = file.seek(0, os.SEEK_END)
    tail = b""
    while start > 0 and b"\n" not in tail[:-1]:
        size = min(block_bytes, start)
        start = file.seek(start - size)
        tail = file.read(size) + tail
    cut = tail.rfind(b"\n", 0, max(len(tail) - 1, 0)) + 1
    return start + cut, tail[cut:]

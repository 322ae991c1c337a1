"""Where the control sockets of this user's jobs lie, what they are called, and whether they live.

Knows names, folders and permissions; nothing of what is said through a socket.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import stat
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastane import _env
from elastane.errors import ArgumentError, UsageError, describe

__all__ = [
    "check_job_name",
    "is_job_name",
    "is_live",
    "live_sockets",
    "locked",
    "own_folder",
    "paths_of",
    "socket_path",
]

_SUFFIX = ".sock"
_MAX_PATH_BYTES = 100  # Linux takes 107, macOS 103
_CONNECT_LIMIT_S = 2.0


def is_job_name(name: str) -> bool:
    """Return whether a job can be called so."""
    return name.isprintable() and name == name.strip() and "/" not in name and name[:1] not in "-."


def check_job_name(name: str) -> str:
    """Return `name`, or raise `ArgumentError` if a job can't be called so."""
    if not is_job_name(name):
        rule = "a job's name is printable, without / or spaces around it, and no - or . comes first"
        way_out = "Use letters, digits, - and _."
        raise ArgumentError(describe("job", name, rule=rule, way_out=way_out))
    return name


def own_folder() -> Path:
    """Return the folder for the sockets of this user's jobs; it is made if it is missing.

    It is ``$XDG_RUNTIME_DIR/elastane``, or ``elastane-UID`` in the folder for temporary files if
    this user has no such folder.

    Raises:
        UsageError: it belongs to somebody else, or others may look into it.
    """
    folder = _candidates()[0]
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_own(folder):
        rule = "is another user's, or no folder, and can't hold this user's control sockets"
        way_out = "Set XDG_RUNTIME_DIR to a folder of your own."
        raise UsageError(describe("folder", str(folder), rule=rule, way_out=way_out))
    _check_private(folder)
    return folder


def socket_path(job: str, *, folder: Path) -> Path:
    """Return where a job's socket lies in `folder`; a hash stands for a name that is too long.

    Raises:
        ArgumentError: a job can't be called so, or the folder's own path is too long.
    """
    # A name that is typed again may have its accents composed in another way.
    name = unicodedata.normalize("NFC", check_job_name(job))
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    for path in (folder / f"{name}{_SUFFIX}", folder / f"{digest}{_SUFFIX}"):
        if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
            return path
    rule = f"too long: the path of a Unix socket in it has more than {_MAX_PATH_BYTES} bytes"
    way_out = "Set XDG_RUNTIME_DIR, or TMPDIR, to a folder with a shorter path."
    raise ArgumentError(describe("folder", str(folder), rule=rule, way_out=way_out))


def paths_of(job: str) -> list[Path]:
    """Return where a job's socket may be, in the folders that exist."""
    return [socket_path(job, folder=folder) for folder in _existing_folders()]


def live_sockets() -> list[Path]:
    """Return the sockets of this user's running jobs, by name; those of dead launchers go."""
    found = [path for folder in _existing_folders() for path in folder.glob(f"*{_SUFFIX}")]
    return sorted((path for path in found if _is_live_or_removed(path)), key=lambda one: one.name)


def is_live(path: Path) -> bool:
    """Return whether a process listens on this socket, be it able to answer or not."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_CONNECT_LIMIT_S)
        try:
            client.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (BlockingIOError, TimeoutError):
            return True  # so many wait for it already that it takes no more
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other launchers and commands from adding and removing sockets in `folder`."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # Closing is not enough: a child that was forked meanwhile holds the lock as well.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _candidates() -> list[Path]:
    """Return where sockets may be: a batch job and a shell can differ in XDG_RUNTIME_DIR."""
    folders = [Path(tempfile.gettempdir()) / f"elastane-{os.getuid()}"]
    runtime = _env.runtime_dir()
    if runtime is not None and runtime.is_absolute() and _is_own(runtime):
        folders.insert(0, runtime / "elastane")
    return folders


def _existing_folders() -> list[Path]:
    """Return the candidates that are this user's; no job of this user can be in another."""
    folders = [folder for folder in _candidates() if _is_own(folder)]
    for folder in folders:
        _check_private(folder)
    return folders


def _is_own(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _check_private(folder: Path) -> None:
    if folder.lstat().st_mode & 0o077:
        rule = "others may look into it, and who reaches a control socket can stop the job"
        way_out = f"Run `chmod 700 {folder}`."
        raise UsageError(describe("folder", str(folder), rule=rule, way_out=way_out))


def _is_live_or_removed(path: Path) -> bool:
    if is_live(path):
        return True
    with locked(path.parent):
        live = is_live(path)  # a launcher may have taken the name just now
        if not live:
            path.unlink(missing_ok=True)
    return live

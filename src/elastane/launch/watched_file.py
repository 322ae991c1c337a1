"""A file that people and programs rewrite: read again once it has stood still for a moment.

Knows times, sizes and inodes (an editor replaces a file by renaming another); not what it says.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["WatchedFile"]

_SETTLE_LOOKS = 2

Signature = tuple[int, int, int]  # time of change, size, inode


class WatchedFile:
    """Tells of a file's changes to whoever looks now and then.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told: Signature | None = None  # what is there now is told of, too
        self._seen = self._signature()
        self._still = 0

    def has_changed(self) -> bool:
        """Return whether it was changed, or taken away, since this last said so.

        A change counts once two more looks have found it the same.
        """
        signature = self._signature()
        self._still = self._still + 1 if signature == self._seen else 0
        self._seen = signature
        if signature == self._told or self._still < _SETTLE_LOOKS:
            return False
        self._told = signature
        return True

    def _signature(self) -> Signature | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

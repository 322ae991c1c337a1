"""Folders that appear and vanish by one rename, so that nobody sees half of one.

Knows names and renames; nothing of what the folders hold.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None

__all__ = ["Shelf", "exclusive", "make_durable"]


class Shelf:
    """A folder of folders, each whole or under a temporary name: `.NAME.RANDOM.part`.

    What carries a temporary name and is not of this object is taken for the rest of a dead
    process. If its writer lives after all, its rename fails: it can't publish what is removed.

    Args:
        folder: is created with the first draft.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drafts: set[Path] = set()

    def new_draft(self, name: str) -> Path:
        """Return a temporary path for a folder that may be published as `name`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._part(name)
        self._drafts.add(path)
        return path

    def publish(self, draft: Path, *, name: str) -> Path:
        """Give a draft its name, durably; no folder may have it yet."""
        path = self._folder / name
        draft.rename(path)
        make_durable(self._folder)
        self._drafts.discard(draft)
        return path

    def remove(self, path: Path) -> None:
        """Remove a folder, a draft or not, if it is there; its name vanishes before its files."""
        self._drafts.discard(path)
        aside = self._part("removed")
        with suppress(FileNotFoundError):
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove what dead processes left under temporary names."""
        for path in self._folder.glob(".*.part"):
            if path not in self._drafts:
                self.remove(path)

    def _part(self, name: str) -> Path:
        return self._folder / f".{name}.{secrets.token_hex(6)}.part"


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Be the only process in a block for this folder, where the system knows file locks."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
        yield


def make_durable(folder: Path) -> None:
    """Have the operating system write the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

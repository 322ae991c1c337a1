"""What lies in the checkpoints' folder after a blackout, and how it is damaged on purpose.

Knows files and the store that reads them; nothing of training or of processes.
"""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from elastane.elastic.checkpoint import Checkpoint, CheckpointStore
from elastane.elastic.manifest import inspect_folder

__all__ = ["DAMAGES", "Look", "damage", "drafts", "look"]

DAMAGES = ("truncated", "bit flipped", "file deleted")
_DRAFT = re.compile(r"\.step-(\d+).*\.part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was found.

    Attributes:
        newest: the newest whole checkpoint, which loads; `None` if there is none.
        before: the whole one before it.
        draft_step: step of the newest checkpoint that was being written.
        torn: published ones that are not whole.
    """

    newest: Checkpoint | None
    before: Checkpoint | None
    draft_step: int | None
    torn: frozenset[str]


def drafts(folder: Path) -> dict[str, int]:
    """Return the steps of the checkpoints that are being written, by name of their folder."""
    names = [path.name for path in folder.glob(".step-*.part")]
    return {name: int(found[1]) for name in names if (found := _DRAFT.fullmatch(name))}


def look(folder: Path, *, known_drafts: frozenset[str]) -> Look:
    """Look at a folder that nobody writes to, and load the newest checkpoint.

    Args:
        folder: of the checkpoints.
        known_drafts: names that are older than what is of interest.

    Raises:
        StateError: the newest one does not load.
    """
    store = CheckpointStore(folder)
    paths = [path for path in folder.glob("step-*") if path.is_dir()]
    whole = [path for path in paths if inspect_folder(path)[0] is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what was damaged on purpose
        newest = store.newest()
    if newest is not None:
        store.load(newest)
    before = [Checkpoint(path=p, manifest=m) for p in whole if (m := inspect_folder(p)[0])]
    before = [one for one in before if newest is not None and one.place < newest.place]
    fresh = [step for name, step in drafts(folder).items() if name not in known_drafts]
    return Look(
        newest=newest,
        before=max(before, key=lambda one: one.place, default=None),
        draft_step=max(fresh, default=None),
        torn=frozenset(path.name for path in {*paths} - {*whole}),
    )


def damage(checkpoint: Checkpoint, kind: str, *, draw: random.Random) -> str:
    """Damage one file of a checkpoint and return its name."""
    path = draw.choice(sorted(one for one in checkpoint.path.iterdir() if one.is_file()))
    content = bytearray(path.read_bytes())
    if kind == "file deleted":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    return path.name

"""Checkpoints that are whole or not there: published by one rename, checksummed, the last few kept.

Knows folders of one run; nothing of training, of groups or of when to save.

    step-000000123-g7/           a checkpoint of generation 7 (none is named if it is 0); with -2
                                 behind it where that step is saved again
        manifest.json            step, generation, facts; size and checksum of every other file
        .metadata, __0_0.distcp  tensors, in torch.distributed.checkpoint's format
    .step-000000123.RANDOM.part/ one that is being written, or was when its writer died
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from elastane.elastic.dcp import METADATA_NAME, read_tensors, write_tensors
from elastane.elastic.flatten import flatten_state, unflatten_state
from elastane.elastic.folders import Shelf, make_durable
from elastane.elastic.manifest import Manifest, checksum, inspect_folder, write_manifest
from elastane.errors import StateError, UnsupportedError, check_whole

__all__ = ["Checkpoint", "CheckpointStore", "Draft"]

_NAME = re.compile(r"step-(\d{9,})(?:-g(\d+))?(?:-(\d+))?")
_STATE_KEY = "elastane.state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was whole when it was looked at.

    Attributes:
        path: its folder.
        manifest: what the folder says of itself.
    """

    path: Path
    manifest: Manifest

    @property
    def place(self) -> tuple[int, int]:
        """Its generation and step: a checkpoint is newer than all with a smaller place."""
        return self.manifest.generation, self.manifest.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checkpoint that is written and durable, but not published.

    Attributes:
        path: its temporary folder.
        manifest: what the folder says of itself.
    """

    path: Path
    manifest: Manifest


class CheckpointStore:
    """The checkpoints of one run.

    One process at a time should write; any may read. A writer that dies leaves at most a `.part`
    folder, which the next save removes.

    Args:
        folder: where they lie; it is created by the first save.
        keep: how many whole checkpoints are kept.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = CheckpointStore(folder)
        ...     _ = store.save({"w": torch.ones(2), "lr": 0.1}, step=7, facts={"progress": 7.0})
        ...     store.load(store.newest())[0]
        {'w': tensor([1., 1.]), 'lr': 0.1}
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 3) -> None:
        self.folder = Path(folder)
        self._keep = check_whole("keep", keep, at_least=1, way_out="Keep the last 3, for example.")
        self._shelf = Shelf(self.folder)
        self._known_whole: set[Path] = set()

    def save(
        self,
        tree: object,
        *,
        step: int,
        generation: int = 0,
        facts: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Write and publish a checkpoint and remove old ones; see `write`, `publish`, `prune`."""
        draft = self.write(tree, step=step, generation=generation, facts=facts)
        checkpoint = self.publish(draft)
        self.prune(newest=checkpoint)
        return checkpoint

    def write(
        self,
        tree: object,
        *,
        step: int,
        generation: int = 0,
        facts: Mapping[str, Any] | None = None,
    ) -> Draft:
        """Write a checkpoint that nobody sees before it is published. Needs no group.

        Args:
            tree: the state; `flatten_state` says what it may hold. Each tensor's key in DCP is
                its place in the tree, as in `model.conv.weight`.
            step: committed steps.
            generation: membership that writes.
            facts: plain JSON values to be known without reading tensors.

        Raises:
            UnsupportedError: something in the tree or the facts can't be saved.
            OSError: the folder can't be written to.
        """
        check_whole("step", step, at_least=0, way_out="Pass the number of committed steps.")
        tensors = _take_apart(tree)
        self._shelf.remove_leftovers()
        path = self._shelf.new_draft(_name(step, generation=generation))
        try:
            write_tensors(path, tensors)
            manifest = write_manifest(path, step=step, generation=generation, facts=facts or {})
            make_durable(path)
        except BaseException:
            self._shelf.remove(path)
            raise
        return Draft(path=path, manifest=manifest)

    def publish(self, draft: Draft) -> Checkpoint:
        """Make a draft a checkpoint, by one rename.

        Raises:
            OSError: the draft is gone, or the folder can't be written to.
        """
        path = self._shelf.publish(
            draft.path,
            name=self._free_name(_name(draft.manifest.step, generation=draft.manifest.generation)),
        )
        self._known_whole.add(path)
        return Checkpoint(path=path, manifest=draft.manifest)

    def prune(self, *, newest: Checkpoint) -> None:
        """Remove what is older than the last whole checkpoints; of one step's the last one stays.

        Args:
            newest: stays in any case.

        Raises:
            OSError: something can't be removed; the checkpoints that count are not touched.
        """
        whole: set[tuple[int, ...]] = set()
        for path in reversed(self._published()):
            place = _rank(path)[:2]
            if len(whole) < self._keep and place not in whole:
                whole |= {place} if self._is_whole(path) else set()
            elif path != newest.path:
                self._known_whole.discard(path)
                self._shelf.remove(path)

    def discard(self, draft: Draft) -> None:
        """Remove a draft."""
        self._shelf.remove(draft.path)

    @property
    def last_generation(self) -> int:
        """The latest generation that has published a checkpoint here; 0 if none has."""
        return max((_rank(path)[0] for path in self._published()), default=0)

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; each one that is not whole is named in a warning.

        Sizes and checksums of all files are compared before anything in them is parsed.

        Raises:
            StateError: there are some and none is whole, or the newest one is of a format that
                this version does not know.
        """
        problems: list[str] = []
        paths = self._published()
        for path in reversed(paths):
            manifest, problem = _inspect(path)
            if manifest is not None:
                return Checkpoint(path=path, manifest=manifest)
            problems.append(f"{path.name} {problem}")
            if path != paths[0]:
                text = f"checkpoint {path} {problem}: the one before is used"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        if problems:
            raise StateError(
                f"none of the checkpoints in {self.folder} is whole ({'; '.join(problems)}): move "
                "the folder away to start from the beginning"
            )
        return None

    def load(self, checkpoint: Checkpoint) -> tuple[Any, Manifest]:
        """Return the state that was saved, on the CPU, and the checkpoint's manifest.

        Needs no group, and nothing of the model. Only names of DCP's metadata are unpickled.

        Raises:
            StateError: the checkpoint has changed since it was looked at, or was not written by
                elastane.
        """
        try:
            metadata = (checkpoint.path / METADATA_NAME).read_bytes()
        except OSError as error:
            raise StateError(f"checkpoint {checkpoint.path} can't be read, {error}") from error
        _, digest = checkpoint.manifest.files.get(METADATA_NAME, (0, ""))
        if checksum(metadata) != digest:
            raise StateError(f"checkpoint {checkpoint.path} has changed: call newest() again")
        file_names = checkpoint.manifest.files.keys()
        tensors = read_tensors(checkpoint.path, metadata=metadata, file_names=file_names)
        return _assemble(tensors, checkpoint.path), checkpoint.manifest

    def _published(self) -> list[Path]:
        """Return the folders of checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(paths, key=_rank)

    def _free_name(self, name: str) -> str:
        """Return the name, or one after it: nothing is replaced, not even if damaged."""
        wanted = _rank_of(name)[:2]
        attempts = [a for *place, a in map(_rank, self._published()) if tuple(place) == wanted]
        return f"{name}-{max(attempts) + 1}" if attempts else name

    def _is_whole(self, path: Path) -> bool:
        """Return whether a checkpoint is whole; each is read once."""
        if path not in self._known_whole:
            with suppress(StateError):
                if _inspect(path)[0] is not None:
                    self._known_whole.add(path)
        return path in self._known_whole


def _name(step: int, *, generation: int) -> str:
    return f"step-{step:09d}" + (f"-g{generation}" if generation else "")


def _rank(path: Path) -> tuple[int, int, int]:
    """Return (generation, step, attempt): by this, checkpoints are older or newer.

    The generation comes first, since what a later one has not taken over is void, whatever its
    step.
    """
    return _rank_of(path.name)


def _rank_of(name: str) -> tuple[int, int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[2] or 0), int(match[1]), int(match[3] or 1)


def _inspect(path: Path) -> tuple[Manifest | None, str]:
    """Return a folder's manifest, or `None` and what is wrong."""
    manifest, problem = inspect_folder(path)
    if manifest is not None and (manifest.generation, manifest.step) != _rank(path)[:2]:
        return None, f"holds the checkpoint {_name(manifest.step, generation=manifest.generation)}"
    return manifest, problem


def _take_apart(tree: object) -> dict[str, torch.Tensor]:
    """Return the tree as nothing but tensors; the rest of it is the text in one of them."""
    flat = flatten_state(tree)
    if _STATE_KEY in flat.names:
        raise UnsupportedError(f"the state has a tensor at {_STATE_KEY!r}: put it elsewhere")
    state = json.dumps({"skeleton": flat.skeleton, "names": flat.names}).encode()
    text = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    return {_STATE_KEY: text, **dict(zip(flat.names, flat.tensors, strict=True))}


def _assemble(tensors: dict[str, torch.Tensor], path: Path) -> Any:
    """Return the tree of which these are the tensors."""
    try:
        state = json.loads(tensors[_STATE_KEY].numpy().tobytes())
        ordered = [tensors[name] for name in state["names"]]
        return unflatten_state(state["skeleton"], ordered)
    except (LookupError, TypeError, ValueError) as error:
        raise StateError(f"checkpoint {path} was not written by elastane, {error!r}") from error

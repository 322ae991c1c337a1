"""When a run writes checkpoints, and which it goes on from. Rank 0 writes, beside training.

Knows the saver and its store; nothing of steps' insides, groups, or who decides on members.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from elastane.batching import World
from elastane.elastic.checkpoint import Checkpoint, CheckpointStore
from elastane.elastic.folders import exclusive
from elastane.elastic.saver import Outcome, Saver, stage
from elastane.elastic.whole import gathered
from elastane.errors import ArgumentError, StateError, check_positive, check_whole, describe

__all__ = ["Checkpointing", "Keeper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """How often a run writes a durable checkpoint, and where.

    A checkpoint holds model, optimizer and session. It is written by rank 0 beside training, and
    published once its step is final on all workers. A run that is started again with the same
    folder goes on from the newest whole one, with any number of workers.

    Attributes:
        every_s: seconds between two; `None` for no clock.
        every_steps: optimizer steps between two; `None` for no count.
        keep: how many are kept.
        folder: where they lie; by default `checkpoints` in the run's folder.
    """

    every_s: float | None = 60.0
    every_steps: int | None = None
    keep: int = 3
    folder: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.every_s is not None:
            check_positive("every_s", self.every_s, way_out="Seconds, or None for no clock.")
        if self.every_steps is not None:
            way_out = "Optimizer steps, or None for no count."
            check_whole("every_steps", self.every_steps, at_least=1, way_out=way_out)
        check_whole("keep", self.keep, at_least=1, way_out="Keep the last 3, for example.")

    def is_due(self, *, steps: int, seconds: float) -> bool:
        """Return whether to write one, this long after the last."""
        by_count = self.every_steps is not None and steps >= self.every_steps
        return by_count or (self.every_s is not None and seconds >= self.every_s)


class Keeper:
    """Keeps the checkpoints of a run; without a folder it does nothing.

    Args:
        checkpointing: how often and where, or `None`.
        run_dir: the run's folder, or `None`.
        in_shards: whether each worker has a part of the state only: then all of them must call
            `committed` and `finished` alike, and rank 0 writes what they put together.

    Raises:
        ArgumentError: checkpoints without any folder.
    """

    def __init__(
        self,
        checkpointing: Checkpointing | None,
        *,
        run_dir: str | PathLike[str] | None,
        in_shards: bool = False,
    ) -> None:
        self._policy = checkpointing
        self._in_shards = in_shards
        self._store: CheckpointStore | None = None
        if checkpointing is not None:
            folder = _folder(checkpointing, run_dir=run_dir)
            self._store = CheckpointStore(folder, keep=checkpointing.keep)
        self._saver: Saver | None = None
        self._state: Callable[[], Mapping[str, Any]] = dict
        self._world = World()
        self._last_step = self._first_generation = 0
        self._last_time = time.monotonic()

    @contextmanager
    def running(self, state: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Write what `state` returns, for the length of a block."""
        if self._store is None:
            yield
            return
        with Saver(self._store) as self._saver:
            self._state, self._last_time = state, time.monotonic()
            self._first_generation = self._store.last_generation
            try:
                yield
            finally:
                self._saver.wait()
                self._state = dict
        self._saver = None

    def entered(self, world: World) -> None:
        """Write from now on if this worker is rank 0."""
        self._world = world

    def wishes(self, step: int) -> bool:
        """Return, on rank 0, whether it is time for a checkpoint of a step that is being made."""
        if self._policy is None or self._saver is None or self._world.rank != 0:
            return False
        if self._in_shards and self._saver.is_busy:
            return False  # all workers would put together what can't be written
        seconds = time.monotonic() - self._last_time
        return self._policy.is_due(steps=step - self._last_step, seconds=seconds)

    def committed(self, step: int, *, wished: bool) -> None:
        """Start to write a checkpoint of a step, if rank 0 wished for one while it was made.

        It is not published before `settled`.
        """
        if wished:
            self._begin(step)

    def finished(self, step: int) -> None:
        """Write the last checkpoint of a run, so that a run that is over is known to be over."""
        if self._saver is not None:
            self._saver.confirm(step)
            self._saver.wait()
            self._begin(step)

    def _begin(self, step: int) -> None:
        if self._saver is None:
            return
        is_writer = self._world.rank == 0 and step != self._last_step
        staged = self._staged(keep=is_writer)
        if is_writer and self._saver.begin(staged, step=step, generation=self._generation):
            self._last_step, self._last_time = step, time.monotonic()

    def _staged(self, *, keep: bool) -> Any:
        """Return a copy of the state, if it is to be kept; all workers make one out of shards."""
        if self._in_shards:
            return gathered(self._state(), keep=keep)
        return stage(self._state()) if keep else None

    def settled(self, step: int) -> list[Outcome]:
        """Publish what is final, drop what is void; return how earlier saves ended."""
        if self._saver is None:
            return []
        self._saver.confirm(step)
        self._saver.discard(step + 1)
        return self._saver.outcomes()

    def save(self, step: int, *, writes: bool = True) -> None:
        """Write and publish a checkpoint of a final step now, and wait for it.

        Several workers may do so at once when they have lost each other: one of them writes.
        Where each has a part of the state only, all that hold a copy of it must, and they must not
        be lost.

        Args:
            step: committed steps.
            writes: whether this process does, or only gives its part of the state to one that does.
        """
        if self._store is None or self._saver is None or self._policy is None:
            return
        state = gathered(self._state(), keep=writes) if self._in_shards else self._state()
        if not writes:
            return
        self._saver.discard(0)
        self._saver.wait()
        with exclusive(self._store.folder):
            newest: Checkpoint | None = None
            with suppress(StateError):  # a whole one is all the more wanted
                newest = self._store.newest()
            generation = self._generation
            if newest is None or newest.place < (generation, step):
                self._store.save(state, step=step, generation=generation)

    def newest(self) -> Mapping[str, Any] | None:
        """Return the state in the newest whole checkpoint, if there is one."""
        checkpoint = None if self._store is None else self._store.newest()
        if checkpoint is None or self._store is None:
            return None
        state, manifest = self._store.load(checkpoint)
        self._last_step, self._last_time = manifest.step, time.monotonic()
        return state

    @property
    def _generation(self) -> int:
        """The present generation, or one that wrote here before numbers began anew.

        Known since the block began: what a later generation has written since then is none of a
        worker's that has been left behind.
        """
        return max(self._world.generation, self._first_generation)


def _folder(checkpointing: Checkpointing, *, run_dir: str | PathLike[str] | None) -> Path:
    if checkpointing.folder is not None:
        return Path(checkpointing.folder)
    if run_dir is None:
        rule = "has no folder, and the session no run_dir"
        way_out = "Give one of them, for example Checkpointing(folder='checkpoints')."
        raise ArgumentError(describe("checkpoint", checkpointing, rule=rule, way_out=way_out))
    return Path(run_dir) / "checkpoints"

"""Checkpoints beside training: a thread writes what was staged, and publishes what is final.

Knows one save at a time and what may become of it; nothing of when a step is final, or of groups.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

from elastane.elastic.checkpoint import Checkpoint, CheckpointStore, Draft
from elastane.elastic.flatten import flatten_state, unflatten_state

__all__ = ["Outcome", "Saver", "stage"]

_Action = Literal["write", "publish", "discard", "forget"]


def stage(tree: object) -> Any:
    """Return a copy of a state tree on the CPU. The only part of a save that training waits for.

    Raises:
        UnsupportedError: something in the tree can't be saved.

    Example:
        >>> import torch
        >>> weight = torch.ones(1)
        >>> staged = stage({"weight": weight})
        >>> _ = weight.zero_()
        >>> staged
        {'weight': tensor([1.])}
    """
    flat = flatten_state(tree)
    return unflatten_state(flat.skeleton, [tensor.to("cpu", copy=True) for tensor in flat.tensors])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a save ended.

    Attributes:
        step: that was saved.
        path: the checkpoint's folder; "" if it was discarded or failed.
        seconds: time to write and publish it, without waiting.
        error: why it failed, or "".
    """

    step: int
    path: str = ""
    seconds: float = 0.0
    error: str = ""


@dataclass(slots=True, kw_only=True)
class _Job:
    """The save under way."""

    tree: object
    step: int
    generation: int
    facts: Mapping[str, Any]
    draft: Draft | None = None
    final: bool = False
    void: bool = False
    seconds: float = 0.0

    def next_action(self, *, closing: bool) -> _Action | None:
        """Return what is to be done now; `None`: wait for a decision."""
        void = self.void or (closing and not self.final)
        if self.draft is None:
            return "forget" if void else "write"
        if void:
            return "discard"
        return "publish" if self.final else None


class Saver:
    """Writes checkpoints in a thread of its own, one at a time, for the length of a `with` block.

    A save is published only when its step is known to be final: `confirm`. Nothing that goes
    wrong with it reaches training but as a warning, from the next call of any method; the next
    `begin` is the next attempt. At the end of the block a save that is not confirmed is dropped.

    Args:
        store: where to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = CheckpointStore(folder)
        ...     with Saver(store) as saver:
        ...         _ = saver.begin(stage({"lr": 0.1}), step=5)
        ...         saver.confirm(5)
        ...     store.newest().manifest.step
        5
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._outcomes: list[Outcome] = []
        self._unsaid: list[str] = []
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="elastane saver", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._warn()

    def begin(
        self,
        staged: object,
        *,
        step: int,
        generation: int = 0,
        facts: Mapping[str, Any] | None = None,
    ) -> bool:
        """Start to save what `stage` returned, unless a save is under way.

        Args:
            staged: tree that nobody changes any more.
            step: committed steps.
            generation: membership that writes.
            facts: plain JSON values to be known without reading tensors.

        Returns:
            Whether it was started; if not, a warning says what it would have to wait for.
        """
        job = _Job(tree=staged, step=step, generation=generation, facts=facts or {})
        with self._changed:
            busy = self._job
            if busy is None:
                self._job = job
                self._changed.notify_all()
            else:
                state = "being written" if busy.draft is None else "waiting to be confirmed"
                self._unsaid.append(
                    f"no checkpoint of step {step}: that of step {busy.step} is still {state}"
                )
        self._warn()
        return busy is None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        with self._changed:
            return self._job is not None

    def confirm(self, step: int) -> None:
        """Say that `step`, and so all before it, is final: a save of it may be published."""
        with self._changed:
            if self._job is not None and self._job.step <= step and not self._job.void:
                self._job.final = True
                self._changed.notify_all()
        self._warn()

    def discard(self, step: int) -> None:
        """Say that `step`, and so all after it, is void: a save of it is to be removed."""
        with self._changed:
            if self._job is not None and self._job.step >= step and not self._job.final:
                self._job.void = True
                self._changed.notify_all()
        self._warn()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do that has been decided.

        A save that is neither confirmed nor discarded is waited for until it is written.

        Args:
            timeout_s: limit; `None` for none.

        Returns:
            Whether the end was reached in time.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._action() is None, timeout_s)
        self._warn()
        return done

    def outcomes(self) -> list[Outcome]:
        """Return how the saves ended that did so since the last call."""
        with self._changed:
            ended, self._outcomes = self._outcomes, []
        self._warn()
        return ended

    def _action(self) -> _Action | None:
        return None if self._job is None else self._job.next_action(closing=self._closing)

    def _warn(self) -> None:
        """Say in the calling thread what went wrong in the other one."""
        with self._changed:
            unsaid, self._unsaid = self._unsaid, []
        for text in unsaid:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _work(self) -> None:
        """Do what there is to do until the block ends."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._action() is not None or self._closing)
                job, action = self._job, self._action()
            if job is None or action is None:
                return
            outcome = self._attempt(job, action)
            with self._changed:
                if outcome is not None:
                    self._end(outcome)
                self._changed.notify_all()

    def _attempt(self, job: _Job, action: _Action) -> Outcome | None:
        """Do one thing for a save; return how the save ended, if it did."""
        start = time.monotonic()
        try:
            path = self._do(job, action)
        except Exception as error:
            if job.draft is not None:
                with suppress(OSError):
                    self._store.discard(job.draft)
            return Outcome(step=job.step, error=f"{type(error).__name__}: {error}")
        job.seconds += time.monotonic() - start
        if action == "write":
            return None
        return Outcome(step=job.step, path=path, seconds=job.seconds)

    def _do(self, job: _Job, action: _Action) -> str:
        if action == "write":
            job.draft = self._store.write(
                job.tree, step=job.step, generation=job.generation, facts=job.facts
            )
            job.tree = None
        elif action == "publish":
            assert job.draft is not None
            checkpoint = self._store.publish(job.draft)
            self._prune(checkpoint)
            return str(checkpoint.path)
        elif action == "discard":
            assert job.draft is not None
            self._store.discard(job.draft)
        return ""

    def _prune(self, checkpoint: Checkpoint) -> None:
        try:
            self._store.prune(newest=checkpoint)
        except OSError as error:
            with self._changed:
                self._unsaid.append(
                    f"the checkpoint of step {checkpoint.manifest.step} was written, but older "
                    f"ones could not be removed, {error}: the next save tries again"
                )

    def _end(self, outcome: Outcome) -> None:
        self._job = None
        self._outcomes.append(outcome)
        if outcome.error:
            self._unsaid.append(
                f"the checkpoint of step {outcome.step} was not written, {outcome.error}: training "
                "goes on, and the next save tries again"
            )

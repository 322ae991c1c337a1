"""Follows a run through its blackouts: which steps count, and whether each resume is the same run.

Knows the workers' stands alone; nothing of checkpoints, processes or files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

__all__ = ["Lineage", "Resume", "Stand"]

_SAME_AT_A_STEP = ("position", "epoch", "progress", "lr", "state_hash")
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where a worker stood.

    Attributes:
        kind: "enter" or "step".
        worker: whose stand it is.
        generation: number of the membership.
        step: committed steps.
        world_size: number of workers.
        position: committed samples of the stream.
        epoch: that the next sample belongs to.
        progress: base steps.
        lr: scheduled learning rate.
        state_hash: of model, optimizer and session, but for random generators.
        applied_lr: learning rate of the step that was just committed.
    """

    kind: str
    worker: int
    generation: int
    step: int
    world_size: int
    position: int
    epoch: int
    progress: float
    lr: float
    state_hash: str
    applied_lr: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run went on after a blackout, with whom, and how far it had come before."""

    workers: frozenset[int]
    step: int
    reached: int

    @property
    def steps_back(self) -> int:
        """Committed steps that have to be made again."""
        return self.reached - self.step


class Lineage:
    """The committed steps of a run, oldest first, and what contradicts them.

    Args:
        num_samples: length of the dataset.

    Attributes:
        num_alike: steps that were made again by as many workers, and so had to come out alike.
        problems: sentences.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._steps: dict[int, Stand] = {}
        self._void: dict[int, Stand] = {}
        self._is_alike = False
        self.num_alike = 0
        self.problems: list[str] = []

    @property
    def reached(self) -> int:
        """The last committed step."""
        return max(self._steps, default=0)

    def has(self, step: int) -> bool:
        """Whether some worker committed this step, and it is not void."""
        return step in self._steps

    def extend(self, stands: Iterable[Stand]) -> Resume | None:
        """Take all stands between two blackouts; return where they begin, if anywhere."""
        reached, resume = self.reached, None
        ordered = sorted(stands, key=attrgetter("generation"))
        for _, group in groupby(ordered, key=attrgetter("generation")):
            members = list(group)
            start = self._enter([one for one in members if one.kind == "enter"], members)
            if resume is None:
                workers = frozenset(one.worker for one in members if one.kind == "enter")
                resume = Resume(workers=workers, step=start, reached=reached)
            self._add([one for one in members if one.kind == "step"])
        return resume

    def _enter(self, entries: Sequence[Stand], members: Sequence[Stand]) -> int:
        """Check where a generation begins; what was made beyond is void."""
        if not entries:
            self.problems.append(f"generation {members[0].generation} was never entered")
            return self.reached
        for entry in entries:
            self._compare(entry, self._steps.get(entry.step), "entered with")
        start = entries[0].step
        self._void = {n: one for n, one in self._steps.items() if n > start}
        self._steps = {n: one for n, one in self._steps.items() if n <= start}
        self._is_alike = True
        return start

    def _add(self, stands: Iterable[Stand]) -> None:
        by_step: dict[int, list[Stand]] = defaultdict(list)
        for stand in stands:
            by_step[stand.step].append(stand)
        for step in sorted(by_step):
            first, *others = by_step[step]
            for other in others:
                self._compare(other, first, "committed with")
            self._follow(first, before=self._steps.get(step - 1))
            self._steps[step] = first

    def _follow(self, stand: Stand, *, before: Stand | None) -> None:
        """Check that a step follows the one before it, and is the same as when it was void."""
        if stand.step != 1 and before is None:
            self.problems.append(f"step {stand.step} does not follow step {self.reached}")
        if before is not None and not before.position < stand.position:
            self.problems.append(f"step {stand.step} moved the position to {stand.position}")
        if stand.epoch != stand.position // self._num_samples:
            self.problems.append(f"step {stand.step} ended at {stand.position} in {stand.epoch}")
        void = self._void.pop(stand.step, None)
        # As long as all steps since the resume were made by as many workers as before.
        self._is_alike &= void is not None and void.world_size == stand.world_size
        if self._is_alike:
            self.num_alike += 1
            self._compare(stand, void, "made again with", exactly=stand.world_size == 1)

    def _compare(
        self, stand: Stand, known: Stand | None, what: str, *, exactly: bool = True
    ) -> None:
        """Note how two stands of one step differ.

        Args:
            stand: the later one.
            known: the other, or `None` if nobody was ever there.
            what: happened to the step.
            exactly: whether to the bit. Several workers sum in another order after a resume, since
                DDP forms its buckets anew.
        """
        if known is None:
            if stand.step:
                self.problems.append(f"step {stand.step} was {what} nothing that is known of it")
            return
        names = [*_SAME_AT_A_STEP, *(["applied_lr"] if stand.kind == known.kind else [])]
        for name in names:
            own, other = getattr(stand, name), getattr(known, name)
            if not (own == other or (not exactly and _is_close(own, other))):
                self.problems.append(
                    f"step {stand.step} was {what} {name} {own} in generation {stand.generation}, "
                    f"and {other} in generation {known.generation}"
                )


def _is_close(own: object, other: object) -> bool:
    """Return whether two values differ by no more than rounding does in some steps."""
    if isinstance(own, float) and isinstance(other, float):
        return math.isclose(own, other, rel_tol=_TOLERANCE)
    return isinstance(own, str)  # hashes say nothing of how far states are from each other

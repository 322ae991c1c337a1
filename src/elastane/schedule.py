"""The learning rate schedule in base steps: a user's torch schedulers, moved by progress.

They stay the user's, and nothing is stored but the `initial_lr` of a group, as torch's schedulers
do. Knows nothing of factors, gradients or workers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from elastane.errors import (
    ArgumentError,
    StateError,
    UnsupportedError,
    UsageError,
    describe,
)
from elastane.optimizers import AnyOptimizer, members_of

__all__ = ["AnySchedule", "Schedule", "set_lr"]

AnySchedule = LRScheduler | Sequence[LRScheduler] | Callable[[float], float] | None
"""What a user may give: a scheduler, one for each of several optimizers, a function, or nothing."""


def set_lr(group: dict[str, Any], lr: float | Tensor) -> None:
    """Give a parameter group a learning rate; a tensor is changed in place."""
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(torch.as_tensor(lr))
    else:
        group["lr"] = float(lr)


class Schedule:
    """A learning rate schedule in base steps, moved by progress.

    A torch scheduler is moved by one `step()` for every base step that progress crosses, never
    past its end. A callable `progress -> multiplier` sets each group's learning rate to its base
    times the multiplier. `None` leaves the learning rate to the user.

    Args:
        schedule: scheduler, several of different optimizers, callable or `None`.
        optimizer: whose learning rates it sets.
        num_steps: base steps at which training ends.

    Raises:
        UnsupportedError: `ReduceLROnPlateau`, which has no schedule in steps.
        ArgumentError: a scheduler of another optimizer, two of one, or one that ends before the
            run does.
    """

    def __init__(self, schedule: AnySchedule, *, optimizer: AnyOptimizer, num_steps: float) -> None:
        self._optimizer = optimizer
        self._num_steps = num_steps
        self._multiplier: Callable[[float], float] | None = None
        self._movers: list[_Mover] = []
        if isinstance(schedule, (list, tuple)):
            for number, one in enumerate(schedule):
                self._add(one, name=f"schedule[{number}]")
        elif isinstance(schedule, LRScheduler):
            self._add(schedule, name="schedule")
        elif callable(schedule):
            self._multiplier = schedule
        elif schedule is not None:
            _refuse("schedule", schedule)
        if self._multiplier is None:
            self._warn_of_forgotten()
        self._base_lrs: list[float] = []
        self.advance(0.0)

    def _add(self, scheduler: object, *, name: str) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UnsupportedError(_PLATEAU)
        if not isinstance(scheduler, LRScheduler):
            _refuse(name, scheduler)
        if not any(one is scheduler.optimizer for one in members_of(self._optimizer)):
            rule = "belongs to another optimizer"
            way_out = "Build it on the optimizer that the session gets."
            raise ArgumentError(describe(name, scheduler, rule=rule, way_out=way_out))
        if any(mover.scheduler.optimizer is scheduler.optimizer for mover in self._movers):
            rule = "belongs to an optimizer that has a scheduler already"
            way_out = "Combine them, for example in a SequentialLR."
            raise ArgumentError(describe(name, scheduler, rule=rule, way_out=way_out))
        self._movers.append(_Mover(scheduler, name=name, num_steps=self._num_steps))

    def _warn_of_forgotten(self) -> None:
        moved = [mover.scheduler.optimizer for mover in self._movers]
        others = [
            one for one in members_of(self._optimizer) if not any(one is own for own in moved)
        ]
        if any("initial_lr" in group for one in others for group in one.param_groups):
            warnings.warn(
                "a scheduler was built on this optimizer, and the session got none: its learning "
                "rate will stay where it is; pass schedule=...",
                stacklevel=6,
            )

    def check_untouched(self) -> None:
        """Refuse a scheduler that somebody else has stepped.

        Raises:
            UsageError: it stands elsewhere than progress has moved it.
        """
        for mover in self._movers:
            mover.check_untouched()

    def multiplier_at(self, progress: float) -> float | None:
        """Return the callable's checked multiplier at a progress, its end at most.

        Raises:
            ArgumentError: it is no finite number of at least 0.
        """
        if self._multiplier is None:
            return None
        multiplier: Any = self._multiplier(min(progress, self._num_steps))
        try:
            number = float(multiplier)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number) and number >= 0:
            return number
        rule = f"returned {multiplier!r} at progress {progress:g}"
        way_out = "A multiplier must be a finite number of at least 0."
        raise ArgumentError(describe("schedule", self._multiplier, rule=rule, way_out=way_out))

    def advance(self, progress: float) -> None:
        """Move to `progress`: by the whole number of base steps crossed since the last move."""
        self.move(progress, multiplier=self.multiplier_at(progress))

    def move(self, progress: float, *, multiplier: float | None) -> None:
        """Move to `progress`, whose multiplier is known already."""
        for mover in self._movers:
            mover.move(progress)
        if multiplier is not None:
            self._set_lrs(multiplier)

    def _set_lrs(self, multiplier: float) -> None:
        groups = self._optimizer.param_groups
        new = groups[len(self._base_lrs) :]
        self._base_lrs += [float(group.setdefault("initial_lr", group["lr"])) for group in new]
        for group, base in zip(groups, self._base_lrs, strict=True):
            set_lr(group, base * multiplier)

    def state_dict(self) -> dict[str, Any]:
        """Return base learning rates, and the schedulers' own states with the moves made."""
        return {
            "base_lrs": list(self._base_lrs),
            "schedulers": [mover.state_dict() for mover in self._movers],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, progress: float) -> None:
        """Take up a state, and set the learning rates that it implies.

        The scheduler's own state alone would leave the optimizer at its first learning rate
        until the next move; here both agree in whatever order they are loaded.
        """
        saved, base_lrs, own = state["schedulers"], state["base_lrs"], len(self._movers)
        if len(saved) != own:
            message = (
                f"the state was saved with {len(saved)} torch schedulers and this session has "
                f"{own}: pass the same kind of schedule"
            )
            raise StateError(message)
        if len(base_lrs) > len(self._optimizer.param_groups):
            raise StateError(_OTHER_GROUPS)
        for mover, one in zip(self._movers, saved, strict=True):
            mover.load_state_dict(one)
        self._base_lrs[: len(base_lrs)] = [float(lr) for lr in base_lrs]
        self.advance(progress)


class _Mover:
    """Moves one torch scheduler, by a `step()` for each base step crossed, never past its end."""

    def __init__(self, scheduler: LRScheduler, *, name: str, num_steps: float) -> None:
        self.scheduler = scheduler
        self._moved, self._end = 0, math.floor(num_steps)
        if isinstance(scheduler, OneCycleLR):
            total: int = scheduler.total_steps
            if total < num_steps:
                rule = f"ends after {total} base steps, before the run's {num_steps:g}"
                way_out = "Give OneCycleLR total_steps=num_steps."
                raise ArgumentError(describe(name, scheduler, rule=rule, way_out=way_out))
            self._end = min(self._end, total - 1)

    def check_untouched(self) -> None:
        last_epoch = getattr(self.scheduler, "last_epoch", self._moved)
        if last_epoch != self._moved:
            raise UsageError(
                f"the schedule stands at step {last_epoch} and progress has moved it to "
                f"{self._moved}: don't call schedule.step() yourself, the session does; to go on "
                "with a run, load the session's state, which holds the schedule's"
            )

    def move(self, progress: float) -> None:
        target = min(math.floor(progress), self._end)
        for _ in range(target - self._moved):
            self.scheduler.step()
        self._moved = max(self._moved, target)

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self._moved, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own_groups = len(self.scheduler.get_last_lr())  # fewer if a group joined since
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        lrs = self.scheduler.get_last_lr()
        if len(lrs) != own_groups:
            raise StateError(_OTHER_GROUPS)
        groups = self.scheduler.optimizer.param_groups
        for group, lr in zip(groups, lrs, strict=False):  # a group that joined keeps its own
            set_lr(group, lr)
        self._moved = int(state["moved"])


def _refuse(name: str, schedule: object) -> NoReturn:
    rule = "must be a torch scheduler, a function of progress, or None"
    way_out = "Pass for example CosineAnnealingLR(optimizer, T_max=num_steps)."
    raise ArgumentError(describe(name, schedule, rule=rule, way_out=way_out))


_OTHER_GROUPS = (
    "the state's schedule has another number of parameter groups than this optimizer: build it "
    "with the same groups"
)
_PLATEAU = (
    "ReduceLROnPlateau has no schedule in steps, so progress can't move it: pass schedule=None "
    "and call plateau.step(metric) yourself, for example after session.evaluate()"
)

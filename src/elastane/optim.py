"""The scaled step: the user's optimizer under a scaled learning rate, and the schedule's moves.

Optimizer and scheduler stay the user's: nothing is patched or subclassed, and nothing stored but
the `initial_lr` of a group, as torch's schedulers do. Knows
nothing of gradients, data or workers; what factor and how much progress, others decide.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from elastane import _compat
from elastane.errors import (
    ArgumentError,
    StateError,
    UnsupportedError,
    UsageError,
    describe,
)

__all__ = ["ScaledStep", "Schedule", "clip_gradients", "momentum_of", "scaled_lr"]


@contextmanager
def scaled_lr(optimizer: Optimizer, factors: Sequence[float]) -> Iterator[None]:
    """Multiply each group's learning rate for the length of a block.

    The learning rate is put back to the bit, also when the block raises; a tensor lr is changed
    and restored in place.

    Args:
        optimizer: any torch optimizer.
        factors: one for every parameter group, or a single one for all.

    Raises:
        ArgumentError: different factors for groups that share one tensor as their lr.
    """
    groups = optimizer.param_groups
    each = list(factors) * len(groups) if len(factors) == 1 else list(factors)
    _check_shared_lrs(groups, each)
    saved = [g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"] for g in groups]
    try:
        for group, lr, factor in zip(groups, saved, each, strict=True):
            _set_lr(group, lr * factor)
        yield
    finally:
        for group, lr in zip(groups, saved, strict=True):
            _set_lr(group, lr)


def _set_lr(group: dict[str, Any], lr: float | Tensor) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(torch.as_tensor(lr))
    else:
        group["lr"] = float(lr)


def _check_shared_lrs(groups: Sequence[Mapping[str, Any]], factors: Sequence[float]) -> None:
    seen: dict[int, float] = {}
    for group, factor in zip(groups, factors, strict=False):
        lr = group["lr"]
        if isinstance(lr, Tensor) and seen.setdefault(id(lr), factor) != factor:
            rule = "differ between parameter groups that share one tensor as their lr"
            way_out = "Give each group a tensor of its own."
            raise ArgumentError(describe("factors", list(factors), rule=rule, way_out=way_out))


def momentum_of(optimizer: Optimizer) -> float:
    """Return the largest momentum of the groups: `momentum`, or `betas[0]`; 0 if none has any."""
    return max(_momentum(group) for group in optimizer.param_groups)


def _momentum(group: Mapping[str, Any]) -> float:
    betas = group.get("betas")
    return float(betas[0] if betas else group.get("momentum", 0.0))


def clip_gradients(optimizer: Optimizer, *, max_norm: float, grad_norm: float) -> None:
    """Scale the gradients down to `max_norm` by a norm that is known already.

    `g <- g min(1, max_norm / (|g| + 1e-6))`, as `torch.nn.utils.clip_grad_norm_`.
    """
    coefficient = max_norm / (grad_norm + 1e-6)
    if coefficient < 1:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        _compat.foreach_mul_([p.grad for p in parameters if p.grad is not None], coefficient)


class Schedule:
    """A learning rate schedule in base steps, moved by progress.

    A torch scheduler is moved by one `step()` for every base step that progress crosses, never
    past its end. A callable `progress -> multiplier` sets each group's learning rate to its base
    times the multiplier. `None` leaves the learning rate to the user.

    Args:
        schedule: scheduler, callable or `None`.
        optimizer: the optimizer whose learning rates it sets.
        num_steps: base steps at which training ends.

    Raises:
        UnsupportedError: `ReduceLROnPlateau`, which has no schedule in steps.
        ArgumentError: a scheduler of another optimizer, or one that ends before the run does.
    """

    def __init__(
        self,
        schedule: LRScheduler | Callable[[float], float] | None,
        *,
        optimizer: Optimizer,
        num_steps: float,
    ) -> None:
        if isinstance(schedule, ReduceLROnPlateau):
            raise UnsupportedError(_PLATEAU)
        self._scheduler: LRScheduler | None = None
        self._multiplier: Callable[[float], float] | None = None
        if isinstance(schedule, LRScheduler):
            self._scheduler = schedule
        elif callable(schedule):
            self._multiplier = schedule
        elif schedule is not None:
            rule = "must be a torch scheduler, a function of progress, or None"
            way_out = "Pass for example CosineAnnealingLR(optimizer, T_max=num_steps)."
            raise ArgumentError(describe("schedule", schedule, rule=rule, way_out=way_out))
        elif any("initial_lr" in group for group in optimizer.param_groups):
            warnings.warn(
                "a scheduler was built on this optimizer, and the session got none: its learning "
                "rate will stay where it is; pass schedule=...",
                stacklevel=5,
            )
        self._optimizer = optimizer
        self._num_steps = num_steps
        self._end = math.floor(num_steps)
        if self._scheduler is not None:
            self._check(self._scheduler, num_steps)
        self._base_lrs: list[float] = []
        self._moved = 0
        self.advance(0.0)

    def _check(self, scheduler: LRScheduler, num_steps: float) -> None:
        if scheduler.optimizer is not self._optimizer:
            rule = "belongs to another optimizer"
            way_out = "Build it on the optimizer that the session gets."
            raise ArgumentError(describe("schedule", scheduler, rule=rule, way_out=way_out))
        if isinstance(scheduler, OneCycleLR):
            total: int = scheduler.total_steps
            if total < num_steps:
                rule = f"ends after {total} base steps, before the run's {num_steps:g}"
                way_out = "Give OneCycleLR total_steps=num_steps."
                raise ArgumentError(describe("schedule", scheduler, rule=rule, way_out=way_out))
            self._end = min(self._end, total - 1)

    def check_untouched(self) -> None:
        """Refuse a scheduler that somebody else has stepped.

        Raises:
            UsageError: it stands elsewhere than progress has moved it.
        """
        last_epoch = getattr(self._scheduler, "last_epoch", self._moved)
        if last_epoch != self._moved:
            raise UsageError(
                f"the schedule stands at step {last_epoch} and progress has moved it to "
                f"{self._moved}: don't call schedule.step() yourself, the session does; to go on "
                "with a run, load the session's state, which holds the schedule's"
            )

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
        if self._scheduler is not None:
            target = min(math.floor(progress), self._end)
            for _ in range(target - self._moved):
                self._scheduler.step()
            self._moved = max(self._moved, target)
        if multiplier is not None:
            self._set_lrs(multiplier)

    def _set_lrs(self, multiplier: float) -> None:
        groups = self._optimizer.param_groups
        new = groups[len(self._base_lrs) :]
        self._base_lrs += [float(group.setdefault("initial_lr", group["lr"])) for group in new]
        for group, base in zip(groups, self._base_lrs, strict=True):
            _set_lr(group, base * multiplier)

    def state_dict(self) -> dict[str, Any]:
        """Return base learning rates, moves made, and the scheduler's own state."""
        state: dict[str, Any] = {"base_lrs": list(self._base_lrs), "moved": self._moved}
        if self._scheduler is not None:
            state["scheduler"] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, progress: float) -> None:
        """Take up a state, and set the learning rates that it implies.

        The scheduler's own state alone would leave the optimizer at its first learning rate
        until the next move; here both agree in whatever order they are loaded.
        """
        if ("scheduler" in state) != (self._scheduler is not None):
            message = (
                "the state was saved with a torch scheduler and this session has none, or the "
                "other way round: pass the same kind of schedule"
            )
            raise StateError(message)
        groups, base_lrs = self._optimizer.param_groups, state["base_lrs"]
        lrs: Sequence[float | Tensor] = [group["lr"] for group in groups]
        own_groups = len(groups)
        if self._scheduler is not None:
            own_groups = len(self._scheduler.get_last_lr())  # fewer if a group joined since
            self._scheduler.load_state_dict(dict(state["scheduler"]))
            lrs = self._scheduler.get_last_lr()
        if len(lrs) != own_groups or len(base_lrs) > len(groups):
            message = (
                "the state's schedule has another number of parameter groups than this optimizer's "
                f"{len(groups)}: build it with the same groups"
            )
            raise StateError(message)
        for group, lr in zip(groups, lrs, strict=False):  # a group that joined keeps its own
            _set_lr(group, lr)
        self._moved = int(state["moved"])
        self._base_lrs[: len(base_lrs)] = [float(lr) for lr in base_lrs]
        self.advance(progress)


class ScaledStep:
    """Steps the user's optimizer under `lr = schedule(progress) * factor`.

    Args:
        optimizer: the user's optimizer.
        schedule: the schedule to move.
        custom: makes the optimizer's step in its place, such as a compiled `optimizer.step`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> schedule = Schedule(lambda tau: 1 - tau / 10, optimizer=optimizer, num_steps=10)
        >>> weight.grad = torch.ones(1)
        >>> ScaledStep(optimizer, schedule).step([2.0], progress=2.0)
        >>> weight.item(), optimizer.param_groups[0]["lr"]
        (0.0, 0.4)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        custom: Callable[..., Any] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._custom = custom

    def step(
        self,
        factors: Sequence[float],
        *,
        progress: float,
        scaler: GradScaler | None = None,
        closure: Callable[[], float] | None = None,
    ) -> Any:
        """Step the optimizer once, then move the schedule.

        Args:
            factors: one for every parameter group, or a single one for all.
            progress: `tau` after this step.
            scaler: a gradient scaler whose `unscale_` has been called. A custom step is made
                without asking it: the gradients must be finite.
            closure: handed to the optimizer.

        Returns:
            What the optimizer's `step` returned.
        """
        multiplier = self._schedule.multiplier_at(progress)
        with scaled_lr(self._optimizer, factors):
            if scaler is not None and closure is not None:
                raise UnsupportedError("a closure can't be combined with a scaler: leave one out")
            if scaler is not None and self._custom is None:
                result = scaler.step(self._optimizer)
            else:
                step = self._custom or self._optimizer.step
                result = step() if closure is None else step(closure)
        if self._custom is not None:
            _compat.note_step(self._optimizer)
        self._schedule.move(progress, multiplier=multiplier)
        return result


_PLATEAU = (
    "ReduceLROnPlateau has no schedule in steps, so progress can't move it: pass schedule=None "
    "and call plateau.step(metric) yourself, for example after session.evaluate()"
)

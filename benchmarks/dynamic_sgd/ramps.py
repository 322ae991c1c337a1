"""The ways to go over from one batch to another that the tables compare, by name.

Knows momentum compensations and the optimizer's buffers; nothing of tasks or results.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastane import Linear, MomentumRamp, NoiseMatchedRamp, Session
from elastane.momentum import (
    Compensation,
    RampState,
    eight_per_ratio,
    one_time_constant,
)
from elastane.scaling import Rule, Scaling, StepContext

__all__ = [
    "IMMEDIATE",
    "KEPT_RAMP",
    "RAMPS",
    "RATIO_RAMP",
    "Ramp",
    "applied_factors",
    "default_ramp",
]

IMMEDIATE, RATIO_RAMP, KEPT_RAMP = "immediate", "T=8k", "T=8k, velocity kept"
_COMPARED_STEPS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """One way.

    Attributes:
        compensation: how the factor moves to the new one of linear scaling; `None` is at once.
        keeps_rate: the learning rate stays what it was.
        keeps_velocity: whenever the learning rate grows, the momentum buffer is divided by as
            much, so that the larger rate moves the weights by it as far as before.
    """

    compensation: Compensation | None = None
    keeps_rate: bool = False
    keeps_velocity: bool = False

    def rule(self, *, before: float) -> Rule:
        """Return the rule after a change from a scale: linear, or what it was."""
        return _Held(factor=before) if self.keeps_rate else Linear()

    @property
    def grows_only(self) -> bool:
        """Whether it differs from all others only where the batch grows."""
        return self.keeps_velocity and self.compensation is not None

    def change(self, optimizer: torch.optim.Optimizer, *, ratio: float) -> None:
        """Do to the optimizer what is to be done between the last old step and the first new."""
        if self.keeps_velocity and self.compensation is None:
            _divide_buffers(optimizer, ratio)
        elif self.keeps_velocity:
            optimizer.register_step_pre_hook(_KeptVelocity())


class _KeptVelocity:
    """Divides the momentum buffers before each step by what the learning rate has grown by."""

    def __init__(self) -> None:
        self._last: float | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        lr = float(optimizer.param_groups[0]["lr"])
        if self._last is not None and lr > self._last:
            _divide_buffers(optimizer, lr / self._last)
        self._last = lr


def _divide_buffers(optimizer: torch.optim.Optimizer, ratio: float) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].div_(ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A factor that the batch does not change."""

    factor: float

    def __call__(self, now: StepContext) -> Scaling:
        return Scaling(self.factor, now.scale)


RAMPS: Mapping[str, Ramp] = {
    "unchanged": Ramp(keeps_rate=True),
    IMMEDIATE: Ramp(),
    "T=8": Ramp(compensation=MomentumRamp(length=8, shrink="ramp")),
    RATIO_RAMP: Ramp(compensation=MomentumRamp(length=eight_per_ratio, shrink="ramp")),
    "T=1/(1-m)": Ramp(compensation=MomentumRamp(length=one_time_constant, shrink="ramp")),
    "noise-matched": Ramp(compensation=NoiseMatchedRamp()),
    "velocity kept": Ramp(keeps_velocity=True),
    KEPT_RAMP: Ramp(
        compensation=MomentumRamp(length=eight_per_ratio, shrink="ramp"), keeps_velocity=True
    ),
}


def applied_factors(
    compensation: Compensation | None, *, ratio: float, momentum: float, steps: int
) -> list[float]:
    """Return the factors after a change of batch by a ratio, relative to that before."""
    if compensation is None:
        return [ratio] * steps
    state = compensation(RampState(), target=1.0, batch_samples=1.0, momentum=momentum)
    factors: list[float] = []
    for _ in range(steps):
        state = compensation(state, target=ratio, batch_samples=ratio, momentum=momentum)
        factors.append(state.applied)
    return factors


def default_ramp(ratio: float, *, momentum: float) -> str:
    """Return which of the ramps elastane's default does the same as at a ratio.

    Raises:
        ValueError: none: a ramp is missing in the comparison.
    """
    default: Compensation | None = inspect.signature(Session).parameters["compensation"].default

    def factors(compensation: Compensation | None) -> list[float]:
        return applied_factors(compensation, ratio=ratio, momentum=momentum, steps=_COMPARED_STEPS)

    for name, ramp in RAMPS.items():
        plain = not ramp.keeps_rate and not ramp.keeps_velocity
        if plain and factors(ramp.compensation) == factors(default):
            return name
    raise ValueError(f"no ramp of the comparison is like the default, {default!r}")

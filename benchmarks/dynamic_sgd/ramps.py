"""The ways to go over from one batch to another that the tables compare, by name.

Knows momentum compensations and the optimizer's buffers; nothing of tasks or results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    "GROWTH_ONLY",
    "IMMEDIATE",
    "KEPT_RAMP",
    "RAMPS",
    "RATIO_RAMP",
    "Ramp",
    "applied_by",
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
        divides_buffer: at the change the momentum buffer is divided by the ratio of batches, so
            that the larger learning rate moves the weights by it as far as before.
    """

    compensation: Compensation | None = None
    keeps_rate: bool = False
    divides_buffer: bool = False

    def rule(self, *, before: float) -> Rule:
        """Return the rule after a change from a scale: linear, or what it was."""
        return _Held(factor=before) if self.keeps_rate else Linear()

    def change(self, optimizer: torch.optim.Optimizer, *, ratio: float) -> None:
        """Do to the optimizer what is to be done between the last old step and the first new."""
        if not self.divides_buffer:
            return
        for state in optimizer.state.values():
            state["momentum_buffer"].div_(ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A factor that the batch does not change."""

    factor: float

    def __call__(self, now: StepContext) -> Scaling:
        return Scaling(self.factor, now.scale)


def _equation_6(length: float | Callable[[float, float], float]) -> Ramp:
    return Ramp(compensation=MomentumRamp(length=length, shrink="ramp", keep_velocity=False))


RAMPS: Mapping[str, Ramp] = {
    "unchanged": Ramp(keeps_rate=True),
    IMMEDIATE: Ramp(),
    "T=8": _equation_6(8),
    RATIO_RAMP: _equation_6(eight_per_ratio),
    "T=1/(1-m)": _equation_6(one_time_constant),
    "noise-matched": Ramp(compensation=NoiseMatchedRamp()),
    "velocity kept": Ramp(divides_buffer=True),
    KEPT_RAMP: Ramp(compensation=MomentumRamp(length=eight_per_ratio)),
}
GROWTH_ONLY = (KEPT_RAMP,)
"""Ramps that are one of the others where the batch shrinks."""


def applied_by(
    ramp: Ramp, *, ratio: float, momentum: float, steps: int
) -> list[tuple[float, float]]:
    """Return the factor of each step after a change of batch by a ratio, relative to that before.

    With it comes what the momentum buffer is multiplied by before the step.
    """
    if ramp.compensation is None:
        first = 1 / ratio if ramp.divides_buffer else 1.0
        return [(ratio, first), *[(ratio, 1.0)] * (steps - 1)]
    known = {"momentum": momentum}
    state = ramp.compensation(RampState(), target=1.0, batch_samples=1.0, **known)
    found: list[tuple[float, float]] = []
    for _ in range(steps):
        state = ramp.compensation(state, target=ratio, batch_samples=ratio, **known)
        found.append((state.applied, state.buffer_factor))
    return found


def default_ramp(ratio: float, *, momentum: float) -> str:
    """Return which of the ramps elastane's default does the same as at a ratio.

    Raises:
        ValueError: none: a ramp is missing in the comparison.
    """
    given = inspect.signature(Session).parameters["compensation"].default
    known = {"ratio": ratio, "momentum": momentum, "steps": _COMPARED_STEPS}
    wanted = applied_by(Ramp(compensation=given), **known)
    for name, ramp in RAMPS.items():
        if not ramp.keeps_rate and applied_by(ramp, **known) == wanted:
            return name
    raise ValueError(f"no ramp of the comparison is like the default, {given!r}")

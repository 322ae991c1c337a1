"""Scaling rules: what the learning rate is multiplied by for a batch, and what a step is worth.

Pure; knows the moments' gain as a number and nothing of torch, optimizers or workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from elastane.errors import ArgumentError, check_choice, check_positive, describe

__all__ = [
    "LEGW",
    "AdaScale",
    "AdamScale",
    "Identity",
    "Linear",
    "Rule",
    "Scaling",
    "Sqrt",
    "StepContext",
    "WarmUp",
    "apply_rule",
]


class Scaling(NamedTuple):
    """What a rule says of one step.

    Attributes:
        factor: what the scheduled learning rate is multiplied by for this step.
        progress: what the step is worth in base steps.
    """

    factor: float
    progress: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a rule may look at.

    Attributes:
        scale: `S`, samples of this step over the base batch.
        gain: `r`, from the moments of earlier steps; 1 until there are any.
        progress: `tau` before this step, in base steps.
        num_steps: base steps at which training ends.
        step: number of optimizer steps committed so far.
        batch_samples: `B`, samples of this step.
        base_batch_size: `B0`.
    """

    scale: float
    gain: float
    progress: float
    num_steps: float
    step: int
    batch_samples: float
    base_batch_size: float


Rule = Callable[[StepContext], Scaling]
"""A scaling rule: a function of the step's context that returns (factor, progress)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Leave the learning rate alone: (1, 1).

    Attributes:
        progress: `"step"`: a step is worth one base step; `"gain"`: it is worth the gain, so that
            a run takes as many steps as AdaScale would.

    References:
        Johnson et al., AdaScale SGD (2020), definition 2.
    """

    progress: str = "step"

    def __post_init__(self) -> None:
        check_choice("progress", self.progress, ("step", "gain"))

    def __call__(self, now: StepContext) -> Scaling:
        """Return the scaling for this step."""
        return Scaling(1.0, now.gain if self.progress == "gain" else 1.0)


@dataclass(frozen=True, slots=True)
class Linear:
    """Multiply the learning rate by the scale: (S, S).

    References:
        Johnson et al., AdaScale SGD (2020), definition 3; Goyal et al. (2017).
    """

    def __call__(self, now: StepContext) -> Scaling:
        """Return the scaling for this step."""
        return Scaling(now.scale, now.scale)


@dataclass(frozen=True, slots=True)
class Sqrt:
    """Multiply the learning rate by the square root of the scale: (sqrt S, S).

    References:
        Krizhevsky, One weird trick (2014).
    """

    def __call__(self, now: StepContext) -> Scaling:
        """Return the scaling for this step."""
        return Scaling(math.sqrt(now.scale), now.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class LEGW:
    """Square root scaling with a warm-up that lasts S times as many base steps: (sqrt S a, S).

    `a = min(1, tau / (warmup_steps S))`; the first step, at `tau = 0`, counts as base step 1, so
    that its factor is above 0.

    Attributes:
        warmup_steps: length of the warm-up at S = 1, in base steps: the paper's warm-up epochs
            times dataset size over base batch.

    References:
        You et al., Large-Batch Training for LSTM and Beyond (2019): linear-epoch gradual warm-up.
    """

    warmup_steps: float

    def __post_init__(self) -> None:
        check_positive("warmup_steps", self.warmup_steps, way_out="Pass base steps.")

    def __call__(self, now: StepContext) -> Scaling:
        """Return the scaling for this step."""
        done = min(1.0, max(now.progress, 1.0) / (self.warmup_steps * now.scale))
        return Scaling(math.sqrt(now.scale) * done, now.scale)


@dataclass(frozen=True, slots=True)
class AdaScale:
    """Multiply the learning rate by the gain, and count the gain as progress: (r, r).

    References:
        Johnson et al., AdaScale SGD (2020), algorithm 2.
    """

    def __call__(self, now: StepContext) -> Scaling:
        """Return the scaling for this step."""
        return Scaling(now.gain, now.gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamScale:
    """Multiply the learning rate by a power of the gain: (r^p, r). For Adam and its kin.

    Attributes:
        power: `p`, 1/2 by default.

    References:
        Qiao et al., Pollux (2021), for p = 1/2.
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        check_positive("power", self.power, way_out="0.5 is the square root.")

    def __call__(self, now: StepContext) -> Scaling:
        """Return the scaling for this step."""
        return Scaling(now.gain**self.power, now.gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Move the factor of any rule from 1 to its value while the run is young.

    `factor = 1 + a (rule - 1)`, `a = min(1, tau / length)`; the rule's progress is kept.
    `WarmUp(rule=Linear())` is the baseline "LSW" of the AdaScale paper.

    Attributes:
        rule: the rule to warm up.
        fraction: length of the warm-up as a fraction of the run's base steps.

    Example:
        >>> now = StepContext(scale=16, gain=4, progress=27.5, num_steps=1000, step=3,
        ...                   batch_samples=256, base_batch_size=16)
        >>> WarmUp(rule=Linear())(now)
        Scaling(factor=8.5, progress=16.0)

    References:
        Johnson et al., AdaScale SGD (2020), section 4: 5.5 % of the steps.
    """

    rule: Rule
    fraction: float = 0.055

    def __post_init__(self) -> None:
        check_positive("fraction", self.fraction, way_out="0.055 is the paper's 5.5 %.")

    def __call__(self, now: StepContext) -> Scaling:
        """Return the scaling for this step."""
        factor, progress = apply_rule(self.rule, now)
        done = min(1.0, now.progress / (self.fraction * now.num_steps))
        return Scaling(1 + done * (factor - 1), progress)


def apply_rule(rule: Rule, now: StepContext) -> Scaling:
    """Return the rule's scaling, checked, as plain floats.

    Raises:
        ArgumentError: the rule returned no pair of numbers, or one not finite and above 0.
    """
    result = rule(now)
    try:
        scaling = Scaling(*result)
        usable = [math.isfinite(value) and value > 0 for value in scaling]
    except TypeError as error:
        way_out = "Return (factor, progress), for example elastane.scaling.Scaling(1.0, 1.0)."
        message = describe("rule", rule, rule=f"returned {result!r}", way_out=way_out)
        raise ArgumentError(message) from error
    for name, value, good in zip(Scaling._fields, scaling, usable, strict=True):
        if not good:
            shown = f"returned {name}={value!r} at scale {now.scale:g}, gain {now.gain:g}"
            way_out = "Both factor and progress must be finite and above 0."
            raise ArgumentError(describe("rule", rule, rule=shown, way_out=way_out))
    return Scaling(*map(float, scaling))

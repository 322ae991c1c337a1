"""Momentum compensation: how the factor moves to its new value after a change of batch.

Pure arithmetic; knows nothing of torch, of rules or of why the batch changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Protocol

from elastane.errors import ArgumentError, check_choice, describe

__all__ = [
    "Compensation",
    "MomentumRamp",
    "NoiseMatchedRamp",
    "RampState",
    "compensated_factor",
    "eight_per_ratio",
    "kept_velocity",
    "noise_matched_factor",
    "one_time_constant",
    "outlasting_length",
    "ramp_position",
]

SHRINKS = ("immediate", "ramp")
_SETTLED = 1e-9


def ramp_position(steps_since_change: float, *, length: float) -> float:
    """Return `a = min((t - t0) / T, 1)`; a length below one step means at once.

    References:
        Lin et al., Dynamic Mini-batch SGD (2019), equation 6.
    """
    return min(steps_since_change / length, 1.0) if length >= 1 else 1.0


def compensated_factor(start: float, target: float, *, position: float) -> float:
    """Return `f0 + a (f - f0)`, and `f` to the bit at the end of the ramp.

    With `start = 1` and `target = k` this is equation 6's `1 + (t - t0)/T (k - 1)`. The buffer
    of PyTorch's SGD holds gradients, not displacements (the u-form), so for equation 6 the factor
    on the learning rate is all there is to do.

    Args:
        start: `f0`, the factor applied in the last step before the change.
        target: `f`, what the rule asks for now.
        position: `a` between 0 and 1.

    References:
        Lin et al., Dynamic Mini-batch SGD (2019), equation 6; start and target other than 1 and
        k are ours.
    """
    return target if position >= 1 else start + position * (target - start)


def eight_per_ratio(ratio: float, momentum: float) -> float:  # noqa: ARG001 (a RampLength)
    """Return the ramp length `8 k` in optimizer steps: a slope of 1/8 a step at any k.

    References:
        The third-party program compensation-tools; a survey reports 8 for the paper itself.
    """
    return 8 * ratio


def one_time_constant(ratio: float, momentum: float) -> float:  # noqa: ARG001 (a RampLength)
    """Return the ramp length `1 / (1 - momentum)`: how long old gradients stay in the buffer.

    Ours: 10 steps at momentum 0.9, 100 at 0.99.
    """
    return 1 / (1 - momentum)


def outlasting_length(ratio: float, momentum: float) -> float:
    """Return the longer of `8 k` and `1 / (1 - momentum)` optimizer steps.

    A gentle slope, and never shorter than old gradients stay in the buffer: where their
    displacement grows with the factor, either alone fails where the other holds, `8 k` at momentum
    0.99 with a small `k` and one time constant at momentum 0.9 with a large one. Ours; see the
    page of results.
    """
    return max(eight_per_ratio(ratio, momentum), one_time_constant(ratio, momentum))


def kept_velocity(before: float, applied: float) -> float:
    """Return what the momentum buffer is multiplied by so that a larger factor does not enlarge it.

    `f_(t-1) / f_t` where the factor grows, else 1. The displacement that old gradients still cause
    stays what it was, as in the v-form `v <- m v + lr g`; only new gradients get the new rate.

    Args:
        before: `f_(t-1)`, the factor applied in the step before.
        applied: `f_t`.
    """
    return before / applied if 0 < before < applied else 1.0


def noise_matched_factor(ratio: float, *, momentum: float, steps: float) -> float:
    """Return the factor that keeps the variance of the update where linear scaling ends.

    `j` steps after a batch grew from `B` to `k B`, the buffer's variance relative to before is
    `mu^(2j) + (1 - mu^(2j)) / k`; linear scaling settles at update variance `k`. So::

        m_j = sqrt(k / (mu^(2j) + (1 - mu^(2j)) / k))

    from `sqrt(k)` to `k`, for growth and shrink alike. Ours, for white gradient noise.

    Args:
        ratio: `k`, new batch over old.
        momentum: `mu`.
        steps: `j`, number of new gradients in the buffer.
    """
    old = momentum ** (2 * steps)
    return math.sqrt(ratio / (old + (1 - old) / ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class RampState:
    """Where a compensation stands; plain numbers, part of the checkpoint.

    Attributes:
        batch_samples: nominal batch of the last step; 0 before the first.
        applied: factor applied in the last step.
        start: `f0` of the ramp in progress.
        steps: optimizer steps since the change, `t - t0`.
        length: `T` of the ramp in progress; 0 when there is none.
        excess: how far the buffer's variance is above that of the present batch, relative to it.
        buffer_factor: what SGD's momentum buffers are multiplied by before this step.
    """

    batch_samples: float = 0.0
    applied: float = 1.0
    start: float = 1.0
    steps: int = 0
    length: float = 0.0
    excess: float = 0.0
    buffer_factor: float = 1.0


class Compensation(Protocol):
    """What a momentum compensation must do: one pure call a step."""

    def __call__(
        self, state: RampState, *, target: float, batch_samples: float, momentum: float
    ) -> RampState:
        """Return the state of this step: `applied` and `buffer_factor` are what it is to apply.

        Args:
            state: what the last committed step returned, or `RampState()`.
            target: the rule's factor for this step.
            batch_samples: the batch that the policy asks for now. A short last batch of an epoch
                is no change.
            momentum: the optimizer's momentum (`betas[0]` for Adam), 0 if it has none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumRamp:
    """Dynamic SGD's linear ramp from the factor then applied to the rule's, with its velocity kept.

    At a change of batch by the ratio `k` the factor in force, `f0`, is kept, and::

        factor_t = f0 + min((t - t0) / T, 1) (rule_t - f0)

    A change in the middle of a ramp starts from where the ramp is; `k` is then the larger of the
    ratio of batches and the ratio of factors still to go, so that no ramp gets steep. On a shrink
    (the rule asks for less than `f0`) the factor drops at once by default: a ramp would keep a
    large learning rate on the noise of a small batch. Without momentum there is nothing old to
    wait for, and no ramp.

    Old gradients come from small batches and are noisy. While the factor grows, SGD's momentum
    buffer is divided by as much, so that they move the weights as far as they would have done
    without the change (`kept_velocity`): the rate grows for new gradients alone.

    Attributes:
        length: `T` in optimizer steps: a number, or a function of (k, momentum). By default
            `eight_per_ratio`, and `outlasting_length` without `keep_velocity`. What the paper
            recommends is not certain: a survey says 8, the only program found uses 8 k.
        shrink: `"immediate"` or `"ramp"`.
        keep_velocity: `False` is equation 6 alone. It concerns optimizers whose state has a
            `momentum_buffer`; others, such as Adam, have the ramp alone.

    Example:
        >>> ramp = MomentumRamp(length=4)
        >>> state = ramp(RampState(), target=1.0, batch_samples=16, momentum=0.9)
        >>> factors = []
        >>> for _ in range(5):
        ...     state = ramp(state, target=2.0, batch_samples=32, momentum=0.9)
        ...     factors.append(state.applied)
        >>> factors
        [1.0, 1.25, 1.5, 1.75, 2.0]

    References:
        Lin et al., Dynamic Mini-batch SGD (2019), equation 6. Its `T` and its treatment of a
        shrink were not to be had; see the page on mathematics. Keeping the velocity along a ramp
        is ours; the page of results shows what it does.
    """

    length: float | Callable[[float, float], float] | None = None
    shrink: str = "immediate"
    keep_velocity: bool = True

    def __post_init__(self) -> None:
        check_choice("shrink", self.shrink, SHRINKS)
        if self.length is not None and not callable(self.length):
            _check_length(self.length)

    def __call__(
        self, state: RampState, *, target: float, batch_samples: float, momentum: float
    ) -> RampState:
        """Return the state after this step (see `Compensation`)."""
        before, is_first = state.applied, state.batch_samples == 0
        changes = batch_samples != state.batch_samples
        if is_first:
            state = RampState(batch_samples=batch_samples, start=target)
        elif changes:
            drops = target < before and self.shrink == "immediate"
            ratio = max(batch_samples / state.batch_samples, target / before)
            length = 0.0 if drops or momentum == 0 else self._length(ratio, momentum)
            state = RampState(batch_samples=batch_samples, start=before, length=length)
        position = ramp_position(state.steps, length=state.length)
        applied = compensated_factor(state.start, target, position=position)
        moves = not is_first and momentum > 0 and (changes or state.length > 0)
        return replace(
            state,
            applied=applied,
            steps=state.steps + 1,
            length=0.0 if position >= 1 else state.length,
            buffer_factor=kept_velocity(before, applied) if moves and self.keep_velocity else 1.0,
        )

    def _length(self, ratio: float, momentum: float) -> float:
        default = eight_per_ratio if self.keep_velocity else outlasting_length
        given = default if self.length is None else self.length
        return _check_length(given(ratio, momentum) if callable(given) else given)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseMatchedRamp:
    """The ramp without a parameter: update noise stays at what the rule settles at. Ours.

    It follows the variance `V` of the momentum buffer, relative to a sample's, through every
    change, `V <- mu^2 V + (1 - mu^2) / B`, and applies `rule * sqrt(1 / (B V))`. After one change
    this is `noise_matched_factor`; changes may overlap. After a shrink the buffer is quieter than
    the new batch, so the factor falls at once, but not all the way at first.

    Example:
        >>> ramp = NoiseMatchedRamp()
        >>> state = ramp(RampState(), target=1.0, batch_samples=16, momentum=0.9)
        >>> state = ramp(state, target=4.0, batch_samples=64, momentum=0.9)
        >>> round(state.applied, 6) == round(noise_matched_factor(4.0, momentum=0.9, steps=1), 6)
        True
    """

    def __call__(
        self, state: RampState, *, target: float, batch_samples: float, momentum: float
    ) -> RampState:
        """Return the state after this step (see `Compensation`)."""
        before = state.batch_samples or batch_samples
        excess = ((1 + state.excess) * (batch_samples / before) - 1) * momentum**2
        if abs(excess) < _SETTLED:
            excess = 0.0
        return RampState(
            batch_samples=batch_samples, applied=target / math.sqrt(1 + excess), excess=excess
        )


def _check_length(length: object) -> float:
    if isinstance(length, Real) and math.isfinite(length) and float(length) >= 0:
        return float(length)
    rule = "a ramp's length must be a finite number of optimizer steps, 0 or more"
    way_out = "Pass a number, or a function of (k, momentum) that returns one."
    raise ArgumentError(describe("length", length, rule=rule, way_out=way_out))

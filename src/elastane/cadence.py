"""How often gradients are to be measured, so that the gain stays as sure as was asked for.

Pure arithmetic on floats; knows nothing of torch, of rules or of how moments are measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from elastane.errors import StateError
from elastane.noise import Moments

__all__ = ["Cadence", "gain_influence", "measuring_interval", "standard_error"]

MOST = 16
"""Longest time between two measurements, in steps: the moments drift."""

_TRIAL = 10
_MEMORY = 0.95


def gain_influence(
    sample: Moments, average: Moments, *, scale: float, base_batch_size: float
) -> float:
    r"""Return how far one step's moments alone would move the gain, to first order.

    With `v = s / B0`, `m = mu^2` and `D = v / S + m` the gain is `(v + m) / D`, and::

        e = d ln r = (1 / (v + m) - 1 / (S D)) (v_t - v) + (1 / (v + m) - 1 / D) (m_t - m)

    Args:
        sample: raw moments of the step, `v_t` and `m_t`.
        average: those averaged over the steps before.
        scale: `S`.
        base_batch_size: `B0` in samples.

    Returns:
        `e`; 0 where the averages tell no gain that could move (no noise, or no signal yet).
    """
    noise, signal = max(average.variance, 0.0) / base_batch_size, max(average.sqr_norm, 0.0)
    scaled = noise / scale + signal
    if noise == 0 or signal == 0:
        return 0.0
    by_noise = 1 / (noise + signal) - 1 / (scale * scaled)
    by_signal = 1 / (noise + signal) - 1 / scaled
    return by_noise * (sample.variance / base_batch_size - noise) + by_signal * (
        sample.sqr_norm - signal
    )


def standard_error(influence: float, *, smoothing: float, every: int) -> float:
    """Return the relative standard error of a gain whose moments are averaged over steps.

    Samples that are independent, one every `k` steps, in an average that forgets by `theta` a
    step::

        sqrt(e^2 (1 - theta^k) / (1 + theta^k))

    Args:
        influence: `e`, root mean square of `gain_influence`.
        smoothing: `theta`, of one step.
        every: `k`.
    """
    kept = smoothing**every
    return influence * math.sqrt((1 - kept) / (1 + kept))


def measuring_interval(influence: float, *, smoothing: float, error: float) -> int:
    """Return the most steps, up to 16, that keep `standard_error` at or below a bound.

    Args:
        influence: `e`, root mean square of `gain_influence`.
        smoothing: `theta`, of one step.
        error: bound on the relative standard error of the gain.

    Returns:
        `k`, at least 1: with a short memory the bound may be out of reach.
    """
    return max(
        (
            k
            for k in range(1, MOST + 1)
            if standard_error(influence, smoothing=smoothing, every=k) <= error
        ),
        default=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """When to measure next. A value object: `measured` and `passed` return a new one.

    The first ten steps at a scale are measured one by one; they tell how much a single step's
    moments scatter. After that each measurement says when the next one is due.

    Attributes:
        scale: `S` that the scatter was seen at.
        count: measurements at it.
        sqr_influence: sum of `e^2`, weighted by age.
        weight: what it is divided by.
        since: steps since the last measurement; 0 right after it.
        interval: steps from the last measurement to the next.
    """

    scale: float = 0.0
    count: int = 0
    sqr_influence: float = 0.0
    weight: float = 0.0
    since: int = 0
    interval: int = 1

    def is_due(self, scale: float) -> bool:
        """Whether the next step is to be measured, also because it is the first at a scale."""
        return self.since + 1 >= self.interval or (self.count > 0 and scale != self.scale)

    @property
    def elapsed(self) -> int:
        """Steps that the next measurement stands for; not those in which none could be had."""
        return min(self.since + 1, self.interval)

    def fixed(self, every: int) -> Cadence:
        """Return the state after a measured step if the next is due after so many."""
        return replace(self, since=0, interval=every)

    def passed(self) -> Cadence:
        """Return the state after a step that was not measured."""
        return replace(self, since=self.since + 1)

    def measured(
        self, influence: float, *, scale: float, smoothing: float, error: float
    ) -> Cadence:
        """Return the state after a measured step.

        Args:
            influence: `gain_influence` of the step.
            scale: `S` that the policy asks for; a short batch at an epoch's end is no change.
            smoothing: `theta`, of one step.
            error: bound on the relative standard error of the gain.
        """
        past = self if scale == self.scale else Cadence()
        now = replace(
            past,
            scale=scale,
            count=past.count + 1,
            sqr_influence=_MEMORY * past.sqr_influence + influence**2,
            weight=_MEMORY * past.weight + 1,
            since=0,
            interval=1,
        )
        if now.count < _TRIAL:
            return now
        scatter = math.sqrt(now.sqr_influence / now.weight)
        return replace(now, interval=measuring_interval(scatter, smoothing=smoothing, error=error))

    def state_dict(self) -> dict[str, float | int]:
        """Return the state as numbers."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, float | int]) -> Cadence:
        """Return the cadence that `state_dict` described.

        Raises:
            StateError: other fields.
        """
        wanted = {one.name for one in fields(cls)}
        if set(state) != wanted:
            raise StateError(
                f"state of a cadence has other fields: {dict(state)!r} instead of {sorted(wanted)}"
            )
        return cls(**state)  # pyright: ignore[reportArgumentType]

"""Gradient noise: how the moments of a step are estimated, averaged and read.

Pure arithmetic on floats or 0-dim tensors; knows nothing of torch, of rules or of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace

from elastane.errors import ArgumentError, StateError, check_choice, describe

__all__ = [
    "MomentAverage",
    "Moments",
    "critical_batch",
    "efficiency",
    "estimate_moments",
    "gain",
    "noise_scale",
    "smoothing",
    "total_moments",
]

AVERAGES = ("debiased", "paper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Two moments of the gradient; neither depends on the number of workers.

    Both are raw estimates and may be negative. They are clamped only where they are read: by
    `gain`, `noise_scale` and `critical_batch`.

    Attributes:
        variance: `s`, trace of the covariance of one sample's gradient.
        sqr_norm: `mu^2`, squared norm of the expected gradient.
    """

    variance: float
    sqr_norm: float


def estimate_moments(
    *,
    weighted_sqr_norm: float,
    mean_sqr_norm: float,
    batch_samples: float,
    num_gradients: int,
) -> Moments | None:
    r"""Return the unbiased moments of one step, or `None` if one gradient can't tell them.

    With `n` gradients `g_i`, each the mean over `b_i` samples, `B = sum b_i` and the batch's
    mean gradient `g = sum b_i g_i / B`::

        s    = (sum b_i |g_i|^2 - B |g|^2) / (n - 1)
        mu^2 = |g|^2 - s / B

    Args:
        weighted_sqr_norm: `sum b_i |g_i|^2`.
        mean_sqr_norm: `|g|^2`.
        batch_samples: `B`, above 0.
        num_gradients: `n`; the gradients must come from independent samples.

    Raises:
        ArgumentError: `batch_samples` or `num_gradients` is not positive.

    Example:
        Two orthogonal unit gradients over one sample each are pure noise:

        >>> estimate_moments(
        ...     weighted_sqr_norm=2.0, mean_sqr_norm=0.5, batch_samples=2, num_gradients=2)
        Moments(variance=1.0, sqr_norm=0.0)

    References:
        Johnson et al., AdaScale SGD (2020), section 3.3, for equal `b_i`; the form for unequal
        `b_i` is ours.
    """
    if num_gradients < 1 or batch_samples <= 0:
        name, value = ("num_gradients", num_gradients)
        if num_gradients >= 1:
            name, value = ("batch_samples", batch_samples)
        way_out = "Count each micro-batch whose weight is above 0."
        raise ArgumentError(describe(name, value, rule="must be positive", way_out=way_out))
    if num_gradients == 1:
        return None
    variance = (weighted_sqr_norm - batch_samples * mean_sqr_norm) / (num_gradients - 1)
    return Moments(variance=variance, sqr_norm=mean_sqr_norm - variance / batch_samples)


def total_moments(moments: Iterable[Moments]) -> Moments:
    """Return the moments of all parameters from those of disjoint groups of them (their sum)."""
    parts = list(moments)
    return Moments(
        variance=math.fsum(part.variance for part in parts),
        sqr_norm=math.fsum(part.sqr_norm for part in parts),
    )


def gain(moments: Moments, *, scale: float, base_batch_size: float) -> float:
    """Return `r`: how many base steps one step at `scale` is worth.

    With `sigma^2 = s / B0`::

        r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2)

    between `min(1, S)` and `max(1, S)`. The moments are clamped at 0 here. Gradients that are
    all zero give 1; a squared norm that is not above 0 otherwise gives `S`.

    Args:
        moments: averages of the raw moments.
        scale: `S = B / B0`, any finite number above 0.
        base_batch_size: `B0` in samples.

    Example:
        >>> gain(Moments(variance=3.0, sqr_norm=1.0), scale=3, base_batch_size=1)
        2.0

    References:
        Johnson et al., AdaScale SGD (2020), algorithm 2; `S` below 1 is ours.
    """
    if moments.variance == 0 and moments.sqr_norm == 0:
        return 1.0
    if moments.sqr_norm <= 0:
        return scale
    noise = noise_scale(moments) / base_batch_size  # sigma^2 / mu^2: sums can't overflow
    if math.isinf(noise):
        return scale
    ratio = (noise + 1) / (noise / scale + 1)
    return min(max(ratio, min(1.0, scale)), max(1.0, scale))


def noise_scale(moments: Moments) -> float:
    """Return the gradient noise scale `phi = s / mu^2` in samples.

    Infinite if there is noise and no signal left after clamping; 0 if there is no noise.

    References:
        McCandlish et al., An Empirical Model of Large-Batch Training (2018), `B_simple`.
    """
    variance = max(moments.variance, 0.0)
    if variance == 0:
        return 0.0
    return variance / moments.sqr_norm if moments.sqr_norm > 0 else math.inf


def efficiency(moments: Moments, *, batch_samples: float) -> float:
    """Return what a sample in a batch of `B` is worth beside one in a tiny batch: `phi/(phi+B)`.

    References:
        McCandlish et al. (2018), from `(T/T_min - 1)(E/E_min - 1) = 1`.
    """
    scale = noise_scale(moments)
    return 1.0 if math.isinf(scale) else scale / (scale + batch_samples)


def critical_batch(moments: Moments, *, efficiency: float = 0.5) -> float:
    """Return the batch in samples at which a sample's worth has fallen to `efficiency`.

    `B = phi (1 - e) / e`; at `e = 1/2` this is the noise scale itself, the usual critical batch.

    Args:
        moments: averages of the raw moments.
        efficiency: `e`, strictly between 0 and 1.

    References:
        McCandlish et al. (2018).
    """
    if not 0 < efficiency < 1:
        rule, way_out = "must lie strictly between 0 and 1", "0.5 is the usual critical batch."
        raise ArgumentError(describe("efficiency", efficiency, rule=rule, way_out=way_out))
    return noise_scale(moments) * (1 - efficiency) / efficiency


def smoothing(scale: float) -> float:
    """Return `theta = max(1 - S/1000, 0.9)`: the last 1000 base steps, at least ten steps.

    References:
        Johnson et al., AdaScale SGD (2020), section 3.3, whose bound is 0: it forgets ever more
        from `S = 100` on, and everything at once from 1000. The memory of ten steps is ours.
    """
    return max(1 - scale / 1000, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentAverage:
    """Moving average of raw moments over steps, right under a smoothing that varies.

    `debiased`, with the weight kept beside the value::

        value <- theta value + (1 - theta) x,  weight <- theta weight + (1 - theta)
        read-out: value / weight

    `paper`, the plain mean of the past while that is the shorter memory::

        value <- value + max(1 / count, 1 - theta) (x - value)

    A value object: `updated` returns a new average, so that a step that is not committed leaves
    no trace.

    Attributes:
        averaging: `"debiased"` or `"paper"`.
        variance: accumulated value for `s`.
        sqr_norm: accumulated value for `mu^2`.
        weight: what the accumulated values are divided by.
        count: number of samples so far.

    Example:
        >>> average = MomentAverage(averaging="debiased")
        >>> average = average.updated(Moments(variance=2.0, sqr_norm=4.0), smoothing=0.75)
        >>> average.read()
        Moments(variance=2.0, sqr_norm=4.0)

    References:
        Johnson et al., AdaScale SGD (2020), section 3.3, for `paper`; `debiased` is the bias
        correction of Kingma and Ba, Adam (2015), for a theta that changes.
    """

    averaging: str = "debiased"
    variance: float = 0.0
    sqr_norm: float = 0.0
    weight: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        check_choice("averaging", self.averaging, AVERAGES)

    def updated(self, sample: Moments, *, smoothing: float) -> MomentAverage:
        """Return the average with one more sample in it."""
        count = self.count + 1
        if self.averaging == "paper":
            share = max(1 / count, 1 - smoothing)
            keep, weight = 1 - share, 1.0
        else:
            share, keep = 1 - smoothing, smoothing
            weight = keep * self.weight + share
        return replace(
            self,
            variance=keep * self.variance + share * sample.variance,
            sqr_norm=keep * self.sqr_norm + share * sample.sqr_norm,
            weight=weight,
            count=count,
        )

    def read(self) -> Moments | None:
        """Return the averaged raw moments, or `None` before the first sample."""
        if self.weight == 0:
            return None
        return Moments(variance=self.variance / self.weight, sqr_norm=self.sqr_norm / self.weight)

    def state_dict(self) -> dict[str, float | int | str]:
        """Return the state as numbers and strings."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, float | int | str]) -> MomentAverage:
        """Return the average that `state_dict` described.

        Raises:
            StateError: other fields, or an unknown way to average.
        """
        wanted = {one.name for one in fields(cls)}
        if set(state) != wanted or state["averaging"] not in AVERAGES:
            message = f"state of a moment average has other fields: {dict(state)!r}"
            raise StateError(f"{message} instead of {sorted(wanted)}")
        return cls(**state)  # pyright: ignore[reportArgumentType]

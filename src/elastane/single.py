"""What serves while a step has one gradient: moments from single samples, and their handover.

Pure arithmetic on floats; knows nothing of torch, of layers or of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastane.errors import StateError
from elastane.noise import MomentAverage, Moments, estimate_moments, total_moments

__all__ = ["FADE", "Stopgap", "moments_of_layers"]

FADE = 0.9
"""What is left of the stopgap's share after each step with two gradients or more."""

_FORGOTTEN = 0.01


def moments_of_layers(
    sample_sqr_norms: Sequence[float | None],
    mean_sqr_norms: Sequence[float],
    *,
    batch_samples: float,
) -> list[Moments] | None:
    r"""Return each group's raw moments from the samples of one gradient, or `None`.

    In some layers the gradient of each sample has a norm that is cheap to take. With `g_i` the
    gradient of sample `i` over the parameters of these layers, and `g` their mean, they are `B`
    gradients over one sample each, and unbiased for these parameters::

        s = (sum |g_i|^2 - B |g|^2) / (B - 1),  mu^2 = |g|^2 - s / B

    Taken for the whole they presume one ratio `s / mu^2` in all layers. A group without such a
    layer takes the sum over the others.

    Args:
        sample_sqr_norms: `sum |g_i|^2` a group, `None` for a group without such a layer.
        mean_sqr_norms: `|g|^2` a group, over the same parameters.
        batch_samples: `B`; a single sample can't tell.

    Example:
        >>> moments_of_layers([8.0, None], [2.0, 0.0], batch_samples=2)
        [Moments(variance=4.0, sqr_norm=0.0), Moments(variance=4.0, sqr_norm=0.0)]

    References:
        Gray et al., Normalization Layer Per-Example Gradients are Sufficient to Predict Gradient
        Noise Scale in Transformers (2024). Here also linear layers and biases.
    """
    if batch_samples < 2:
        return None
    found = [
        None
        if per_sample is None
        else estimate_moments(
            weighted_sqr_norm=per_sample,
            mean_sqr_norm=mean,
            batch_samples=batch_samples,
            num_gradients=round(batch_samples),
        )
        for per_sample, mean in zip(sample_sqr_norms, mean_sqr_norms, strict=True)
    ]
    told = [one for one in found if one is not None]
    whole = total_moments(told)
    return [whole if one is None else one for one in found] if told else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopgap:
    """What steps with one gradient have said, and how much of the read-out that is.

    While there is nothing else its share is 1. Each step with two gradients or more leaves 0.9 of
    the share, so that after some twenty of them the unbiased moments stand all but alone; below
    0.01 the stopgap is forgotten. When single gradients come back, the share grows as an
    average's memory does, `share <- theta share + 1 - theta`.

    Attributes:
        average: of moments from single gradients.
        share: its part of the read-out, from 0 to 1.
    """

    average: MomentAverage
    share: float = 0.0

    def updated(self, sample: Moments, *, smoothing: float, others_known: bool) -> Stopgap:
        """Return the state after a sample from a single gradient.

        Args:
            sample: raw moments.
            smoothing: theta.
            others_known: whether there are moments from steps with two gradients or more.
        """
        share = smoothing * self.share + (1 - smoothing) if others_known else 1.0
        return replace(self, average=self.average.updated(sample, smoothing=smoothing), share=share)

    def faded(self) -> Stopgap:
        """Return the state after a step with two gradients or more."""
        share = FADE * self.share
        if share >= _FORGOTTEN:
            return replace(self, share=share)
        return Stopgap(average=MomentAverage(averaging=self.average.averaging))

    def blended(self, others: Moments | None) -> Moments | None:
        """Return the read-out: moments of the whole model once there are any.

        The stopgap's are of some layers. Their ratio alone is taken over, at the variance of the
        whole: `mu^2 = a mu_o^2 s / s_o + (1 - a) mu^2`. So the noise scale hands over smoothly.

        Args:
            others: averaged moments from steps with two gradients or more, `None` before any.
        """
        own = self.average.read()
        if own is None or others is None:
            return own or others
        if own.variance <= 0 or others.variance <= 0:  # without noise there is no ratio
            return others if self.share < 0.5 else own
        sqr_norm = own.sqr_norm * others.variance / own.variance
        return replace(others, sqr_norm=self.share * sqr_norm + (1 - self.share) * others.sqr_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers and strings."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Stopgap:
        """Return what `state_dict` described.

        Raises:
            StateError: other fields, or an unknown way to average.
        """
        if set(state) != {"average", "share"}:
            raise StateError(f"state of single gradients has other fields: {dict(state)!r}")
        average = MomentAverage.from_state_dict(state["average"])
        return cls(average=average, share=float(state["share"]))

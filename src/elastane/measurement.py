"""What one step's gradients said, read from the numbers that came back from the reduction.

Pure: floats in, floats out. Knows the layout of the step's vector; nothing of torch or workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastane import noise

__all__ = ["Measurement", "read_measurement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one step's gradients said; the same on every rank to the bit.

    Attributes:
        weighted_sqr_norms: `sum b_i |g_i|^2` a group, `None` for a step that was not measured.
        mean_sqr_norms: `|g|^2` a group.
        compared_sqr_norms: those of the mean that the weighted ones belong with; others than
            `mean_sqr_norms` where gradients are preconditioned.
        batch_samples: `B`.
        num_gradients: `n`, micro-batches of all workers with a weight above 0.
        weight: sum of all weights; `B` unless the user weighted by something else.
        finite: whether every gradient on every rank was finite.
        extras: sums over the ranks of the extra values.
    """

    weighted_sqr_norms: tuple[float, ...] | None
    mean_sqr_norms: tuple[float, ...]
    compared_sqr_norms: tuple[float, ...]
    batch_samples: float
    num_gradients: int
    weight: float
    finite: bool
    extras: tuple[float, ...]

    @property
    def grad_norm(self) -> float:
        """Norm of the mean gradient over all groups."""
        return math.sqrt(math.fsum(self.mean_sqr_norms))

    def moments(self) -> list[noise.Moments] | None:
        """Return each group's raw moments, or `None` where this step can't tell them."""
        if self.weighted_sqr_norms is None or not self.finite or self.num_gradients < 2:
            return None
        pairs = zip(self.weighted_sqr_norms, self.compared_sqr_norms, strict=True)
        estimates = [
            noise.estimate_moments(
                weighted_sqr_norm=weighted,
                mean_sqr_norm=mean,
                batch_samples=self.batch_samples,
                num_gradients=self.num_gradients,
            )
            for weighted, mean in pairs
        ]
        return [estimate for estimate in estimates if estimate is not None]


def read_measurement(
    reduced: Sequence[float],
    mean_sqr_norms: Sequence[float],
    *,
    compared_sqr_norms: Sequence[float] | None = None,
    batch_samples: float,
    loss_scale: float,
    measured: bool,
) -> Measurement:
    """Return the measurement from the step's small reduction and the norms of the mean gradient.

    Weights other than samples are rescaled to add up to `B`, and with them the norms of a mean
    that was taken with `1 / B`; the square of the loss scale is divided out.

    Args:
        reduced: SUM over the ranks of `sum w_i |g_i|^2` a group, the sum of weights, the number
            of gradients, the number of ranks with gradients that are not finite, extras.
        mean_sqr_norms: `|sum w_i g_i / B|^2` a group.
        compared_sqr_norms: the same of preconditioned gradients, where these were measured.
        batch_samples: `B`.
        loss_scale: what the loss was multiplied by before backward.
        measured: whether the first numbers were taken.
    """
    groups = len(mean_sqr_norms)
    weighted, (weight, num_gradients, num_broken) = reduced[:groups], reduced[groups : groups + 3]
    share = batch_samples / weight if weight > 0 else 1.0
    unscaled = 1 / (loss_scale * loss_scale)

    def of_mean(sqr_norms: Sequence[float]) -> tuple[float, ...]:
        return tuple(one * share * share * unscaled for one in sqr_norms)

    return Measurement(
        weighted_sqr_norms=tuple(w * share * unscaled for w in weighted) if measured else None,
        mean_sqr_norms=of_mean(mean_sqr_norms),
        compared_sqr_norms=of_mean(compared_sqr_norms or mean_sqr_norms),
        batch_samples=batch_samples,
        num_gradients=round(num_gradients),
        weight=weight,
        finite=num_broken == 0 and all(math.isfinite(value) for value in mean_sqr_norms),
        extras=tuple(reduced[groups + 3 :]),
    )

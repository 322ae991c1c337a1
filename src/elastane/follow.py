"""What besides the learning rate follows the batch, for Adam and its kin: betas, epsilon, decay.

Pure arithmetic; knows nothing of torch or of optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from elastane.errors import StateError, check_choice

__all__ = ["Follow", "MomentWeights", "followed_decay", "followed_eps", "half_life_beta"]


def half_life_beta(beta: float, *, scale: float) -> float:
    """Return `beta^S`: an average over steps of `S` base batches that forgets as much a sample.

    Example:
        >>> round(half_life_beta(0.999, scale=16), 6)
        0.984119

    References:
        Marek et al. (arXiv 2507.07101, 2025), the half-life in tokens; to first order in
        `1 - beta` it is `1 - S (1 - beta)` of Malladi et al. (arXiv 2205.10287, 2022), which
        is no average any longer from `S = 1 / (1 - beta)` on.
    """
    return beta**scale


def followed_eps(eps: float, *, scale: float) -> float:
    """Return `eps / sqrt S`: as much smaller as noise leaves the root of the second moment.

    References:
        Malladi et al. (arXiv 2205.10287, 2022), the square root rule of Adam.
    """
    return eps / math.sqrt(scale)


def followed_decay(weight_decay: float, *, factor: float, progress: float) -> float:
    """Return the decoupled decay with which one step decays as much as the base steps it is worth.

    `lambda progress / factor`: a step decays weights by `lr factor lambda'`, and a base step by
    `lr lambda`. At a factor of 1 it is in proportion to the batch.

    Args:
        weight_decay: `lambda` of a base step.
        factor: on the learning rate in this step.
        progress: base steps that it is worth.

    References:
        Bergsma et al. (arXiv 2505.13738, 2025): `B / (lr lambda D)` is what to keep.
    """
    return weight_decay * progress / factor


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentWeights:
    """How much there is in Adam's two averages: `w <- beta w + (1 - beta)`, from 0.

    A moment divided by its weight is a mean of what went into it. Adam divides by `1 - beta^t`,
    which is the weight only if beta was the same in all `t` steps. A value object: `updated`
    returns a new one.

    Attributes:
        steps: `t`.
        first: weight in the average of gradients.
        second: weight in the average of squares.

    Example:
        >>> weights = MomentWeights(steps=10, first=1 - 0.9**10, second=1 - 0.999**10)
        >>> lr, eps = weights.updated((0.9, 0.984)).corrections((0.9, 0.984))
        >>> round(lr, 3), round(eps, 3)
        (0.398, 0.398)
    """

    steps: float = 0.0
    first: float = 0.0
    second: float = 0.0

    def updated(self, betas: tuple[float, float]) -> MomentWeights:
        """Return the weights after a step with these betas."""
        return MomentWeights(
            steps=self.steps + 1,
            first=betas[0] * self.first + 1 - betas[0],
            second=betas[1] * self.second + 1 - betas[1],
        )

    def corrections(self, betas: tuple[float, float]) -> tuple[float, float]:
        r"""Return what lr and eps are multiplied by, so that Adam divides by these weights.

        With `c1 = 1 - beta1^t` and `c2 = 1 - beta2^t`, by which it will divide, `eps` is multiplied
        by `sqrt(w2 / c2)`, and `lr` by that times `c1 / w1`::

            lr' (m / c1) / (sqrt(v / c2) + eps') = lr (m / w1) / (sqrt(v / w2) + eps)

        Args:
            betas: of the step that these are the weights after.
        """
        c1, c2 = (1 - beta**self.steps for beta in betas)
        eps = math.sqrt(self.second / c2)
        return eps * c1 / self.first, eps

    def state_dict(self) -> dict[str, float]:
        """Return the weights as numbers."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, float]) -> MomentWeights:
        """Return the weights that `state_dict` described.

        Raises:
            StateError: other fields.
        """
        try:
            return cls(**state)
        except TypeError as error:
            raise StateError(f"state of moment weights has other fields: {dict(state)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Which of an adaptive optimizer's other numbers follow the batch; by default none does.

    They are set for the length of a step, as the learning rate is; the optimizer's own stay.

    Attributes:
        betas: `"second"`: the average of squares forgets as much a *sample* as at the base batch
            (`half_life_beta`), `"both"`: the average of gradients, too, `"keep"`: neither. The
            moments are carried over a change, and what they are divided by is right after it
            (`MomentWeights`).
        eps: divide epsilon by the root of the scale (`followed_eps`).
        weight_decay: let decoupled decay count progress (`followed_decay`).
        second_moment: `"base"`: average the squares that single base batches would have, from
            the gradients of a step's micro-batches element by element; `"keep"`: those of the
            mean gradient.
    """

    betas: str = "keep"
    eps: bool = False
    weight_decay: bool = False
    second_moment: str = "keep"

    def __post_init__(self) -> None:
        check_choice("betas", self.betas, ("keep", "second", "both"))
        check_choice("second_moment", self.second_moment, ("keep", "base"))

    @property
    def takes_squares(self) -> bool:
        """Whether each micro-batch's squared gradient is wanted, element by element."""
        return self.second_moment == "base"

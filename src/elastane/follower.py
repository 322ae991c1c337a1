"""Gives an adaptive optimizer, for the length of a step, the numbers that follow the batch.

The optimizer stays the user's. Knows its parameter groups; nothing of gradients or of moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from elastane.follow import (
    Follow,
    MomentWeights,
    followed_decay,
    followed_eps,
    half_life_beta,
)
from elastane.optimizers import AnyOptimizer, members_of
from elastane.schedule import set_lr
from elastane.zero import own_state

__all__ = ["Follower"]

_FOLLOWING = ("betas", "alpha", "eps", "weight_decay")

Group = dict[str, Any]


class Follower:
    """Sets what follows, and remembers the weights of Adam's averages while their betas change.

    Args:
        optimizer: one that `elastane.adaptive.check_follow` lets pass, or several.
        follow: what follows.
    """

    def __init__(self, optimizer: AnyOptimizer, follow: Follow) -> None:
        self._optimizer = optimizer
        self._follow = follow
        self._is_idle = follow == Follow()
        self._weights: list[MomentWeights] | None = None

    @contextmanager
    def stepping(
        self, *, scale: float, factors: Sequence[float], progress: float
    ) -> Iterator[None]:
        """Set the numbers for the length of a block, in which the optimizer steps once.

        The learning rates must be the step's already, and be put back by whoever set them.

        Args:
            scale: `S`, of the batch that the policy asks for.
            factors: on the learning rate, for each group or a single one for all.
            progress: base steps that the step is worth.
        """
        if self._is_idle:
            yield
            return
        groups = self._optimizer.param_groups
        each = list(factors) * len(groups) if len(factors) == 1 else factors
        saved = [{name: one[name] for name in _FOLLOWING if name in one} for one in groups]
        weights = self._weights_of(groups)
        try:
            after = [
                self._set(group, weight, scale=scale, factor=factor, progress=progress)
                for group, weight, factor in zip(groups, weights, each, strict=True)
            ]
            yield
            self._weights = after
        finally:
            for group, own in zip(groups, saved, strict=True):
                group.update(own)

    def second_weights(self) -> list[float] | None:
        """Return the weight in each group's average of squares, if its beta follows the batch."""
        if self._weights is None or self._follow.betas == "keep":
            return None
        return [one.second for one in self._weights]

    def state_dict(self) -> list[dict[str, float]]:
        """Return the weights of each group's averages; empty before the first step."""
        return [one.state_dict() for one in self._weights or ()]

    def load_state_dict(self, state: Sequence[Mapping[str, float]]) -> None:
        """Take up the weights of the averages."""
        self._weights = [MomentWeights.from_state_dict(one) for one in state] or None

    def _set(
        self, group: Group, weights: MomentWeights, *, scale: float, factor: float, progress: float
    ) -> MomentWeights:
        follow = self._follow
        if follow.eps:
            group["eps"] = followed_eps(group["eps"], scale=scale)
        if follow.weight_decay and group.get("weight_decay", 0):
            decay = followed_decay(group["weight_decay"], factor=factor, progress=progress)
            group["weight_decay"] = decay
        if follow.betas == "keep":
            return weights
        if "alpha" in group:
            group["alpha"] = half_life_beta(group["alpha"], scale=scale)
            return weights
        return self._set_betas(group, weights, scale=scale)

    def _set_betas(self, group: Group, weights: MomentWeights, *, scale: float) -> MomentWeights:
        first, second = group["betas"]
        if self._follow.betas == "both":
            first = half_life_beta(first, scale=scale)
        betas = group["betas"] = (first, half_life_beta(second, scale=scale))
        after = weights.updated(betas)
        lr, eps = after.corrections(betas)
        set_lr(group, group["lr"] * lr)
        group["eps"] *= eps
        if group.get("decoupled_weight_decay"):
            group["weight_decay"] /= lr  # decay has no start to be corrected for
        return after

    def _weights_of(self, groups: Sequence[Group]) -> list[MomentWeights]:
        """Return the weights before the step; a group that joined, or came with moments, too."""
        known = self._weights or []
        return [*known, *(self._first_weights(group) for group in groups[len(known) :])]

    def _first_weights(self, group: Group) -> MomentWeights:
        if "betas" not in group:
            return MomentWeights()
        steps = max((self._steps_of(parameter) for parameter in group["params"]), default=0.0)
        first, second = group["betas"]
        return MomentWeights(steps=steps, first=1 - first**steps, second=1 - second**steps)

    def _steps_of(self, parameter: Any) -> float:
        for one in members_of(self._optimizer):
            if parameter in (state := own_state(one)):
                return float(state[parameter].get("step", 0.0))
        return 0.0

"""The ways to take an AdamW run to a larger batch that the study compares, by name.

Knows scaling rules and what follows the batch; nothing of tasks, runs or results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastane import AdamScale, AdaScale, Follow, Linear, Sqrt
from elastane.scaling import Rule, Scaling, StepContext

__all__ = ["FOUND", "FOUND_LONGER", "RULES", "Stretched", "Way"]

_HAIR = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretched:
    """The base learning rate with another length of the run, for a search by hand.

    Attributes:
        steps: optimizer steps that the run is to take; `None`: as many samples as at the base
            batch.
    """

    steps: int | None = None

    def __call__(self, now: StepContext) -> Scaling:
        """Return the scaling for this step."""
        if self.steps is None:
            return Scaling(1.0, now.scale)
        return Scaling(1.0, (1 + _HAIR) * now.num_steps / self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One row: a rule and what goes with it.

    Attributes:
        rule: scaling rule.
        follow: what besides the learning rate follows the batch.
        measure: whether the rule looks at the gain.
        precondition: whether the gain is measured as AdamW sees the gradients.
    """

    rule: Rule
    follow: Follow = Follow()
    measure: bool = False
    precondition: bool = False


_SDE = Follow(betas="both", eps=True)
_BASE = Follow(second_moment="base")

FOUND, FOUND_LONGER = "found by search", "found by search, as many steps"
RULES: Mapping[str, Way] = {
    "unchanged": Way(rule=Stretched()),
    "linear": Way(rule=Linear()),
    "sqrt": Way(rule=Sqrt()),
    "sqrt, decay": Way(rule=Sqrt(), follow=Follow(weight_decay=True)),
    "sqrt, second beta": Way(rule=Sqrt(), follow=Follow(betas="second")),
    "sqrt, both betas, eps": Way(rule=Sqrt(), follow=_SDE),
    "linear, base squares, both betas": Way(
        rule=Linear(), follow=Follow(betas="both", second_moment="base")
    ),
    "adamscale": Way(rule=AdamScale(), measure=True),
    "adamscale, decay": Way(rule=AdamScale(), follow=Follow(weight_decay=True), measure=True),
    "adamscale, preconditioned": Way(rule=AdamScale(), measure=True, precondition=True),
    "adascale, base squares": Way(rule=AdaScale(), follow=_BASE, measure=True),
    "adascale, base squares, preconditioned": Way(
        rule=AdaScale(), follow=_BASE, measure=True, precondition=True
    ),
}
"""All but those that are found by search."""

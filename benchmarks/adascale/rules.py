"""The rules that the table compares, by name.

Knows scaling rules; nothing of tasks, runs or results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastane import AdaScale, Identity, Linear, MomentumRamp, Sqrt, WarmUp
from elastane.measuring import AUTO
from elastane.momentum import Compensation
from elastane.scaling import Rule, Scaling, StepContext

__all__ = [
    "AS_MANY_STEPS",
    "AT_ONCE",
    "SELDOM",
    "TRIED",
    "Stretched",
    "compensation_of",
    "rule_of",
]

AS_MANY_STEPS = "lsw+"
AT_ONCE = "adascale, no ramp"
SELDOM = "adascale, seldom measured"
TRIED: Mapping[str, Mapping[str, Any]] = {
    "adascale, momentum 0.9": {"momentum": 0.9},
    "adascale, momentum 0.5": {"momentum": 0.5},
    "adascale, no average": {"smoothing": 0.0},
    SELDOM: {"every": AUTO},
}
"""AdaScale with other conditions than its rows have, by name: fields of `Conditions`."""
_HAIR = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretched:
    """Linear scaling with warm-up, stretched to a number of steps: "LSW+" of the AdaScale paper.

    Each step is worth `T / num_steps` base steps, so that the schedule and the warm-up over its
    first 5.5 % are stretched with it; the factor is that of linear scaling.

    Attributes:
        steps: optimizer steps that the run is to take.

    References:
        Johnson et al., AdaScale SGD (2020), the baseline of the published version; it answers the
        critique that AdaScale only trains longer.
    """

    steps: int

    def __call__(self, now: StepContext) -> Scaling:
        """Return the scaling for this step."""
        factor = WarmUp(rule=Linear())(now).factor
        # A hair more, or rounding could leave the last step just short of the end.
        return Scaling(factor, (1 + _HAIR) * now.num_steps / self.steps)


def rule_of(name: str, *, steps: int | None = None) -> Rule:
    """Return a rule of the table.

    Args:
        name: as in the table.
        steps: that AdaScale took, for the rule that takes as many.
    """
    if name == AS_MANY_STEPS:
        assert steps is not None
        return Stretched(steps=steps)
    rules: dict[str, Rule] = {
        **dict.fromkeys(TRIED, AdaScale()),
        "adascale": AdaScale(),
        AT_ONCE: AdaScale(),
        "lsw": WarmUp(rule=Linear()),
        "sqrt": Sqrt(),
        "identity": Identity(progress="gain"),
    }
    return rules[name]


def compensation_of(name: str) -> Compensation | None:
    """Return the momentum compensation at a change of batch: elastane's default for AdaScale."""
    return MomentumRamp() if name == "adascale" else None

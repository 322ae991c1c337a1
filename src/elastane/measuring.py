"""How gradient statistics are taken and averaged, as users say it.

Plain values, checked; knows nothing of how it is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastane import noise
from elastane.errors import ArgumentError, check_choice, check_positive, check_whole, describe

__all__ = ["AUTO", "Measuring"]

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How gradient statistics are taken and averaged.

    Attributes:
        averaging: `"debiased"`, or `"paper"` for a plain mean that turns into a moving average.
        smoothing: theta between 0 and 1; by default it follows the scale, `max(1 - S/1000, 0.9)`.
        every: measure every k-th step, or `"auto"`: as seldom, up to every 16th, as keeps the
            relative standard error of the gain below `error` (`elastane.cadence`). In between the
            moments of earlier steps serve; the memory of the averages stays the same in steps.
        error: for `every="auto"`.
        current: let a step's own gradients take part in its gain, as fairscale and AdaptDL do.
            By default the gain comes from earlier steps alone, as the paper reads, so that the
            learning rate never depends on the gradient that it multiplies.
        per: `"model"`: one gain (the paper's); `"param_group"`: a gain for each parameter group
            of the optimizer. Progress always counts the whole model's gain.
        single: what steps with a single gradient (one worker, one micro-batch) tell: `"layers"`,
            the moments of layers that tell its samples' gradients apart; `"off"`, nothing.
        precondition: measure `g / (sqrt v + eps)` in place of the gradient, with the second
            moment `v` of an Adam or its kin: the noise as that optimizer sees it (Qiao et al.,
            Pollux, 2021). The layers of `single` tell nothing then. Not for sharded models.
    """

    averaging: str = "debiased"
    smoothing: float | None = None
    every: int | str = AUTO
    error: float = 0.02
    current: bool = False
    per: str = "model"
    single: str = "layers"
    precondition: bool = False

    def __post_init__(self) -> None:
        check_choice("averaging", self.averaging, noise.AVERAGES)
        check_choice("per", self.per, ("model", "param_group"))
        check_choice("single", self.single, ("layers", "off"))
        if self.every != AUTO:
            way_out = '1 measures each step, "auto" as often as the noise needs.'
            check_whole("every", self.every, at_least=1, way_out=way_out)
        way_out = "A part of the gain, such as 0.02."
        check_positive("error", self.error, way_out=way_out)
        if self.smoothing is not None and not 0 <= self.smoothing < 1:
            rule, way_out = "must be at least 0 and below 1", "None follows the scale."
            raise ArgumentError(describe("smoothing", self.smoothing, rule=rule, way_out=way_out))

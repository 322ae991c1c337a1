"""The decision of a step: from moments, rule and momentum compensation to factor and progress.

Pure and transactional: `decide` changes nothing, `commit` takes its outcome. Knows nothing of
torch, of workers or of how the gradients were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastane import noise
from elastane.errors import ArgumentError, StateError, check_choice, check_whole, describe
from elastane.momentum import Compensation, RampState
from elastane.noise import MomentAverage, Moments
from elastane.scaling import Rule, StepContext, apply_rule

__all__ = ["Decision", "Measuring", "StepController"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How gradient statistics are taken and averaged.

    Attributes:
        averaging: `"debiased"`, or `"paper"` for a plain mean that turns into a moving average.
        smoothing: theta between 0 and 1; by default it follows the scale, `max(1 - S/1000, 0)`.
        every: measure every k-th step; in between, the moments of earlier steps serve.
        current: let a step's own gradients take part in its gain, as fairscale and AdaptDL do.
            By default the gain comes from earlier steps alone, as the paper reads, so that the
            learning rate never depends on the gradient that it multiplies.
        per: `"model"`: one gain (the paper's); `"param_group"`: a gain for each parameter group
            of the optimizer. Progress always counts the whole model's gain.
    """

    averaging: str = "debiased"
    smoothing: float | None = None
    every: int = 1
    current: bool = False
    per: str = "model"

    def __post_init__(self) -> None:
        check_choice("averaging", self.averaging, noise.AVERAGES)
        check_choice("per", self.per, ("model", "param_group"))
        check_whole("every", self.every, at_least=1, way_out="1 measures each step.")
        if self.smoothing is not None and not 0 <= self.smoothing < 1:
            rule, way_out = "must be at least 0 and below 1", "None follows the scale."
            raise ArgumentError(describe("smoothing", self.smoothing, rule=rule, way_out=way_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one step will do, and what the controller will remember if it is committed.

    Attributes:
        scale: `S` of this step.
        gain: `r` of the whole model.
        factors: what each parameter group's learning rate is multiplied by (one number for all
            if the gain is the model's).
        progress: what the step is worth in base steps.
        moments: averaged raw moments of the model that the gain came from; `None` if there are
            none yet.
    """

    scale: float
    gain: float
    factors: tuple[float, ...]
    progress: float
    moments: Moments | None
    averages: tuple[MomentAverage, ...]
    ramps: tuple[RampState, ...]


class StepController:
    """Keeps progress, moments and ramps, and decides each step from them.

    Args:
        rule: scaling rule.
        base_batch_size: `B0` in samples.
        num_steps: base steps at which training ends.
        compensation: momentum compensation, or `None` for none.
        measuring: how moments are averaged.
        num_groups: number of groups with statistics of their own.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        base_batch_size: int,
        num_steps: float,
        compensation: Compensation | None,
        measuring: Measuring,
        num_groups: int = 1,
    ) -> None:
        self._rule = rule
        self._base_batch_size = base_batch_size
        self.num_steps = num_steps
        self._compensation = compensation
        self._measuring = measuring
        self._averages = (MomentAverage(averaging=measuring.averaging),) * num_groups
        self._ramps = (RampState(),) * num_groups
        self.progress = 0.0
        self.step = 0

    @property
    def finished(self) -> bool:
        """Whether progress has reached the end of training."""
        return self.progress >= self.num_steps

    @property
    def wants_measurement(self) -> bool:
        """Whether the next step is one to measure."""
        return self.step % self._measuring.every == 0

    def resize_groups(self, num_groups: int) -> None:
        """Give groups that were added later averages and ramps of their own."""
        new = num_groups - len(self._averages)
        self._averages += (MomentAverage(averaging=self._measuring.averaging),) * new
        self._ramps += (RampState(),) * new

    def decide(
        self,
        samples: Sequence[Moments] | None,
        *,
        batch_samples: float,
        nominal_samples: float,
        momentum: float,
    ) -> Decision:
        """Return what the step does.

        Args:
            samples: this step's raw moments, one a group; `None` if they were not measured or
                can't be told.
            batch_samples: samples of this step.
            nominal_samples: the batch that the policy asks for; the same but for a short or
                joined batch at the end of an epoch.
            momentum: momentum of the optimizer.
        """
        scale = batch_samples / self._base_batch_size
        averages = self._updated(samples, scale=scale)
        known = [average.read() for average in self._seen(averages)]
        present = [moments for moments in known if moments is not None]
        model = noise.total_moments(present) if present else None
        context = self._context(model, scale=scale, batch_samples=batch_samples)
        target, progress = apply_rule(self._rule, context)
        targets = [target]
        if len(known) > 1:
            contexts = (
                self._context(one, scale=scale, batch_samples=batch_samples) for one in known
            )
            targets = [apply_rule(self._rule, own).factor for own in contexts]
        ramps = tuple(
            self._compensated(ramp, target=wanted, batch_samples=nominal_samples, momentum=momentum)
            for ramp, wanted in zip(self._ramps, targets, strict=True)
        )
        held = [min(r.applied / wanted, 1.0) for r, wanted in zip(ramps, targets, strict=True)]
        progress *= sum(held) / len(held)
        return Decision(
            scale=scale,
            gain=context.gain,
            factors=tuple(ramp.applied for ramp in ramps),
            progress=progress,
            moments=model,
            averages=averages,
            ramps=ramps,
        )

    def commit(self, decision: Decision) -> None:
        """Take a decision as carried out."""
        self._averages, self._ramps = decision.averages, decision.ramps
        self.progress += decision.progress
        self.step += 1

    def _updated(
        self, samples: Sequence[Moments] | None, *, scale: float
    ) -> tuple[MomentAverage, ...]:
        if samples is None:
            return self._averages
        theta = self._measuring.smoothing
        theta = noise.smoothing(scale) if theta is None else theta
        pairs = zip(self._averages, samples, strict=True)
        return tuple(average.updated(sample, smoothing=theta) for average, sample in pairs)

    def _seen(self, updated: tuple[MomentAverage, ...]) -> tuple[MomentAverage, ...]:
        return updated if self._measuring.current else self._averages

    def _compensated(
        self, ramp: RampState, *, target: float, batch_samples: float, momentum: float
    ) -> RampState:
        if self._compensation is None:
            return RampState(batch_samples=batch_samples, applied=target)
        return self._compensation(
            ramp, target=target, batch_samples=batch_samples, momentum=momentum
        )

    def _context(
        self, moments: Moments | None, *, scale: float, batch_samples: float
    ) -> StepContext:
        gain = 1.0
        if moments is not None:
            gain = noise.gain(moments, scale=scale, base_batch_size=self._base_batch_size)
        return StepContext(
            scale=scale,
            gain=gain,
            progress=self.progress,
            num_steps=self.num_steps,
            step=self.step,
            batch_samples=batch_samples,
            base_batch_size=self._base_batch_size,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return progress, moments and ramps as numbers and strings."""
        return {
            "progress": self.progress,
            "step": self.step,
            "averages": [average.state_dict() for average in self._averages],
            "ramps": [asdict(ramp) for ramp in self._ramps],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` described.

        Raises:
            StateError: another number of groups, or other fields.
        """
        found, wanted = len(state["averages"]), len(self._averages)
        if found != wanted:
            message = (
                f"the state has moments of {found} parameter groups and this session {wanted}: "
                "build the optimizer with the same groups, and Measuring with the same `per`"
            )
            raise StateError(message)
        try:
            ramps = tuple(RampState(**ramp) for ramp in state["ramps"])
        except TypeError as error:
            raise StateError(f"state of a ramp has other fields: {error}") from error
        self._averages = tuple(MomentAverage.from_state_dict(one) for one in state["averages"])
        self._ramps = ramps
        self.progress = float(state["progress"])
        self.step = int(state["step"])

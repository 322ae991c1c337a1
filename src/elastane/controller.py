"""The decision of a step: from moments, rule and momentum compensation to factor and progress.

Pure and transactional: `decide` changes nothing, `commit` takes its outcome. Knows nothing of
torch, of workers or of how the gradients were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from elastane import noise
from elastane.cadence import Cadence, gain_influence
from elastane.errors import StateError
from elastane.measuring import Measuring
from elastane.momentum import Compensation, RampState
from elastane.noise import MomentAverage, Moments
from elastane.scaling import Rule, StepContext, apply_rule
from elastane.single import Stopgap

__all__ = ["Decision", "StepController"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one step will do, and what the controller will remember if it is committed.

    Attributes:
        scale: `S` of this step.
        gain: `r` of the whole model.
        factors: what each parameter group's learning rate is multiplied by (one number for all
            if the gain is the model's).
        buffer_factors: what the momentum buffers of each group are multiplied by before the step;
            as many as factors.
        progress: what the step is worth in base steps.
        moments: averaged raw moments of the model that the gain came from; `None` if there are
            none yet.
        single_share: part of them that comes from single gradients, from 0 to 1.
    """

    scale: float
    gain: float
    factors: tuple[float, ...]
    buffer_factors: tuple[float, ...]
    progress: float
    moments: Moments | None
    single_share: float
    averages: tuple[MomentAverage, ...]
    stopgaps: tuple[Stopgap, ...]
    cadence: Cadence
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
        self._averages: tuple[MomentAverage, ...] = ()
        self._stopgaps: tuple[Stopgap, ...] = ()
        self._ramps: tuple[RampState, ...] = ()
        self._cadence = Cadence()
        self.resize_groups(num_groups)
        self.progress = 0.0
        self.step = 0

    @property
    def finished(self) -> bool:
        """Whether progress has reached the end of training."""
        return self.progress >= self.num_steps

    def wants_measurement(self, nominal_samples: float) -> bool:
        """Whether the next step is one to measure, with the batch that the policy asks for."""
        return self._cadence.is_due(nominal_samples / self._base_batch_size)

    @property
    def takes_layers(self) -> bool:
        """Whether steps with a single gradient are measured by their layers."""
        return self._measuring.single == "layers" and not self._measuring.precondition

    @property
    def preconditions(self) -> bool:
        """Whether gradients are measured as the optimizer's second moment leaves them."""
        return self._measuring.precondition

    @property
    def base_batch_size(self) -> int:
        """`B0` in samples."""
        return self._base_batch_size

    def depends_on_gain(self, scale: float) -> bool:
        """Whether the rule would answer differently if the gain at `scale` were not 1."""
        alone = self._context(None, batch_samples=scale * self._base_batch_size)
        return apply_rule(self._rule, alone) != apply_rule(self._rule, replace(alone, gain=scale))

    def resize_groups(self, num_groups: int) -> None:
        """Give groups that were added later averages and ramps of their own."""
        new = num_groups - len(self._averages)
        average = MomentAverage(averaging=self._measuring.averaging)
        self._averages += (average,) * new
        self._stopgaps += (Stopgap(average=average),) * new
        self._ramps += (RampState(),) * new

    def decide(
        self,
        samples: Sequence[Moments] | None,
        *,
        batch_samples: float,
        nominal_samples: float,
        momentum: float,
        single: bool = False,
    ) -> Decision:
        """Return what the step does.

        Args:
            samples: this step's raw moments, one a group; `None` if they were not measured or
                can't be told.
            batch_samples: samples of this step.
            nominal_samples: the batch that the policy asks for; the same but for a short or
                joined batch at the end of an epoch.
            momentum: momentum of the optimizer.
            single: whether the moments come from a single gradient.
        """
        scale = batch_samples / self._base_batch_size
        averages, stopgaps = self._updated(samples, scale=scale, single=single)
        cadence = self._next_cadence(samples, scale=nominal_samples / self._base_batch_size)
        seen = self._averages, self._stopgaps
        if self._measuring.current:
            seen = averages, stopgaps
        known = _read(*seen)
        model = _total(known)
        context = self._context(model, batch_samples=batch_samples)
        whole = apply_rule(self._rule, context)
        targets = [whole.factor]
        if len(known) > 1:
            targets = self._targets(known, batch_samples=batch_samples)
        lasting = targets
        if batch_samples != nominal_samples:
            # No ramp may start from the factor of one short batch, or hold it up.
            lasting = self._targets(known, batch_samples=nominal_samples)
        ramps = tuple(
            self._compensated(ramp, target=wanted, batch_samples=nominal_samples, momentum=momentum)
            for ramp, wanted in zip(self._ramps, lasting, strict=True)
        )
        held = [ramp.applied / wanted for ramp, wanted in zip(ramps, lasting, strict=True)]
        factors = [ramp.applied for ramp in ramps]
        if batch_samples != nominal_samples:
            factors = [target * share for target, share in zip(targets, held, strict=True)]
        return Decision(
            scale=scale,
            gain=context.gain,
            factors=tuple(factors),
            buffer_factors=tuple(ramp.buffer_factor for ramp in ramps),
            progress=whole.progress * sum(min(one, 1.0) for one in held) / len(held),
            moments=model,
            single_share=max(stopgap.share for stopgap in seen[1]),
            averages=averages,
            stopgaps=stopgaps,
            cadence=cadence,
            ramps=ramps,
        )

    def commit(self, decision: Decision) -> None:
        """Take a decision as carried out."""
        self._averages, self._stopgaps = decision.averages, decision.stopgaps
        self._cadence, self._ramps = decision.cadence, decision.ramps
        self.progress += decision.progress
        self.step += 1

    def _updated(
        self, samples: Sequence[Moments] | None, *, scale: float, single: bool
    ) -> tuple[tuple[MomentAverage, ...], tuple[Stopgap, ...]]:
        if samples is None:
            return self._averages, self._stopgaps
        theta = self._smoothing(scale) ** self._cadence.elapsed
        each = list(zip(self._averages, self._stopgaps, samples, strict=True))
        if single:
            return self._averages, tuple(
                stopgap.updated(sample, smoothing=theta, others_known=average.count > 0)
                for average, stopgap, sample in each
            )
        averages = tuple(average.updated(sample, smoothing=theta) for average, _, sample in each)
        return averages, tuple(stopgap.faded() for _, stopgap, _ in each)

    def _next_cadence(self, samples: Sequence[Moments] | None, *, scale: float) -> Cadence:
        if samples is None:
            return self._cadence.passed()
        if isinstance(self._measuring.every, int):
            return self._cadence.fixed(self._measuring.every)
        known, influence = _total(_read(self._averages, self._stopgaps)), 0.0
        if known is not None:
            influence = gain_influence(
                noise.total_moments(samples),
                known,
                scale=scale,
                base_batch_size=self._base_batch_size,
            )
        return self._cadence.measured(
            influence,
            scale=scale,
            smoothing=self._smoothing(scale),
            error=self._measuring.error,
        )

    def _smoothing(self, scale: float) -> float:
        given = self._measuring.smoothing
        return noise.smoothing(scale) if given is None else given

    def _compensated(
        self, ramp: RampState, *, target: float, batch_samples: float, momentum: float
    ) -> RampState:
        if self._compensation is None:
            return RampState(batch_samples=batch_samples, applied=target)
        return self._compensation(
            ramp, target=target, batch_samples=batch_samples, momentum=momentum
        )

    def _targets(self, moments: Sequence[Moments | None], *, batch_samples: float) -> list[float]:
        contexts = (self._context(one, batch_samples=batch_samples) for one in moments)
        return [apply_rule(self._rule, context).factor for context in contexts]

    def _context(self, moments: Moments | None, *, batch_samples: float) -> StepContext:
        scale, gain = batch_samples / self._base_batch_size, 1.0
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
            "per": self._measuring.per,
            "averages": [average.state_dict() for average in self._averages],
            "stopgaps": [stopgap.state_dict() for stopgap in self._stopgaps],
            "cadence": self._cadence.state_dict(),
            "ramps": [asdict(ramp) for ramp in self._ramps],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` described.

        Raises:
            StateError: another number of groups, another way to average, or other fields.
                Nothing has changed then.
        """
        wanted_keys = {"progress", "step", "per", "averages", "stopgaps", "cadence", "ramps"}
        missing = wanted_keys - set(state)
        if missing:
            raise StateError(f"the state of a step controller lacks {sorted(missing)}")
        averages = tuple(MomentAverage.from_state_dict(one) for one in state["averages"])
        stopgaps = tuple(Stopgap.from_state_dict(one) for one in state["stopgaps"])
        ramps = tuple(_restored_ramp(one) for one in state["ramps"])
        cadence = Cadence.from_state_dict(state["cadence"])
        found, wanted, per = len(averages), len(self._averages), self._measuring.per
        whole = {len(averages), len(stopgaps), len(ramps)} == {found}
        joined = found < wanted and per == "param_group"  # groups that joined after the save
        if state["per"] != per or not whole or not (found == wanted or joined):
            message = (
                f"the state has moments of {found} parameter groups, measured per "
                f"{state['per']!r}, and this session of {wanted}, per {per!r}: build the "
                "optimizer with the same groups, and Measuring with the same `per`"
            )
            raise StateError(message)
        averaging = self._measuring.averaging
        every = [*averages, *(stopgap.average for stopgap in stopgaps)]
        other = [one.averaging for one in every if one.averaging != averaging]
        if other:
            message = (
                f"the moments in the state are averaged {other[0]!r} and this session's "
                f"{averaging!r}: build Measuring with the same `averaging`"
            )
            raise StateError(message)
        self._averages, self._stopgaps, self._ramps = averages, stopgaps, ramps
        self._cadence = cadence
        self.resize_groups(wanted)
        self.progress = float(state["progress"])
        self.step = int(state["step"])


def _read(averages: Sequence[MomentAverage], stopgaps: Sequence[Stopgap]) -> list[Moments | None]:
    """Return what is known of each group's moments."""
    pairs = zip(averages, stopgaps, strict=True)
    return [stopgap.blended(average.read()) for average, stopgap in pairs]


def _total(known: Sequence[Moments | None]) -> Moments | None:
    """Return the moments of the whole model, as far as they are known."""
    present = [moments for moments in known if moments is not None]
    return noise.total_moments(present) if present else None


def _restored_ramp(state: Mapping[str, Any]) -> RampState:
    wanted = {one.name for one in fields(RampState)}
    if set(state) != wanted:
        message = f"state of a ramp has other fields: {dict(state)!r} instead of {sorted(wanted)}"
        raise StateError(message)
    return RampState(**state)

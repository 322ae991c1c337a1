"""One optimizer step from its micro-batches: measure, decide, clip, step, commit.

Joins gradient tap, controller and scaled step; knows nothing of data, models or workers.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastane import _compat
from elastane.arguments import check_optimizer, parameter_groups
from elastane.batching import StepPlan
from elastane.controller import Decision, StepController
from elastane.errors import (
    ArgumentError,
    CommunicationError,
    UsageError,
    check_choice,
    check_positive,
    describe,
)
from elastane.gradients import Extra, GradientTap
from elastane.jointly import weighted_joint_norms
from elastane.layers import LayerNorms
from elastane.measurement import Measurement
from elastane.optim import ScaledStep, Schedule, clip_gradients, momentum_of
from elastane.sharded import ShardedTap

__all__ = ["Outcome", "Stepper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a window came to.

    Attributes:
        measurement: of the gradients.
        decision: what was committed, or would have been.
        loss: mean loss of the step, `None` if it was not told.
        lr: applied learning rate of the first group.
        committed: whether the step counts; if not, nothing moved.
        extras: sums over the ranks of the caller's extra values.
    """

    measurement: Measurement
    decision: Decision
    loss: float | None
    lr: float
    committed: bool
    extras: tuple[float, ...]


class Stepper:
    """Carries out windows of micro-batches.

    Args:
        optimizer: the user's.
        model: bare module that the optimizer trains.
        controller: decides factor and progress.
        schedule: moves with progress: scheduler, function or `None`.
        step: makes the optimizer's step in its place, or `None`.
        scaler: gradient scaler, or `None`.
        max_norm: norm to which the mean gradient is clipped, or `None`.
        per: `Measuring.per`.
        tap: what averages and measures: of DDP's gradients, or a sharded model's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        model: nn.Module,
        controller: StepController,
        schedule: LRScheduler | Callable[[float], float] | None,
        step: Callable[[], Any] | None,
        scaler: GradScaler | None,
        max_norm: float | None,
        per: str,
        tap: type[GradientTap] | type[ShardedTap] = GradientTap,
    ) -> None:
        if max_norm is not None:
            check_positive("max_norm", max_norm, way_out="None does not clip.")
        self._optimizer = optimizer
        self._model = model
        self.controller = controller
        self._schedule = Schedule(schedule, optimizer=optimizer, num_steps=controller.num_steps)
        self._scaled_step = ScaledStep(optimizer, self._schedule, custom=step)
        self._scaler = scaler
        self._max_norm = max_norm
        self._per = per
        self._extras: Callable[[], Sequence[Extra]] = tuple
        self._layers = LayerNorms(model)
        self._scale_of_gradients: Extra = 1.0
        self._num_parameters = self._count()
        own_extras = weakref.WeakMethod(self._all_extras)  # no cycle: it would keep the model
        self.tap = tap(
            parameter_groups(optimizer, per=per),
            extras=lambda: extras() if (extras := own_extras()) else (),
        )
        self._loss_sum: float | Tensor = 0.0
        self._loss_weight = 0.0
        self._warned = self._is_stepping = self._had_backward = False

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Watch the layers, and refuse steps of the optimizer that are not the session's.

        For as long, joint batch statistics are weighted as the micro-batches are.
        """
        handle = self._optimizer.register_step_pre_hook(self._refuse_foreign_step)
        try:
            with self._layers.watching(), weighted_joint_norms(self._model, share=self._share):
                yield
        finally:
            handle.remove()

    def _share(self) -> float:
        """Return a micro-batch's weight in proportion to the others'."""
        if self._weight == 0:
            raise UsageError(_NO_SHARE)
        return self._weight * len(self._plan.micro_batches) / self._plan.batch_samples

    def _refuse_foreign_step(self, *_: object) -> None:
        if not self._is_stepping:
            raise UsageError(
                "optimizer.step() was called inside the session: call session.step() alone, it "
                "steps the optimizer (through the scaler, if there is one) and the schedule"
            )

    def learning_rates(self) -> tuple[float, ...]:
        """Return the groups' scheduled learning rates."""
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)

    def open(self, plan: StepPlan, *, extras: Callable[[], Sequence[Extra]] = tuple) -> None:
        """Open a window for a plan; parameters that joined the optimizer are taken up.

        Args:
            plan: the step's samples.
            extras: called when the step is reduced; its values are summed over the ranks.
        """
        self._schedule.check_untouched()
        if self._count() != self._num_parameters:
            check_optimizer(self._optimizer, self._model)
            self.discard()
            self.controller.resize_groups(self.take_parameters())
            self._num_parameters = self._count()
        single = len(plan.micro_batches) == 1 and self.tap.is_alone
        measure = self.controller.wants_measurement
        self.tap.begin(batch_samples=plan.batch_samples, measure=measure and not single)
        by_layers = measure and single and self.controller.takes_layers and plan.batch_samples > 1
        self._layers.begin(plan.batch_samples if by_layers else 0)
        self._plan, self._extras = plan, extras
        self._loss_sum, self._loss_weight = 0.0, 0.0

    def take_parameters(self) -> int:
        """Measure the parameters that the optimizer has now; return the number of their groups."""
        groups = parameter_groups(self._optimizer, per=self._per)
        self.tap.set_groups(groups)
        return len(groups)

    def begin(self, weight: float, *, last: bool) -> None:
        """Announce a micro-batch and the weight of its mean loss."""
        self._weight, self._is_last = float(weight), last
        self._had_backward = False
        self.tap.begin_micro_batch(weight)

    def backward(self, loss: Tensor, *, weight: float | None, reduction: str = "mean") -> None:
        """Run backward on a loss; after a window's last, `p.grad` is the batch's mean."""
        _check_loss(loss)
        if self._had_backward:
            raise UsageError(_TWO_BACKWARDS)
        if weight is not None and self._weight:
            self._weight = _checked_weight(weight)
            self.tap.begin_micro_batch(self._weight)
        if check_choice("reduction", reduction, ("mean", "sum")) == "sum":
            loss = loss / (self._weight or 1.0)
        if self._weight:
            value = loss.detach().double().reshape(())
            self._loss_sum = self._loss_sum + value * self._weight
            self._loss_weight += self._weight
        self._had_backward = True
        try:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        except RuntimeError:
            if not self.tap.is_broken:
                raise
        if self._is_last:
            with suppress(CommunicationError):
                self._settle()

    def set_aside(self) -> None:
        """End an inner micro-batch."""
        self.tap.set_aside()

    def finish(self) -> Outcome:
        """End the window: step, or skip on every rank if any gradient is not finite."""
        scaler = self._scaler
        is_unscaled = scaler is not None and _compat.is_unscaled(scaler, self._optimizer)
        measurement = self._settle(is_unscaled=is_unscaled)
        loss_sum, loss_weight, *rest = measurement.extras
        told, extras = rest[: self._layers.num_told], rest[self._layers.num_told :]
        moments, by_layers = measurement.moments(), None
        if moments is None and measurement.num_gradients == 1:
            by_layers = self._layers.moments(told, batch_samples=measurement.batch_samples)
        decision = self.controller.decide(
            moments or by_layers,
            batch_samples=self._plan.batch_samples,
            nominal_samples=self._plan.nominal_samples,
            momentum=momentum_of(self._optimizer),
            single=not moments,
        )
        self._warn_if_blind(measurement, decision)
        if scaler is not None and not is_unscaled:
            scaler.unscale_(self._optimizer)
        lr = float(self._optimizer.param_groups[0]["lr"]) * decision.factors[0]
        if measurement.finite:
            self._step(decision, grad_norm=measurement.grad_norm)
        elif scaler is not None:
            _compat.note_overflow(scaler, self._optimizer)
        if scaler is not None:
            scaler.update()
        self.discard()
        return Outcome(
            measurement=measurement,
            decision=decision,
            loss=loss_sum / loss_weight if loss_weight else None,
            lr=lr,
            committed=measurement.finite,
            extras=tuple(extras),
        )

    def discard(self) -> None:
        """Drop the gradients and what the window was given."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._scaler is not None:
            _compat.forget_unscaling(self._scaler, self._optimizer)
        self._extras = tuple
        self._layers.begin(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of schedule and scaler."""
        state: dict[str, Any] = {"schedule": self._schedule.state_dict()}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of schedule and scaler, at the controller's progress."""
        self._schedule.load_state_dict(state["schedule"], progress=self.controller.progress)
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(dict(state["scaler"]))

    def _settle(self, *, is_unscaled: bool = False) -> Measurement:
        """Settle the tap; gradients that the user unscaled before it are taken as they are."""
        scale: Extra | None = 1.0
        if self._scaler is not None and not self.tap.is_settled:
            if is_unscaled and _minds_unscaling(self.tap):
                raise UsageError(_UNSCALED_TOO_EARLY)
            if not (is_unscaled and self.tap.is_alone):
                scale = _compat.loss_scale(self._scaler)
        if scale is None:
            raise UsageError(_NEVER_SCALED)
        self._scale_of_gradients = scale
        return self.tap.settle(loss_scale=scale)

    def _step(self, decision: Decision, *, grad_norm: float) -> None:
        if self._max_norm is not None:
            clip_gradients(self._optimizer, max_norm=self._max_norm, grad_norm=grad_norm)
        progress = self.controller.progress + decision.progress
        self._is_stepping = True
        try:
            self._scaled_step.step(decision.factors, progress=progress, scaler=self._scaler)
        finally:
            self._is_stepping = False
        self.controller.commit(decision)

    def _warn_if_blind(self, measurement: Measurement, decision: Decision) -> None:
        """Warn once if the rule wants a gain that this way of batching can't measure."""
        if self._warned or measurement.num_gradients != 1 or decision.moments is not None:
            return
        if self._layers.can_tell:  # the next step will know
            return
        scale = decision.scale * self._plan.nominal_samples / self._plan.batch_samples
        self._warned = True
        if scale != 1 and self.controller.depends_on_gain(scale):
            warnings.warn(_BLIND.format(scale=scale), stacklevel=5)

    def _all_extras(self) -> Sequence[Extra]:
        return (self._loss_sum, self._loss_weight, *self._told_by_layers(), *self._extras())

    def _told_by_layers(self) -> Sequence[Extra]:
        loss_scale = None if self._scaler is None else _compat.loss_scale(self._scaler)
        return self._layers.told(
            parameter_groups(self._optimizer, per=self._per),
            loss_scale=1.0 if loss_scale is None else loss_scale,
            scale_of_gradients=self._scale_of_gradients,
        )

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)


_BLIND = (
    "the batch is {scale:g} base batches, but with one gradient a step (one worker, one "
    "micro-batch) and no layer that tells its samples' gradients apart the gain can't be measured "
    "and stays 1: split the batch, for example LocalBatch(samples, micro_batches=2)"
)
_NO_SHARE = (
    "a micro-batch of weight 0 can't be left out where SyncBatchNorm mixes it with the others: "
    "give it a weight, or take BatchNorm"
)
_TWO_BACKWARDS = (
    "two session.backward() calls in one micro-batch: add up the losses and call it once before "
    "each step()"
)
_NEVER_SCALED = (
    "the session has a scaler and no loss was scaled: use session.backward(loss), which scales, "
    "or scaler.scale(loss).backward()"
)
_UNSCALED_TOO_EARLY = (
    "scaler.unscale_() was called before the gradients of the window were measured and put "
    "together: use session.backward(loss), which does that, instead of loss.backward()"
)


def _minds_unscaling(tap: GradientTap | ShardedTap) -> bool:
    """Return whether a part of the window's norms was taken of scaled gradients already."""
    return isinstance(tap, ShardedTap) or (tap.is_alone and tap.has_set_aside)


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        rule, way_out = "must be a tensor", "Pass what your loss function returned."
        raise ArgumentError(describe("loss", loss, rule=rule, way_out=way_out))
    shown = f"tensor of shape {tuple(loss.shape)}"
    if loss.numel() != 1:
        rule, way_out = "must be a scalar", "Take its mean over the micro-batch."
        raise ArgumentError(describe("loss", shown, rule=rule, way_out=way_out))
    if not loss.requires_grad:
        rule = "has no gradient to run backward for"
        way_out = "Compute it from session.model's output, with gradients on and not detached."
        raise ArgumentError(describe("loss", shown, rule=rule, way_out=way_out))


def _checked_weight(weight: object) -> float:
    if isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0:
        return float(weight)
    rule, way_out = "must be a finite number of at least 0", "Number of tokens, for example."
    raise ArgumentError(describe("weight", weight, rule=rule, way_out=way_out))

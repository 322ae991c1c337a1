"""One optimizer step from its micro-batches: measure, decide, clip, step, commit.

Joins gradient tap, controller and scaled step; knows nothing of data, models or workers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastane.arguments import parameter_groups
from elastane.batching import StepPlan
from elastane.controller import Decision, StepController
from elastane.errors import ArgumentError, CommunicationError, check_positive, describe
from elastane.gradients import Extra, GradientTap
from elastane.measurement import Measurement
from elastane.optim import ScaledStep, Schedule, clip_gradients, momentum_of

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
        controller: decides factor and progress.
        schedule: moves with progress: scheduler, function or `None`.
        scaler: gradient scaler, or `None`.
        max_norm: norm to which the mean gradient is clipped, or `None`.
        per: `Measuring.per`.
        extras: values to be summed over the ranks with each step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        controller: StepController,
        schedule: LRScheduler | Callable[[float], float] | None,
        scaler: GradScaler | None,
        max_norm: float | None,
        per: str,
        extras: Callable[[], Sequence[Extra]],
    ) -> None:
        if max_norm is not None:
            check_positive("max_norm", max_norm, way_out="None does not clip.")
        self._optimizer = optimizer
        self.controller = controller
        self._schedule = Schedule(schedule, optimizer=optimizer, num_steps=controller.num_steps)
        self._scaled_step = ScaledStep(optimizer, self._schedule)
        self._scaler = scaler
        self._max_norm = max_norm
        self._per = per
        self._extras = extras
        self._num_parameters = self._count()
        self.tap = GradientTap(parameter_groups(optimizer, per=per), extras=self._all_extras)
        self._loss_sum: float | Tensor = 0.0
        self._loss_weight = 0.0
        self._warned = False

    def open(self, plan: StepPlan) -> None:
        """Open a window for a plan; parameters that joined the optimizer are taken up."""
        if self._count() != self._num_parameters:
            groups = parameter_groups(self._optimizer, per=self._per)
            self.tap.set_groups(groups)
            self.controller.resize_groups(len(groups))
            self._num_parameters = self._count()
        measure = self.controller.wants_measurement
        self.tap.begin(batch_samples=plan.batch_samples, measure=measure)
        self._plan = plan
        self._loss_sum, self._loss_weight = 0.0, 0.0

    def begin(self, weight: float, *, last: bool) -> None:
        """Announce a micro-batch and the weight of its mean loss."""
        self._weight, self._is_last = float(weight), last
        self.tap.begin_micro_batch(weight)

    def backward(self, loss: Tensor, *, weight: float | None) -> None:
        """Run backward on a mean loss; after a window's last, `p.grad` is the batch's mean."""
        if loss.numel() != 1:
            rule, way_out = "must be a scalar", "Take its mean over the micro-batch."
            shape = f"tensor of shape {tuple(loss.shape)}"
            raise ArgumentError(describe("loss", shape, rule=rule, way_out=way_out))
        if weight is not None and self._weight:
            if not (math.isfinite(weight) and weight >= 0):
                rule, way_out = "must be finite and at least 0", "Number of tokens, for example."
                raise ArgumentError(describe("weight", weight, rule=rule, way_out=way_out))
            self._weight = float(weight)
            self.tap.begin_micro_batch(weight)
        value = loss.detach().double().reshape(())
        self._loss_sum = self._loss_sum + value * self._weight if self._weight else self._loss_sum
        self._loss_weight += self._weight
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        if self._is_last:
            with suppress(CommunicationError):
                self._settle()

    def set_aside(self) -> None:
        """End an inner micro-batch."""
        self.tap.set_aside()

    def finish(self) -> Outcome:
        """End the window: step, or skip on every rank if any gradient is not finite."""
        measurement = self._settle()
        decision = self.controller.decide(
            measurement.moments(),
            batch_samples=self._plan.batch_samples,
            nominal_samples=self._plan.nominal_samples,
            momentum=momentum_of(self._optimizer),
        )
        self._warn_if_blind(measurement, decision)
        if self._scaler is not None:
            self._unscale(self._scaler)
        lr = float(self._optimizer.param_groups[0]["lr"]) * decision.factors[0]
        if measurement.finite:
            self._step(decision, grad_norm=measurement.grad_norm)
        if self._scaler is not None:
            self._scaler.update()
        self.discard()
        loss_sum, loss_weight, *extras = measurement.extras
        return Outcome(
            measurement=measurement,
            decision=decision,
            loss=loss_sum / loss_weight if loss_weight else None,
            lr=lr,
            committed=measurement.finite,
            extras=tuple(extras),
        )

    def discard(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

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

    def _settle(self) -> Measurement:
        return self.tap.settle(loss_scale=1.0 if self._scaler is None else self._scaler.get_scale())

    def _step(self, decision: Decision, *, grad_norm: float) -> None:
        if self._max_norm is not None:
            clip_gradients(self._optimizer, max_norm=self._max_norm, grad_norm=grad_norm)
        progress = self.controller.progress + decision.progress
        self._scaled_step.step(decision.factors, progress=progress, scaler=self._scaler)
        self.controller.commit(decision)

    def _warn_if_blind(self, measurement: Measurement, decision: Decision) -> None:
        """Warn once if the rule wants a gain that this way of batching can't measure."""
        if self._warned or measurement.num_gradients != 1 or decision.moments is not None:
            return
        scale = decision.scale * self._plan.nominal_samples / self._plan.batch_samples
        if scale != 1 and self.controller.depends_on_gain(scale):
            self._warned = True
            warnings.warn(_BLIND.format(scale=scale), stacklevel=5)

    def _unscale(self, scaler: GradScaler) -> None:
        try:
            scaler.unscale_(self._optimizer)
        except RuntimeError as error:
            if "already been called" not in str(error):
                raise

    def _all_extras(self) -> Sequence[Extra]:
        return (self._loss_sum, self._loss_weight, *self._extras())

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)


_BLIND = (
    "the batch is {scale:g} base batches, but with one gradient a step (one worker, one "
    "micro-batch) the gain can't be measured and stays 1: split the batch, for example "
    "LocalBatch(samples, micro_batches=2)"
)

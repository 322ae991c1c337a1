"""One optimizer step from its micro-batches: measure, decide, step, commit.

Joins gradient tap, controller and step maker; knows nothing of data, models or workers.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from elastane.arguments import (
    check_loss,
    check_optimizer,
    checked_weight,
    parameter_groups,
)
from elastane.controller import Decision, StepController
from elastane.errors import CommunicationError, UsageError, check_choice
from elastane.follow import Follow
from elastane.grad_scaling import GradScaling
from elastane.gradients import GradientTap
from elastane.jointly import weighted_joint_norms
from elastane.layers import LayerNorms
from elastane.making import StepMaker
from elastane.measurement import Measurement
from elastane.optim import momentum_of
from elastane.optimizers import AnyOptimizer
from elastane.planning import StepPlan
from elastane.schedule import AnySchedule
from elastane.sharded import ShardedTap
from elastane.step_sums import Extra, known

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
        optimizer: the user's, one or several.
        model: bare module that the optimizer trains.
        controller: decides factor and progress.
        schedule: moves with progress: scheduler, several, function or `None`.
        step: makes the optimizer's step in its place, or `None`.
        scaler: gradient scaler, or `None`.
        max_norm: norm to which the mean gradient is clipped, or `None`.
        per: `Measuring.per`.
        follow: what besides the learning rate follows the batch.
        sharded: whether the model is.
    """

    def __init__(
        self,
        optimizer: AnyOptimizer,
        *,
        model: nn.Module,
        controller: StepController,
        schedule: AnySchedule,
        step: Callable[[], Any] | None,
        scaler: GradScaler | None,
        max_norm: float | None,
        per: str,
        follow: Follow = Follow(),
        sharded: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._model = model
        self.controller = controller
        self.maker = StepMaker(
            optimizer,
            schedule=schedule,
            num_steps=controller.num_steps,
            step=step,
            scaler=scaler,
            max_norm=max_norm,
            follow=follow,
            base_batch_size=controller.base_batch_size,
        )
        self._scaling = GradScaling(scaler, optimizer)
        self._per = per
        self._extras: Callable[[], Sequence[Extra]] = tuple
        self._arrived: Callable[[], None] = lambda: None
        self._layers = LayerNorms(model)
        self._scale_of_gradients: Extra = 1.0
        self._num_parameters = self._count()
        own_extras = weakref.WeakMethod(self._all_extras)  # no cycle: it would keep the model
        own_arrival = weakref.WeakMethod(self._note_arrival)
        self._groups = parameter_groups(optimizer, per=per)
        hooks: dict[str, Any] = {
            "extras": lambda: extras() if (extras := own_extras()) else (),
            "arrived": lambda: note() if (note := own_arrival()) else None,
        }
        self.tap: GradientTap | ShardedTap = (
            ShardedTap(self._groups, **hooks)
            if sharded
            else GradientTap(self._groups, squares=follow.takes_squares, **hooks)
        )
        self._losses: list[Extra] = []
        self._loss_weight = 0.0
        self._warned = self._had_backward = False
        self._by_layers = self._is_weighted = False
        self._unseen_at: int | None = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Watch the layers, and refuse steps of the optimizer that are not the session's.

        For as long, joint batch statistics are weighted as the micro-batches are.
        """
        with ExitStack() as stack:
            stack.enter_context(self.maker.guarded())
            stack.enter_context(self._layers.watching())
            stack.enter_context(weighted_joint_norms(self._model, share=self._share))
            yield

    def _share(self) -> float:
        """Return a micro-batch's weight in proportion to the others'."""
        if self._weight == 0:
            raise UsageError(_NO_SHARE)
        if self._is_weighted:
            return 1.0
        return self._weight * len(self._plan.micro_batches) / self._plan.batch_samples

    def learning_rates(self) -> tuple[float, ...]:
        """Return the groups' scheduled learning rates."""
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)

    def open(
        self,
        plan: StepPlan,
        *,
        extras: Callable[[], Sequence[Extra]] = tuple,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a window for a plan; parameters that joined the optimizer are taken up.

        Args:
            plan: the step's samples.
            extras: called when the step is reduced; its values are summed over the ranks.
            arrived: called when this rank has done its part of that.
        """
        self.maker.check_untouched()
        if self._count() != self._num_parameters:
            check_optimizer(self._optimizer, self._model)
            self.discard()
            self.controller.resize_groups(self.take_parameters())
            self._num_parameters = self._count()
        single = len(plan.micro_batches) == 1 and self.tap.is_alone
        measure = self.controller.wants_measurement(plan.nominal_samples)
        if self.controller.preconditions and not single:
            measure = self._preconditioned(wanted=measure)
        self.tap.begin(batch_samples=plan.batch_samples, measure=measure and not single)
        if not single:
            self._layers.rest()
        takes_layers = single and self.controller.takes_layers
        self._by_layers = measure and takes_layers and plan.batch_samples > 1
        self._layers.begin(plan.batch_samples if self._by_layers else 0)
        self._plan, self._extras, self._arrived = plan, extras, arrived
        self._losses, self._loss_weight = [], 0.0

    def take_parameters(self) -> int:
        """Measure the parameters that the optimizer has now; return the number of their groups."""
        self._groups = parameter_groups(self._optimizer, per=self._per)
        self.tap.set_groups(self._groups)
        return len(self._groups)

    def begin(self, weight: float, *, last: bool) -> None:
        """Announce a micro-batch and the weight of its mean loss."""
        self._weight, self._is_last = float(weight), last
        self._had_backward = self._is_weighted = False
        self.tap.begin_micro_batch(weight)

    def backward(self, loss: Tensor, *, weight: float | None, reduction: str = "mean") -> None:
        """Run backward on a loss; after a window's last, `p.grad` is the batch's mean."""
        check_loss(loss)
        if self._had_backward:
            raise UsageError(_TWO_BACKWARDS)
        if weight is not None and self._weight:
            self._weight = checked_weight(weight)
            self.tap.begin_micro_batch(self._weight)
        is_sum = check_choice("reduction", reduction, ("mean", "sum")) == "sum"
        if self._weight:
            self._losses.append(known(loss) * (1.0 if is_sum else self._weight))
            self._loss_weight += self._weight
        seed = self._seed(loss, is_sum=is_sum)
        if is_sum and seed is None:
            loss = loss / (self._weight or 1.0)
        self._had_backward = True
        try:
            self._scaling.scaled(loss).backward(seed)
        except RuntimeError:
            if not self.tap.is_broken:
                raise
        if self._is_last:
            with suppress(CommunicationError):
                self._settle(in_backward=True)

    def _seed(self, loss: Tensor, *, is_sum: bool) -> Tensor | None:
        """Return what backward is to begin with, so that the gradient comes weighted.

        That spares a pass over all gradients. Not where a scale, or half precision, would take
        the weight's accuracy, nor where layers look at the gradient of the mean loss.
        """
        share = self._weight / self._plan.batch_samples
        exact = loss.dtype in (torch.float32, torch.float64) and self._scaling.scaler is None
        if share == 1 or share == 0 or not exact or self._by_layers:
            return None
        self._is_weighted = True
        self.tap.begin_micro_batch(self._weight, weighted=True)
        return torch.full_like(loss, share / self._weight if is_sum else share)

    def set_aside(self) -> None:
        """End an inner micro-batch."""
        self.tap.set_aside()

    def finish(self) -> Outcome:
        """End the window: step, or skip on every rank if any gradient is not finite."""
        measurement = self._settle(in_backward=False)
        loss_sum, loss_weight, *rest = measurement.extras
        told, extras = rest[: self._layers.num_told], rest[self._layers.num_told :]
        moments, by_layers = measurement.moments(), None
        if moments is None and self._by_layers and measurement.num_gradients == 1:
            by_layers = self._layers.moments(told, batch_samples=measurement.batch_samples)
        decision = self.controller.decide(
            moments or by_layers,
            batch_samples=self._plan.batch_samples,
            nominal_samples=self._plan.nominal_samples,
            momentum=momentum_of(self._optimizer),
            single=not moments,
        )
        self._warn_if_blind(measurement, decision)
        self._scaling.unscale()
        lr = float(self._optimizer.param_groups[0]["lr"]) * decision.factors[0]
        if measurement.finite:
            self.maker.make(
                decision,
                measurement,
                progress=self.controller.progress,
                nominal_samples=self._plan.nominal_samples,
                scale_of_gradients=self._scale_of_gradients,
                sqr_sums=self._sqr_sums,
            )
            self.controller.commit(decision)
        self._scaling.update(finite=measurement.finite)
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
        self._scaling.forget()
        self._extras, self._arrived = tuple, lambda: None
        self._layers.begin(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of schedule, scaler and what follows the batch."""
        return {**self.maker.state_dict(), **self._scaling.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of these, at the controller's progress."""
        self.maker.load_state_dict(state, progress=self.controller.progress)
        self._scaling.load_state_dict(state)

    def _settle(self, *, in_backward: bool) -> Measurement:
        scale = self._scaling.scale_at(self.tap, in_backward=in_backward)
        self._scale_of_gradients = scale
        return self.tap.settle(loss_scale=scale)

    def _preconditioned(self, *, wanted: bool) -> bool:
        """Return whether to measure: not before there is a second moment to precondition by.

        Raises:
            UsageError: there still is none, though the optimizer has stepped.
        """
        assert isinstance(self.tap, GradientTap)
        factors = self.maker.preconditioners() if wanted else {}
        self.tap.precondition(factors)
        step = self.controller.step
        if wanted and not factors and self._unseen_at not in (None, step):
            raise UsageError(_NO_SECOND_MOMENT)
        if wanted:
            self._unseen_at = None if factors else step
        return bool(factors)

    def _sqr_sums(self) -> Mapping[int, Tensor]:
        assert isinstance(self.tap, GradientTap)
        return self.tap.square_sums()

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

    def _note_arrival(self) -> None:
        self._arrived()

    def _all_extras(self) -> Sequence[Extra]:
        return (_total(self._losses), self._loss_weight, *self._told_by_layers(), *self._extras())

    def _told_by_layers(self) -> Sequence[Extra]:
        return self._layers.told(
            self._groups,
            loss_scale=self._scaling.loss_scale,
            scale_of_gradients=self._scale_of_gradients,
        )

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)


def _total(values: Sequence[Extra]) -> Extra:
    """Return the sum of values that all lie on the host, or all on one device."""
    on_device = [one for one in values if isinstance(one, Tensor)]
    return torch.stack(on_device).sum() if on_device else sum(values)


_BLIND = (
    "the batch is {scale:g} base batches, but with one gradient a step (one worker, one "
    "micro-batch) and no layer that tells its samples' gradients apart the gain can't be measured "
    "and stays 1: split the batch, for example LocalBatch(samples, micro_batches=2)"
)
_NO_SECOND_MOMENT = (
    "Measuring(precondition=True) measures gradients as an optimizer's second moment leaves them, "
    "and this optimizer keeps none of the parameters' shape: leave it out, or take Adam, AdamW, "
    "RMSprop or Adagrad"
)
_NO_SHARE = (
    "a micro-batch of weight 0 can't be left out where SyncBatchNorm mixes it with the others: "
    "give it a weight, or take BatchNorm"
)
_TWO_BACKWARDS = (
    "two session.backward() calls in one micro-batch: add up the losses and call it once before "
    "each step()"
)

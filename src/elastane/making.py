"""Makes the optimizer's step of a mean gradient and a decision: clip, set what follows, step.

Knows optimizers, schedule and scaler; nothing of windows, data or workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from elastane.adaptive import preconditioners, raise_second_moments
from elastane.controller import Decision
from elastane.errors import UsageError, check_positive
from elastane.follow import Follow
from elastane.measurement import Measurement
from elastane.optim import (
    ScaledStep,
    clip_coefficient,
    clip_gradients,
    scale_momentum,
)
from elastane.optimizers import AnyOptimizer, members_of
from elastane.schedule import AnySchedule, Schedule
from elastane.step_sums import Extra

__all__ = ["StepMaker"]


class StepMaker:
    """Steps a user's optimizer, and sees to it that nobody else does.

    Args:
        optimizer: the user's, one or several.
        schedule: moves with progress: scheduler, several, function or `None`.
        num_steps: base steps at which training ends.
        step: makes the optimizer's step in its place, or `None`.
        scaler: gradient scaler, or `None`.
        max_norm: norm to which the mean gradient is clipped, or `None`.
        follow: what besides the learning rate follows the batch.
        base_batch_size: `B0` in samples.
    """

    def __init__(
        self,
        optimizer: AnyOptimizer,
        *,
        schedule: AnySchedule,
        num_steps: float,
        step: Callable[[], Any] | None,
        scaler: GradScaler | None,
        max_norm: float | None,
        follow: Follow,
        base_batch_size: int,
    ) -> None:
        if max_norm is not None:
            check_positive("max_norm", max_norm, way_out="None does not clip.")
        self._optimizer = optimizer
        self._schedule = Schedule(schedule, optimizer=optimizer, num_steps=num_steps)
        self._scaled_step = ScaledStep(optimizer, self._schedule, custom=step, follow=follow)
        self._scaler = scaler
        self._max_norm = max_norm
        self._follow = follow
        self._base_batch_size = base_batch_size
        self._is_stepping = False
        self.on_step: Callable[[Sequence[float]], None] | None = None
        """Called right before the optimizer steps, with the factors on momentum buffers."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse steps of the optimizer that are not made here."""
        with ExitStack() as stack:
            for one in members_of(self._optimizer):
                stack.callback(one.register_step_pre_hook(self._refuse_foreign_step).remove)
            yield

    def check_untouched(self) -> None:
        """Refuse a schedule that was moved by somebody else."""
        self._schedule.check_untouched()

    def make(
        self,
        decision: Decision,
        measurement: Measurement,
        *,
        progress: float,
        nominal_samples: float,
        scale_of_gradients: Extra,
        sqr_sums: Callable[[], Mapping[int, Tensor]],
    ) -> None:
        """Step by the mean gradient that lies in `p.grad`.

        Args:
            decision: tells factors, and what the step is worth.
            measurement: of the gradient.
            progress: `tau` before the step.
            nominal_samples: batch that the policy asks for.
            scale_of_gradients: what gradients were multiplied by when they were measured.
            sqr_sums: returns `sum b_i g_i^2` by the parameters' ids; called if it is wanted.
        """
        clipped = 1.0
        if self._max_norm is not None:
            clipped = clip_coefficient(max_norm=self._max_norm, grad_norm=measurement.grad_norm)
            clip_gradients(self._optimizer, coefficient=clipped)
        scale_momentum(self._optimizer, decision.buffer_factors)
        factor = (clipped / scale_of_gradients) ** 2
        with self._stepping():
            self._scaled_step.step(
                decision.factors,
                progress=progress + decision.progress,
                worth=decision.progress,
                scale=nominal_samples / self._base_batch_size,
                prepare=partial(self._prepare, decision, measurement, sqr_sums, factor=factor),
                scaler=self._scaler,
            )

    @property
    def can_be_repeated(self) -> bool:
        """Whether a step follows from its gradients and the numbers of the optimizer's groups."""
        return self._scaler is None and not self._follow.takes_squares

    def repeat(self, buffer_factors: Sequence[float]) -> None:
        """Make a step that another worker has made: with its gradients, and its groups' numbers.

        Args:
            buffer_factors: what momentum buffers were multiplied by.
        """
        scale_momentum(self._optimizer, buffer_factors)
        with self._stepping():
            self._scaled_step.repeat()
        self._optimizer.zero_grad(set_to_none=True)

    def preconditioners(self) -> dict[int, Tensor]:
        """Return `elastane.adaptive.preconditioners` of the optimizer as it stands."""
        weights = self._scaled_step.follower.second_weights()
        return preconditioners(self._optimizer, weights=weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, and of what follows the batch."""
        return {
            "schedule": self._schedule.state_dict(),
            "followed": self._scaled_step.follower.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, progress: float) -> None:
        """Take up the state of these, at the controller's progress."""
        self._schedule.load_state_dict(state["schedule"], progress=progress)
        self._scaled_step.follower.load_state_dict(state["followed"])

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _prepare(
        self,
        decision: Decision,
        measurement: Measurement,
        sqr_sums: Callable[[], Mapping[int, Tensor]],
        *,
        factor: Extra,
    ) -> None:
        if self._follow.takes_squares and measurement.num_gradients > 1:
            raise_second_moments(
                self._optimizer,
                sqr_sums(),
                factor=factor * (measurement.batch_samples / measurement.weight),
                batch_samples=measurement.batch_samples,
                num_gradients=measurement.num_gradients,
                base_batch_size=self._base_batch_size,
            )
        if self.on_step is not None:
            self.on_step(decision.buffer_factors)

    def _refuse_foreign_step(self, *_: object) -> None:
        if not self._is_stepping:
            raise UsageError(
                "optimizer.step() was called inside the session: call session.step() alone, it "
                "steps the optimizer, or all of several (through the scaler, if there is one), and "
                "the schedule; for optimizers that take turns build a session for each"
            )

"""What a run tells: the result of each step as users get it, and the run's telemetry.

Turns outcomes into values and events; decides nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import Any, Protocol

import torch

from elastane import _version, noise
from elastane.batching import World
from elastane.controller import StepController
from elastane.elastic.saver import Outcome
from elastane.evaluation import Evaluation
from elastane.noise import Moments
from elastane.planning import StepPlan
from elastane.stepper import Outcome as StepOutcome
from elastane.telemetry import JsonlSink, ProgressBar, Sink, Telemetry

__all__ = ["Reporter", "StepResult"]

RECENT_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What `session.step()` returns at the end of a window; but for `seconds` the same everywhere.

    Attributes:
        step: optimizer steps committed so far, this one included.
        progress: `tau` after this step, in base steps.
        previous_progress: `tau` before it.
        position: committed samples of the stream after this step.
        loss: mean loss over the step's samples (weighted as the gradients were), or `None` if it
            was not given to `session.backward`.
        weight: sum of the micro-batches' weights; the batch, unless others were given.
        lr: learning rate of the first parameter group as applied.
        factor: what the scheduled learning rate was multiplied by (first group).
        gain: `r`, from the moments of earlier steps (with `Measuring(current=True)`, of this too).
        scale: `S`.
        batch_samples: `B`.
        num_gradients: micro-batches over all workers.
        world_size: number of workers.
        generation: number of the membership that the step was made in.
        grad_norm: norm of the batch's mean gradient, before clipping.
        moments: averaged raw moments that the gain came from; `None` before there are any.
        single_share: part of them, from 0 to 1, that was estimated from some layers in steps with
            a single gradient (one worker, one micro-batch); at 1 they are these layers' alone.
        skipped: whether the gradients were not finite, so that nothing moved.
        seconds: wall time since the end of the step before.
    """

    step: int
    progress: float
    previous_progress: float
    position: int
    loss: float | None
    weight: float
    lr: float
    factor: float
    gain: float
    scale: float
    batch_samples: int
    num_gradients: int
    world_size: int
    generation: int
    grad_norm: float
    moments: Moments | None
    single_share: float
    skipped: bool
    seconds: float

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale in samples; `None` before there are moments."""
        return None if self.moments is None else noise.noise_scale(self.moments)

    def crossed(self, every: float) -> bool:
        """Whether progress has passed a multiple of `every` base steps in this step.

        The way to say when to evaluate: it is the same on all workers, also on one that has just
        joined, which a counter of one's own is not.
        """
        return math.floor(self.progress / every) > math.floor(self.previous_progress / every)

    def state_dict(self) -> dict[str, Any]:
        """Return the result as numbers, for workers that did not see the step's end."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> StepResult:
        """Return the result that `state_dict` described."""
        moments = state["moments"]
        return cls(**{**state, "moments": None if moments is None else Moments(**moments)})


_TOLD = tuple(one.name for one in fields(StepResult) if one.name != "moments")


class Run(Protocol):
    """What a reporter wants to know of a run when it ends."""

    @property
    def ending(self) -> str:
        """How it ended."""
        ...


class Reporter:
    """Builds step results and, on rank 0, hands the run's events to its sinks.

    A step's event is held back until the step is final: an event that was told is never void.

    Args:
        controller: knows step and progress.
        world: this worker's place at first; `entered` changes it.
        facts: what the run is, for its start event.
        run_dir: folder for the events, or `None`.
        sinks: further receivers.
        progress_bar: whether to draw one.
    """

    def __init__(
        self,
        controller: StepController,
        *,
        world: World,
        facts: Mapping[str, object],
        run_dir: str | PathLike[str] | None,
        sinks: Sequence[Sink],
        progress_bar: bool,
    ) -> None:
        self._controller = controller
        self._world = world
        self._facts = facts
        self._run_dir = run_dir
        self._sinks = list(sinks)
        self._progress_bar = progress_bar
        self._own_sinks: list[Sink] = []
        self._telemetry = Telemetry([])
        self._held: tuple[StepResult, int] | None = None
        self._settled: tuple[StepResult, int] | None = None
        self._change: dict[str, Any] | None = None
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._started = self._last = time.perf_counter()
        self.last: StepResult | None = None

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Tell the run's end, and close the sinks, when a block ends."""
        cause: str | None = None
        try:
            yield
        except BaseException as error:
            cause = type(error).__name__
            raise
        finally:
            self._tell_end(cause or run.ending)
            self._close(everything=True)

    def entered(self, world: World, *, cause: str) -> None:
        """Report from another place from now on; whoever has become rank 0 opens its sinks."""
        self._world = world
        if world.rank != 0:
            self._close(everything=False)
        elif not self._telemetry.enabled:
            self._open()
        if self._seconds:
            self._change = {"cause": cause, "step": self._controller.step}

    def leave(self) -> None:
        """Tell nothing any longer, not even an end: the run goes on without this worker."""
        self._held = None
        self._close(everything=True)

    def _open(self) -> None:
        if self._run_dir is not None:
            self._own_sinks.append(JsonlSink(self._run_dir))
        if self._progress_bar:
            self._own_sinks.append(ProgressBar(num_steps=math.ceil(self._controller.num_steps)))
        self._telemetry = Telemetry([*self._own_sinks, *self._sinks])
        if not self._seconds:
            self._started = self._last = time.perf_counter()
            self._telemetry.emit(
                "start",
                elastane_version=_version.__version__,
                torch_version=str(torch.__version__),
                num_steps=self._controller.num_steps,
                world_size=self._world.world_size,
                generation=self._world.generation,
                **self._facts,
            )
        if self._settled is not None:  # who was rank 0 may have died before it told this one
            self._tell_step(*self._settled)

    def _close(self, *, everything: bool) -> None:
        """Stop to tell; the sinks that were given to us are closed only when the run is over."""
        own, self._own_sinks = self._own_sinks, []
        closing = self._telemetry if everything else Telemetry(own)
        self._telemetry = Telemetry([])
        closing.close()

    def _tell_end(self, cause: str) -> None:
        self._telemetry.emit(
            "end",
            step=self._controller.step,
            progress=self._controller.progress,
            seconds=time.perf_counter() - self._started,
            cause=cause,
        )

    def step(self, outcome: StepOutcome, *, plan: StepPlan) -> StepResult:
        """Return the result of a window; it is told when it is final."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        decision, measurement = outcome.decision, outcome.measurement
        result = StepResult(
            step=self._controller.step,
            progress=self._controller.progress,
            previous_progress=self._controller.progress
            - (decision.progress if outcome.committed else 0.0),
            position=plan.stop if outcome.committed else plan.start,
            loss=outcome.loss,
            weight=measurement.weight,
            lr=outcome.lr,
            factor=decision.factors[0],
            gain=decision.gain,
            scale=decision.scale,
            batch_samples=plan.batch_samples,
            num_gradients=measurement.num_gradients,
            world_size=self._world.world_size,
            generation=self._world.generation,
            grad_norm=measurement.grad_norm,
            moments=decision.moments,
            single_share=decision.single_share,
            skipped=not outcome.committed,
            seconds=seconds,
        )
        self._tell_change(seconds)
        self._seconds.append(seconds)
        self.last, self._held = result, (result, plan.epoch)
        return result

    def adopt(self, result: StepResult | None, *, epoch: int) -> None:
        """Take another worker's result of the last step for one's own.

        If that step was made in one's own group, the group had ended all steps before it.
        """
        if result is not None and result.generation == self._world.generation:
            self.settled(result.step - int(not result.skipped))
        self._held = None if result is None else (result, epoch)
        self.last = result or self.last

    def settled(self, step: int) -> None:
        """Tell the step that was held back, or forget it if it has become void."""
        held, self._held = self._held, None
        if held is not None and held[0].step <= step:
            self._settled = held
            self._tell_step(*held)

    def _tell_step(self, result: StepResult, epoch: int) -> None:
        if self._telemetry.enabled:
            values = {name: getattr(result, name) for name in _TOLD}
            moments = result.moments
            self._telemetry.emit(
                "step",
                **values,
                variance=None if moments is None else moments.variance,
                sqr_norm=None if moments is None else moments.sqr_norm,
                noise_scale=result.noise_scale,
                epoch=epoch,
            )

    def _tell_change(self, seconds: float) -> None:
        """Tell a change of membership once its pause is known: with the first step after it."""
        change, self._change = self._change, None
        if change is not None:
            self._telemetry.emit(
                "membership",
                generation=self._world.generation,
                world_size=self._world.world_size,
                progress=self._controller.progress,
                pause_s=max(seconds - statistics.median(self._seconds), 0.0),
                **change,
            )

    def evaluation(self, result: Evaluation) -> None:
        """Tell the means of an evaluation."""
        self._telemetry.emit(
            "evaluation",
            step=self._controller.step,
            progress=self._controller.progress,
            num_samples=result.num_samples,
            seconds=result.seconds,
            **{f"metric_{name}": result.mean(name) for name in result.sums},
        )

    def checkpoint(self, saved: Outcome) -> None:
        """Tell of a checkpoint that was published."""
        if saved.path:
            self._telemetry.emit(
                "checkpoint", step=saved.step, path=saved.path, seconds=saved.seconds
            )

    @contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """Tell how long a block took, and why."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            step = self._controller.step
            self._telemetry.emit("pause", reason=reason, seconds=seconds, step=step)

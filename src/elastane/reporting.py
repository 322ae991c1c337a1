"""What a run tells: the result of each step as users get it, and the run's telemetry.

Turns outcomes into values and events; decides nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Protocol

import torch

from elastane import _version, noise
from elastane.batching import StepPlan, World
from elastane.controller import StepController
from elastane.evaluation import Evaluation
from elastane.noise import Moments
from elastane.stepper import Outcome
from elastane.telemetry import JsonlSink, ProgressBar, Sink, Telemetry

__all__ = ["Reporter", "StepResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What `session.step()` returns at the end of a window; but for `seconds` the same everywhere.

    Attributes:
        step: optimizer steps committed so far, this one included.
        progress: `tau` after this step, in base steps.
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
        grad_norm: norm of the batch's mean gradient, before clipping.
        moments: averaged raw moments that the gain came from; `None` before there are any.
        skipped: whether the gradients were not finite, so that nothing moved.
        seconds: wall time since the end of the step before.
    """

    step: int
    progress: float
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
    grad_norm: float
    moments: Moments | None
    skipped: bool
    seconds: float

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale in samples; `None` before there are moments."""
        return None if self.moments is None else noise.noise_scale(self.moments)


class Run(Protocol):
    """What a reporter wants to know of a run when it ends."""

    @property
    def ending(self) -> str:
        """How it ended."""
        ...


class Reporter:
    """Builds step results and, on rank 0, hands the run's events to its sinks.

    Args:
        controller: knows step and progress.
        world: this worker's place.
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
        self._telemetry = Telemetry([])
        self._started = self._last = time.perf_counter()

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Open the sinks for the length of a run, and tell its start and its end."""
        sinks: list[Sink] = []
        if self._world.rank == 0:
            sinks = (
                [*self._sinks]
                if self._run_dir is None
                else [JsonlSink(self._run_dir), *self._sinks]
            )
            if self._progress_bar:
                sinks.append(ProgressBar(num_steps=math.ceil(self._controller.num_steps)))
        with Telemetry(sinks) as self._telemetry:
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
            cause: str | None = None
            try:
                yield
            except BaseException as error:
                cause = type(error).__name__
                raise
            finally:
                self._tell_end(cause or run.ending)

    def _tell_end(self, cause: str) -> None:
        self._telemetry.emit(
            "end",
            step=self._controller.step,
            progress=self._controller.progress,
            seconds=time.perf_counter() - self._started,
            cause=cause,
        )

    def step(self, outcome: Outcome, *, plan: StepPlan) -> StepResult:
        """Return the result of a window and tell it."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        decision, measurement = outcome.decision, outcome.measurement
        result = StepResult(
            step=self._controller.step,
            progress=self._controller.progress,
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
            grad_norm=measurement.grad_norm,
            moments=decision.moments,
            skipped=not outcome.committed,
            seconds=seconds,
        )
        if self._telemetry.enabled:
            fields: dict[str, Any] = asdict(result)
            moments = fields.pop("moments") or {"variance": None, "sqr_norm": None}
            self._telemetry.emit(
                "step",
                **fields,
                **moments,
                noise_scale=result.noise_scale,
                epoch=plan.epoch,
                generation=self._world.generation,
            )
        return result

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

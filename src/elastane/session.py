"""The session: joins loader, gradient tap, controller and scaled step into one training loop.

Everything it does is done by a part that works without it; it only orders them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from os import PathLike
from types import MappingProxyType
from typing import Any, Self

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import Dataset

from elastane import arguments, replica
from elastane.assembly import assemble
from elastane.batching import BatchPolicy, World
from elastane.data import LoaderOptions
from elastane.durability import Checkpointing
from elastane.errors import UsageError
from elastane.evaluation import Evaluation, EvaluationFunction
from elastane.follow import Follow
from elastane.measuring import Measuring
from elastane.momentum import Compensation, MomentumRamp
from elastane.reporting import StepResult
from elastane.scaling import AdaScale, Rule
from elastane.schedule import AnySchedule
from elastane.telemetry import Sink

__all__ = ["Session"]


class Session:
    """Trains a model, as it was tuned for one small batch, on whatever workers there are.

    Iterate over it inside `with`: it yields this worker's micro-batches. Call `step()` after
    every one. It finds out itself how many workers there are.

    Args:
        model: the bare module, on its device; the session wraps it.
        optimizer: torch optimizer of the model's parameters, with the base batch's lr; or a list.
        dataset: map-style dataset with a length.
        base_batch_size: `B0`, the batch in samples for which lr and schedule were tuned.
        num_steps: length of the run in base steps, or instead
        num_epochs: in epochs of `ceil(len(dataset) / base_batch_size)` base steps.
        schedule: torch scheduler in base steps, or several, or a function progress -> multiplier.
        rule: scaling rule; see `elastane.scaling`.
        batch: batch policy, by default `LocalBatch(base_batch_size)`.
        compensation: momentum compensation after a change of batch, or `None`.
        measuring: how gradient statistics are taken.
        follow: which of an adaptive optimizer's other numbers follow the batch.
        loader: how samples are ordered and loaded.
        step: makes the optimizer's step in its place, such as `torch.compile(optimizer.step)`.
        scaler: a `torch.amp.GradScaler`; the session scales, unscales, steps and updates it.
        max_norm: norm to which the mean gradient is clipped.
        checkpoint: durable checkpoints; under `elastane run` one a minute by default, else none.
        stateful: further objects with `state_dict` and `load_state_dict`, by name.
        ddp: further arguments of `DistributedDataParallel`, such as `find_unused_parameters`.
        shard: function of a bare module and a mesh that calls `fully_shard`; called at each change.
        run_dir: folder for the run's events (written by rank 0).
        sinks: further receivers of events (on rank 0).
        progress_bar: draw one, where standard error is a terminal.

    Raises:
        ArgumentError: a value that breaks a rule; the message says which, and the way out.
        UnsupportedError: a kind of model, dataset or schedule that is refused by name.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | Sequence[Optimizer],
        dataset: Dataset[Any] | Any,
        base_batch_size: int,
        num_steps: float | None = None,
        num_epochs: float | None = None,
        schedule: AnySchedule = None,
        rule: Rule = AdaScale(),
        batch: BatchPolicy | None = None,
        compensation: Compensation | None = MomentumRamp(),
        measuring: Measuring = Measuring(),
        follow: Follow = Follow(),
        loader: LoaderOptions = LoaderOptions(),
        step: Callable[[], Any] | None = None,
        scaler: GradScaler | None = None,
        max_norm: float | None = None,
        checkpoint: Checkpointing | None = None,
        stateful: Mapping[str, Stateful] = MappingProxyType({}),
        ddp: Mapping[str, Any] | None = None,
        shard: Callable[[nn.Module, DeviceMesh], Any] | None = None,
        run_dir: str | PathLike[str] | None = None,
        sinks: Sequence[Sink] = (),
        progress_bar: bool = True,
    ) -> None:
        given = dict(locals())
        arguments.check_session(given)
        replica.check_model(model, ddp=ddp or {}, shard=shard)
        self.model = replica.Replica(model)
        self._parts = assemble(given, model=self.model)
        self._loop = self._parts.loop
        self._open: ExitStack | None = None
        self._was_open = False

    @property
    def world(self) -> World:
        """This worker's rank, the number of workers, and the generation of the membership."""
        return self._parts.membership.world

    @property
    def warming(self) -> bool:
        """Whether the micro-batch at work belongs to a rehearsal, whose step is thrown away."""
        return self._parts.membership.warming

    @property
    def progress(self) -> float:
        """`tau`: what the committed steps were worth, in base steps."""
        return self._loop.stepper.controller.progress

    @property
    def position(self) -> int:
        """Committed samples of the endless stream."""
        return self._loop.position

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next sample belongs to, from 0."""
        return self.position // self._parts.feed.num_samples

    @property
    def done(self) -> bool:
        """Whether the run is over: its last base step was made, or all agreed to stop."""
        return self._loop.done

    @property
    def weight(self) -> int:
        """Samples of the present micro-batch that count; 0 where this worker has none."""
        return self._loop.weight

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the present micro-batch ends the window: the one to clip after, by hand."""
        return self._loop.is_last

    def __enter__(self) -> Self:
        """Start loader processes, then the process group if launched with one, and wrap."""
        if self._was_open:
            raise UsageError("a session is entered once: load its state into a new one to go on")
        self._was_open, parts = True, self._parts
        with ExitStack() as stack:
            stack.callback(parts.feed.close)
            parts.feed.start(self.position)
            stack.enter_context(parts.reporter.running(self._loop))
            stack.enter_context(parts.keeper.running(parts.training.state_dict))
            stack.enter_context(parts.membership.joined(parts.training))
            stack.enter_context(parts.stepper.guarded())
            stack.callback(self._loop.abandon)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Unwrap the model, end what was started, and close the run's events."""
        stack, self._open = self._require_open(), None
        stack.__exit__(*error)

    def _require_open(self) -> ExitStack:
        if self._open is None:
            raise UsageError("the session is not open: do this inside `with Session(...) as s:`")
        return self._open

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's micro-batches until the run's last base step."""
        self._require_open()
        return self._loop.windows()

    def backward(
        self, loss: Tensor, *, weight: float | None = None, reduction: str = "mean"
    ) -> None:
        """Run backward on the loss of the present micro-batch.

        Unlike `loss.backward()` it scales, reports the loss, takes a weight, and leaves the
        batch's mean gradient in `p.grad` after a window's last micro-batch, before `step()`.

        Args:
            loss: scalar; the *mean* over the micro-batch, not divided by their number.
            weight: what the mean is over, if not samples: for example target tokens.
            reduction: `"sum"` for a loss that is a sum, over samples or what `weight` counts.
        """
        self._loop.backward(loss, weight=weight, reduction=reduction)

    def step(self) -> StepResult | None:
        """End a micro-batch; at the end of a window average, measure, scale, step and commit.

        Returns:
            `None` inside a window, the step's result at its end. A step whose gradients are not
            finite on any rank moves nothing on every rank, and its samples come again.

        Raises:
            UsageError: no micro-batch is at work, or there was no backward.
            NonFiniteError: more than 50 steps in a row were not finite.
            CommunicationError: the process group broke; nothing was committed.
        """
        return self._loop.step()

    def stop(self) -> None:
        """End the run early: all workers leave the loop after the same step."""
        self._loop.ask_to_stop()

    def pause(self, reason: str) -> AbstractContextManager[None]:
        """Return a context for work that the other workers must not take for a hang."""
        self._require_open()
        return self._parts.pause(reason)

    def evaluate(
        self, function: EvaluationFunction, dataset: Dataset[Any] | Any, *, batch_size: int = 256
    ) -> Evaluation:
        """Deal a dataset over the workers once and add up exactly; all workers must call it.

        Args:
            function: called with the bare model (in evaluation mode, without gradients) and a
                batch; returns sums over the batch's samples, by name.
            dataset: map-style dataset with a length.
            batch_size: samples a call.
        """
        self._require_open()
        result = self._parts.evaluator(function, dataset, batch_size=batch_size)
        self._parts.reporter.evaluation(result)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return progress, moments, ramps, schedule, position, loss scale and random generators.

        It loads with `torch.load(weights_only=True)`, under any number of workers.
        """
        return self._parts.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; before or after the optimizer's own, in any order.

        Raises:
            StateError: another version, dataset length, base batch or seed.
        """
        self._parts.state.load_state_dict(state)

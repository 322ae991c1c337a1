"""The training loop: windows of micro-batches, one after the other, until the run is over.

Joins feed and stepper; knows nothing of process groups, checkpoints or evaluation.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from elastane import replica
from elastane.durability import Keeper
from elastane.errors import CommunicationError, NonFiniteError, UsageError
from elastane.feed import Feed
from elastane.group import Membership
from elastane.planning import MicroBatch
from elastane.rehearsal import Rehearsal
from elastane.reporting import Reporter, StepResult
from elastane.stepper import Outcome, Stepper

__all__ = ["Loop"]

MAX_SKIPPED_STEPS = 50


class Loop:
    """Yields micro-batches and ends each with `step`; keeps the committed position.

    Args:
        model: what the user computes the loss with.
        feed: where micro-batches come from.
        stepper: what makes steps of them.
        membership: who takes part, and what they agree on.
        reporter: is told of every step.
        keeper: writes checkpoints of steps.
    """

    def __init__(
        self,
        model: replica.Replica,
        *,
        feed: Feed,
        stepper: Stepper,
        membership: Membership,
        reporter: Reporter,
        keeper: Keeper,
    ) -> None:
        self._model = model
        self._feed = feed
        self.stepper = stepper
        self._membership = membership
        self._reporter = reporter
        self._keeper = keeper
        self._in_window = False
        self._rehearsal: Rehearsal | None = None
        self._last_result: StepResult | None = None
        self._micro_batch: MicroBatch | None = None
        self._contexts = ExitStack()
        self._skipped = 0
        self._stop_asked = False
        self.stopped = False
        self.position = 0

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self.stopped or self.stepper.controller.finished

    @property
    def ending(self) -> str:
        """How the run ended: `"stopped"`, `"finished"`, or `"left"` before its end."""
        return "stopped" if self.stopped else "finished" if self.done else "left"

    def _require_micro_batch(self) -> MicroBatch:
        if self._micro_batch is None:
            raise UsageError(
                "there is no micro-batch at work: call this inside `for ... in session:`, and "
                "step() once for each micro-batch"
            )
        return self._micro_batch

    @property
    def weight(self) -> int:
        """Samples of the micro-batch at work that count."""
        return self._require_micro_batch().weight

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch at work is this worker's last of the window."""
        return self._require_micro_batch() is self._plan.micro_batches[-1]

    def windows(self) -> Iterator[Any]:
        """Yield micro-batches until the run is over; what is left open when left is dropped."""
        if self.done:
            warnings.warn(
                f"the run is {self.ending}, so there is nothing to iterate over: raise num_steps, "
                "or build a new session for a new run",
                stacklevel=2,
            )
        try:
            while not self.done:
                while not self.done:
                    yield from self._window()
                self._membership.agree_on_end()
            self._keeper.finished(self.stepper.controller.step)
            self.settled(self.stepper.controller.step)
        finally:
            self.abandon()

    def _window(self) -> Iterator[Any]:
        self._membership.start_window()
        if self.done:  # others had gone further
            return
        if self._membership.warming:
            self._rehearsal = Rehearsal(self._model)
        self._plan = self._feed.plan(self.position)
        self._in_window = True
        self.stepper.open(self._plan, extras=self._extras, arrived=self._membership.arrived)
        for micro_batch, data in self._feed.window(self._plan):
            self._begin(micro_batch)
            yield data
            if self._micro_batch is not None:
                raise UsageError(
                    "step() was not called after a micro-batch: call session.step() at the end of "
                    "every turn of the loop; it returns None inside a window"
                )

    def facts(self) -> dict[str, object]:
        """Return what all workers must start from alike."""
        controller = self.stepper.controller
        return {
            "num_steps": controller.num_steps,
            "step": controller.step,
            "progress": controller.progress,
            "position": self.position,
            "end of the next batch": self._feed.plan(self.position).stop,
            "learning rates": self.stepper.learning_rates(),
        }

    def revive(self) -> None:
        """Be a run that goes on from its position, not one that was stopped."""
        self.stopped = self._stop_asked = False
        self._skipped = 0

    def check_between_windows(self) -> None:
        """Refuse what can't be done while a window is open."""
        if self._in_window:
            raise UsageError(
                "a state can't be loaded inside an accumulation window: load it before the loop, "
                "or after a step() that returned a result"
            )

    def _begin(self, micro_batch: MicroBatch) -> None:
        """Set gradient synchronisation and batch statistics for one forward and backward."""
        self._micro_batch = micro_batch
        self.stepper.begin(micro_batch.weight, last=self.is_last)
        if not self.is_last:
            self._contexts.enter_context(replica.without_sync(self._model))
        if micro_batch.weight == 0:
            self._contexts.enter_context(replica.idle_batch_norm(self._model))

    def backward(self, loss: Tensor, *, weight: float | None, reduction: str) -> None:
        """Run backward on the loss of the micro-batch at work."""
        self._require_micro_batch()
        self.stepper.backward(loss, weight=weight, reduction=reduction)

    def step(self) -> StepResult | None:
        """End the micro-batch at work, and with the last one the window."""
        is_last = self.is_last
        broken: str | None = None
        outcome: Outcome | None = None
        try:
            if not is_last:
                self.stepper.set_aside()
                return None
            if self._rehearsal is None:
                outcome = self.stepper.finish()
        except CommunicationError as error:
            broken = str(error)
        except BaseException:
            self.stepper.discard()
            raise
        finally:
            self._end_micro_batch()
        self._in_window = False
        if outcome is not None:
            return self._finish(outcome)
        self.stepper.discard()
        if broken is not None:
            return self._last_result if self._membership.recover(broken) else None
        return self._end_rehearsal()

    def _end_rehearsal(self) -> None:
        assert self._rehearsal is not None
        self._rehearsal.undo()
        self._rehearsal = None
        self._membership.rehearsed()

    def _finish(self, outcome: Outcome) -> StepResult:
        stop, wishes, *sums = outcome.extras
        self.stopped = stop > 0
        if outcome.committed:
            self.position, self._skipped = self._plan.stop, 0
        else:
            self._count_skipped()
        self._membership.finished_step(sums)
        # All workers ended the step before this one, or this one could not have been averaged.
        self.settled(self.stepper.controller.step - int(outcome.committed))
        result = self._last_result = self._reporter.step(outcome, plan=self._plan)
        if outcome.committed:
            self._keeper.committed(result.step, wished=wishes > 0)
        if self._membership.final_at_once:
            self.settled(result.step)
        return result

    def settled(self, step: int) -> None:
        """Know that committed steps up to this one are final, and that no later one is."""
        self._reporter.settled(step)
        for saved in self._keeper.settled(step):
            self._reporter.checkpoint(saved)

    def _count_skipped(self) -> None:
        self._skipped += 1
        if self._skipped > MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"gradients at positions {self._plan.start} to {self._plan.stop - 1} were not "
                f"finite {self._skipped} times in a row: look for NaN in these samples, lower "
                "the learning rate, or pass a scaler if you train in float16"
            )

    def ask_to_stop(self) -> None:
        """Have all workers stop after the same step."""
        self._stop_asked = True

    def _extras(self) -> Sequence[float]:
        """Return what is summed over the workers with each step.

        Who asks to stop, who wishes for a checkpoint, and what the membership wants to know.
        """
        wishes = self._keeper.wishes(self.stepper.controller.step + 1)
        return (float(self._stop_asked), float(wishes), *self._membership.extras())

    def state_dict(self) -> dict[str, Any]:
        """Return what a worker that was not there needs to know of the last window."""
        result = None if self._last_result is None else self._last_result.state_dict()
        return {"stopped": self.stopped, "skipped": self._skipped, "result": result}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what another worker knows of the last window, as if it had been one's own."""
        self.stopped, self._skipped = bool(state["stopped"]), int(state["skipped"])
        result = state["result"]
        self._last_result = None if result is None else StepResult.from_state_dict(result)
        epoch = max(self.position - 1, 0) // self._feed.num_samples
        self._reporter.adopt(self._last_result, epoch=epoch)

    def abandon(self) -> None:
        """Drop what was not committed."""
        self._in_window = False
        self._rehearsal = None
        self._end_micro_batch()
        self.stepper.discard()

    def _end_micro_batch(self) -> None:
        self._contexts.close()
        self._micro_batch = None

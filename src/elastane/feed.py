"""The feed: pairs each step's plan with its loaded micro-batches, from any position.

Joins loader and batch policy; knows nothing of gradients or schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from elastane.batching import BatchPolicy, World, check_fit
from elastane.data import LoaderOptions, StreamLoader
from elastane.errors import ArgumentError, describe
from elastane.planning import InStep, MicroBatch, StepPlan, plan_step

__all__ = ["Feed"]


class Feed:
    """Yields a worker's micro-batches in the order of the stream.

    Reading ahead consumes nothing: a window that starts anywhere but where the last one ended
    makes the loader read anew from there.

    Args:
        dataset: map-style dataset with a length.
        options: order and loading.
        policy: batch policy.
        world: this worker's place at first; `reset` changes it.
        most_workers: how many there may be.
        loader_number: seeds the loader processes; another one on each worker.
        min_samples: fewest samples of a micro-batch.
        in_step: how all workers make as many passes, where they must.

    Raises:
        ArgumentError: fewer samples than workers, or a policy that does not fit their number.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Any,
        *,
        options: LoaderOptions,
        policy: BatchPolicy,
        world: World,
        most_workers: int,
        loader_number: int,
        min_samples: int,
        in_step: InStep | None = None,
    ) -> None:
        check_fit(policy, min_samples=min_samples)
        self._loader = StreamLoader(dataset, options=options, rank=loader_number)
        _check_enough_samples(
            self._loader.num_samples, num_workers=most_workers, min_samples=min_samples
        )
        policy.batch_samples(most_workers)
        self._options = options
        self._policy = policy
        self._world = world
        self._min_samples = min_samples
        self._in_step: InStep | None = in_step
        self._next_position: int | None = None
        self._batches: Iterator[Any] = iter(())
        self._ahead: deque[StepPlan] = deque()
        self.plan(0)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._loader.num_samples

    def reset(self, world: World) -> None:
        """Deal for another place from the next window on; what was read ahead is dropped."""
        self._world = world
        self._next_position = None
        self._ahead.clear()

    def plan(self, position: int) -> StepPlan:
        """Return the step that starts at `position`; one that was read ahead is known already.

        A policy may have come to another batch since.
        """
        if self._ahead and self._ahead[0].start == position:
            nominal = self._policy.batch_samples(self._world.world_size)
            if self._ahead[0].nominal_samples == nominal:
                return self._ahead[0]
        return self._planned(position)

    def _planned(self, position: int) -> StepPlan:
        return plan_step(
            self._policy,
            position=position,
            num_samples=self.num_samples,
            world=self._world,
            min_samples=self._min_samples,
            straddle=self._options.straddle_epochs,
            in_step=self._in_step,
        )

    def start(self, position: int) -> None:
        """Begin to read at `position`; starts loader processes if there are none yet."""
        self._ahead.clear()
        self._batches = self._loader.read(self._ranges(position))
        self._next_position = position

    def window(self, plan: StepPlan) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield the micro-batches of a step with their data."""
        was_read_otherwise = self._ahead and self._ahead[0] is not plan
        if self._next_position != plan.start or was_read_otherwise:
            self.start(plan.start)
        self._next_position = None
        for micro_batch in plan.micro_batches:
            batch = next(self._batches)
            if micro_batch is plan.micro_batches[-1]:
                self._next_position = plan.stop
                while self._ahead and self._ahead[0].start < plan.stop:
                    self._ahead.popleft()
            yield micro_batch, batch

    def close(self) -> None:
        """End the loader processes."""
        self._batches = iter(())
        self._next_position = None
        self._ahead.clear()
        self._loader.close()

    def _ranges(self, position: int) -> Iterator[tuple[int, int]]:
        while True:
            plan = self._planned(position)
            self._ahead.append(plan)
            for micro_batch in plan.micro_batches:
                yield micro_batch.start, micro_batch.stop
            position = plan.stop


def _check_enough_samples(num_samples: int, *, num_workers: int, min_samples: int) -> None:
    needed = num_workers * min_samples
    if num_samples < needed:
        rule = f"fewer samples than the {needed} that {num_workers} workers need for a step"
        way_out = "Use fewer workers or more samples."
        raise ArgumentError(describe("len(dataset)", num_samples, rule=rule, way_out=way_out))

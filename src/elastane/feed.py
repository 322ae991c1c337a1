"""The feed: pairs each step's plan with its loaded micro-batches, from any position.

Joins loader and batch policy; knows nothing of gradients or schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Dataset

from elastane import order
from elastane.batching import (
    BatchPolicy,
    MicroBatch,
    StepPlan,
    World,
    check_fit,
    plan_step,
)
from elastane.data import LoaderOptions, StreamLoader
from elastane.errors import ArgumentError, UnsupportedError, describe

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
        level: whether all workers must make as many micro-batches.
        in_step: whether all workers must make the same number of micro-batches.

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
        level: bool = False,
        in_step: bool = False,
    ) -> None:
        check_fit(policy, min_samples=min_samples)
        self._loader = StreamLoader(dataset, options=options, rank=loader_number)
        _check_enough_samples(
            self._loader.num_samples, num_workers=most_workers, min_samples=min_samples
        )
        policy.batch_samples(most_workers)
        self._options = options
        self._policy = _Leveled(policy) if level else policy
        self._world = world
        self._min_samples = min_samples
        self._in_step = in_step
        self._next_position: int | None = None
        self._batches: Iterator[Any] = iter(())
        self.plan(0)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._loader.num_samples

    def reset(self, world: World) -> None:
        """Deal for another place from the next window on; what was read ahead is dropped."""
        self._world = world
        self._next_position = None

    def plan(self, position: int) -> StepPlan:
        """Return the step that starts at `position`."""
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
        self._batches = self._loader.read(self._ranges(position))
        self._next_position = position

    def window(self, plan: StepPlan) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield the micro-batches of a step with their data."""
        if self._next_position != plan.start:
            self.start(plan.start)
        self._next_position = None
        for micro_batch in plan.micro_batches:
            batch = next(self._batches)
            if micro_batch is plan.micro_batches[-1]:
                self._next_position = plan.stop
            yield micro_batch, batch

    def close(self) -> None:
        """End the loader processes."""
        self._batches = iter(())
        self._next_position = None
        self._loader.close()

    def _ranges(self, position: int) -> Iterator[tuple[int, int]]:
        while True:
            plan = self.plan(position)
            for micro_batch in plan.micro_batches:
                yield micro_batch.start, micro_batch.stop
            position = plan.stop


@dataclass(frozen=True, slots=True)
class _Leveled:
    """Has all workers make as many micro-batches as a policy's worker with the most of them."""

    policy: BatchPolicy

    def batch_samples(self, world_size: int) -> int:
        return self.policy.batch_samples(world_size)

    def num_parts(self, world_size: int) -> int:
        return self.policy.num_parts(world_size)

    def deal(
        self, start: int, stop: int, *, world: World, min_samples: int
    ) -> Sequence[tuple[int, int]]:
        """Return a worker's ranges, cut further where another worker has more of them."""
        places = [replace(world, rank=rank) for rank in range(world.world_size)]
        all_ranges = [
            self.policy.deal(start, stop, world=place, min_samples=min_samples) for place in places
        ]
        own, most = all_ranges[world.rank], max(map(len, all_ranges))
        fewest = min(sum(end - begin for begin, end in ranges) for ranges in all_ranges)
        if fewest < most:
            raise UnsupportedError(_UNEVEN.format(fewest=fewest, most=most))
        if len(own) == most:
            return own
        return [order.split(own[0][0], own[-1][1], parts=most, part=part) for part in range(most)]


_UNEVEN = (
    "SyncBatchNorm wants as many micro-batches of each worker, and one has {fewest} samples where "
    "another has {most} micro-batches: take a larger batch, fewer micro-batches or more even shares"
)


def _check_enough_samples(num_samples: int, *, num_workers: int, min_samples: int) -> None:
    needed = num_workers * min_samples
    if num_samples < needed:
        rule = f"fewer samples than the {needed} that {num_workers} workers need for a step"
        way_out = "Use fewer workers or more samples."
        raise ArgumentError(describe("len(dataset)", num_samples, rule=rule, way_out=way_out))

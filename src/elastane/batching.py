"""Batch policies: how many samples a step takes, and how they are dealt to the workers.

Arithmetic on positions only; knows nothing of data sets, gradients or rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from elastane import order
from elastane.errors import ArgumentError, check_whole, describe

__all__ = [
    "BatchPolicy",
    "GlobalBatch",
    "LocalBatch",
    "World",
    "check_fit",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who takes part in a step.

    Attributes:
        rank: this worker's number, from 0.
        world_size: number of workers.
        generation: number of the membership; grows with every change of it.
    """

    rank: int = 0
    world_size: int = 1
    generation: int = 0


@runtime_checkable
class BatchPolicy(Protocol):
    """What a batch policy must do."""

    def batch_samples(self, world_size: int) -> int:
        """Return the batch over all workers in samples."""
        ...

    def num_parts(self, world_size: int) -> int:
        """Return how many parts a batch is dealt in, which each want `min_samples`."""
        ...

    def deal(
        self, start: int, stop: int, *, world: World, min_samples: int
    ) -> Sequence[tuple[int, int]]:
        """Return the ranges of this worker's micro-batches; none if it has no samples."""
        ...


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """Each worker takes the same number of samples: the batch grows with the workers.

    Both papers' setting; the rule adapts the learning rate.

    Attributes:
        samples: samples a worker and step.
        micro_batches: micro-batches that they are split into. With one worker and one of these,
            the gain is estimated from some layers.
    """

    samples: int
    _: KW_ONLY
    micro_batches: int = 1

    def __post_init__(self) -> None:
        check_whole("samples", self.samples, at_least=1, way_out="Samples a worker and step.")
        _check_parts(self.micro_batches, self.samples)

    def batch_samples(self, world_size: int) -> int:
        """Return `samples * world_size`."""
        return self.samples * world_size

    def num_parts(self, world_size: int) -> int:
        """Return `world_size`."""
        return world_size

    def deal(
        self, start: int, stop: int, *, world: World, min_samples: int
    ) -> Sequence[tuple[int, int]]:
        """Return this worker's share, split into micro-batches."""
        least = min(min_samples, self.samples)
        mine = _even_share(start, stop, world=world, min_samples=least)
        return _split_into(*mine, parts=self.micro_batches, min_samples=min_samples)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """All workers together take the same number of samples, whatever their number.

    The batch is split as evenly as it goes, and accumulated where a worker's memory ends.

    Attributes:
        samples: samples a step over all workers.
        max_micro_batch: most samples of one backward pass; `None` for no limit.
        micro_batches: fix the grid of micro-batches, dealt whole to the workers, so that a step
            does not depend on their number at all. Must be at least their number.
        shares: relative share of each worker, for machines of unequal speed; one number a
            worker. `None` is even.
        allow_idle_workers: let workers without samples keep the others company when the batch
            is smaller than the number of workers.
    """

    samples: int
    _: KW_ONLY
    max_micro_batch: int | None = None
    micro_batches: int | None = None
    shares: Sequence[float] | None = None
    allow_idle_workers: bool = False

    def __post_init__(self) -> None:
        check_whole("samples", self.samples, at_least=1, way_out="Samples of a step.")
        if self.max_micro_batch is not None:
            way_out = "Samples of one backward pass; None is no limit."
            check_whole("max_micro_batch", self.max_micro_batch, at_least=1, way_out=way_out)
        if self.micro_batches is not None:
            _check_parts(self.micro_batches, self.samples)
            if self.max_micro_batch is not None:
                rule = f"can't be combined with max_micro_batch={self.max_micro_batch}"
                way_out = "A fixed grid sets the size of a micro-batch: leave one of them out."
                message = describe("micro_batches", self.micro_batches, rule=rule, way_out=way_out)
                raise ArgumentError(message)

    def batch_samples(self, world_size: int) -> int:
        """Return `samples`; check that every worker gets some, unless idle ones are allowed."""
        parts = self.micro_batches or self.samples
        if parts < world_size and not self.allow_idle_workers:
            name = "samples" if self.micro_batches is None else "micro_batches"
            rule = f"fewer than the {world_size} workers"
            way_out = "Raise it, or pass allow_idle_workers=True."
            raise ArgumentError(describe(name, parts, rule=rule, way_out=way_out))
        if self.shares is not None:
            self._check_shares(self.shares, parts=parts, world_size=world_size)
        return self.samples

    def _check_shares(self, shares: Sequence[float], *, parts: int, world_size: int) -> None:
        if len(shares) != world_size:
            rule = f"has {len(shares)} numbers for {world_size} workers"
            way_out = "Give one share a worker, or None for even shares."
            raise ArgumentError(describe("shares", shares, rule=rule, way_out=way_out))
        smallest = max(range(world_size), key=lambda part: (-shares[part], part))
        begin, end = order.split(0, parts, parts=world_size, part=smallest, shares=shares)
        if begin == end and not self.allow_idle_workers:
            rule = f"leaves worker {smallest} without any of {parts} parts"
            way_out = "Raise its share, or pass allow_idle_workers=True."
            raise ArgumentError(describe("shares", shares, rule=rule, way_out=way_out))

    def _shared(self, start: int, stop: int, *, world: World, min_samples: int) -> tuple[int, int]:
        """Return a worker's weighted share; a tail that would leave one too few is cut evenly."""
        cuts = order.cuts(start, stop, parts=world.world_size, shares=self.shares or ())
        sizes = [end - begin for begin, end in cuts]
        if all(n >= min_samples or (n == 0 and self.allow_idle_workers) for n in sizes):
            return cuts[world.rank]
        if stop - start == self.samples:
            rule = f"leaves a worker {min(sizes)} of {stop - start} samples, {min_samples} is least"
            way_out = "Raise the smallest share, or the batch (BatchNorm needs 2 samples a worker)."
            raise ArgumentError(describe("shares", self.shares, rule=rule, way_out=way_out))
        return _even_share(start, stop, world=world, min_samples=min_samples)

    def num_parts(self, world_size: int) -> int:
        """Return the grid's micro-batches, so that no step depends on the workers, or them."""
        return self.micro_batches or world_size

    def deal(
        self, start: int, stop: int, *, world: World, min_samples: int
    ) -> Sequence[tuple[int, int]]:
        """Return this worker's share of the samples, or of the grid's micro-batches."""
        cut = partial(order.split, parts=world.world_size, part=world.rank, shares=self.shares)
        if self.micro_batches is not None:
            parts = max(min(self.micro_batches, (stop - start) // min_samples), 1)
            first, last = cut(0, parts)
            return [order.split(start, stop, parts=parts, part=i) for i in range(first, last)]
        if self.shares is None:
            most = self.samples // world.world_size
            least = min_samples if self.allow_idle_workers else min(min_samples, most)
            begin, end = _even_share(start, stop, world=world, min_samples=least)
        else:
            begin, end = self._shared(start, stop, world=world, min_samples=min_samples)
        limit = self.max_micro_batch or max(end - begin, 1)
        return _split_into(begin, end, parts=-(-(end - begin) // limit), min_samples=min_samples)


def check_fit(policy: BatchPolicy, *, min_samples: int) -> None:
    """Refuse micro-batches of a policy of ours that are smaller than a model wants them.

    `plan_step` would make fewer of them, and the gain of one can't be measured.
    """
    if not isinstance(policy, (LocalBatch, GlobalBatch)) or policy.micro_batches is None:
        return
    if policy.micro_batches > 1 and policy.samples < policy.micro_batches * min_samples:
        rule = (
            f"{policy.samples} samples leave some fewer than {min_samples}, which BatchNorm needs"
        )
        way_out = "Take fewer micro-batches, or more samples."
        message = describe("micro_batches", policy.micro_batches, rule=rule, way_out=way_out)
        raise ArgumentError(message)


def _even_share(start: int, stop: int, *, world: World, min_samples: int) -> tuple[int, int]:
    """Return a worker's even share.

    Where there are fewer than `min_samples` for each, as many workers share them as can and the
    others have none: with idle workers allowed, or at the end of an epoch in which the workers
    changed.
    """
    takers = world.world_size
    if stop - start < takers * min_samples:
        takers = max((stop - start) // min_samples, 1)
    if world.rank >= takers:
        return stop, stop
    return order.split(start, stop, parts=takers, part=world.rank)


def _split_into(
    start: int, stop: int, *, parts: int, min_samples: int
) -> Sequence[tuple[int, int]]:
    parts = min(parts, (stop - start) // min_samples) or (1 if stop > start else 0)
    if parts == 1:
        return [(start, stop)]
    return [order.split(start, stop, parts=parts, part=part) for part in range(parts)]


def _check_parts(micro_batches: int, samples: int) -> None:
    way_out = "1 is one backward pass."
    check_whole("micro_batches", micro_batches, at_least=1, way_out=way_out)
    if micro_batches > samples:
        rule, way_out = f"more than the {samples} samples", "Each needs at least one sample."
        raise ArgumentError(describe("micro_batches", micro_batches, rule=rule, way_out=way_out))

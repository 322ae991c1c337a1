"""One step's samples: where its batch ends, and which micro-batches of it are this worker's.

Arithmetic on positions only; knows nothing of data sets, gradients or rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elastane import order
from elastane.batching import BatchPolicy, World
from elastane.errors import UnsupportedError

__all__ = ["InStep", "MicroBatch", "StepPlan", "plan_step"]

InStep = Literal["cut", "company"]
"""How workers with fewer micro-batches than others make as many passes as those.

`"cut"`: their own samples are cut further, so that each pass has samples that count: for
SyncBatchNorm, which mixes those of all workers. `"company"`: they repeat samples with weight 0:
for sharded models, where a pass must only be made.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one backward pass of one worker sees.

    Attributes:
        start: first position in the stream.
        stop: position behind the last.
        weight: samples that count: all, or 0 where the worker only keeps the others company.
    """

    start: int
    stop: int
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step's samples.

    Attributes:
        start: first position of the global batch in the stream.
        stop: position behind its last.
        nominal_samples: batch that the policy asks for.
        epoch: number of the epoch that it starts in, from 0.
        micro_batches: this worker's, in order.
    """

    start: int
    stop: int
    nominal_samples: int
    epoch: int
    micro_batches: tuple[MicroBatch, ...]

    @property
    def batch_samples(self) -> int:
        """Samples of the global batch, `B`."""
        return self.stop - self.start


def plan_step(
    policy: BatchPolicy,
    *,
    position: int,
    num_samples: int,
    world: World,
    min_samples: int = 1,
    straddle: bool = False,
    in_step: InStep | None = None,
) -> StepPlan:
    """Return the step that starts at a position of the stream.

    Depends on the position and the present world alone, so that any number of workers can go on
    from any position.

    Args:
        policy: batch policy.
        position: committed samples of the stream so far.
        num_samples: samples of an epoch.
        world: this worker's place.
        min_samples: fewest samples of a micro-batch; 2 for models with BatchNorm.
        straddle: let a batch run over the end of an epoch, so that none is short.
        in_step: how all workers make as many passes as the one with the most micro-batches, for
            models that communicate in each pass; `None` where they need not.

    Raises:
        UnsupportedError: a worker has fewer samples than it would have to be cut into.
    """
    nominal = policy.batch_samples(world.world_size)
    stop = order.batch_stop(
        position,
        num_samples=num_samples,
        batch_samples=nominal,
        min_tail_samples=min(min_samples * policy.num_parts(world.world_size), nominal),
        straddle=straddle,
    )
    dealt = _dealt(policy, position, stop, world=world, min_samples=min_samples, in_step=in_step)
    return StepPlan(
        start=position,
        stop=stop,
        nominal_samples=nominal,
        epoch=position // num_samples,
        micro_batches=tuple(dealt),
    )


def _dealt(
    policy: BatchPolicy,
    start: int,
    stop: int,
    *,
    world: World,
    min_samples: int,
    in_step: InStep | None,
) -> list[MicroBatch]:
    """Return this worker's micro-batches, at least one."""
    own, most = policy.deal(start, stop, world=world, min_samples=min_samples), 1
    if in_step is not None:
        ranges = _ranges(policy, start, stop, world=world, min_samples=min_samples)
        own = _cut(ranges, rank=world.rank) if in_step == "cut" else own
        most = max(map(len, ranges))
    dealt = [MicroBatch(start=a, stop=b, weight=b - a) for a, b in own]
    end = min(start + min_samples, stop)
    company = [MicroBatch(start=start, stop=end, weight=0) for _ in range(most - len(dealt))]
    return dealt + company


def _ranges(
    policy: BatchPolicy, start: int, stop: int, *, world: World, min_samples: int
) -> list[Sequence[tuple[int, int]]]:
    """Return the micro-batches of every worker."""
    places = (replace(world, rank=rank) for rank in range(world.world_size))
    return [policy.deal(start, stop, world=place, min_samples=min_samples) for place in places]


def _cut(ranges: Sequence[Sequence[tuple[int, int]]], *, rank: int) -> Sequence[tuple[int, int]]:
    """Return a worker's ranges, cut further where another worker has more of them."""
    own, most = ranges[rank], max(map(len, ranges))
    fewest = min(sum(end - begin for begin, end in each) for each in ranges)
    if fewest < most:
        raise UnsupportedError(_UNEVEN.format(fewest=fewest, most=most))
    if len(own) == most:
        return own
    return [order.split(own[0][0], own[-1][1], parts=most, part=part) for part in range(most)]


_UNEVEN = (
    "SyncBatchNorm wants as many micro-batches of each worker, and one has {fewest} samples where "
    "another has {most} micro-batches: take a larger batch, fewer micro-batches or more even shares"
)

"""Both loaders over one dataset, in rounds in which each gives some batches in turn.

Knows how a session reads and how a plain loop does; nothing of tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.loader.datasets import KINDS, Kind
from elastane import LoaderOptions, LocalBatch
from elastane._compat import shut_down_loader
from elastane.batching import World
from elastane.feed import Feed

__all__ = ["PLAIN", "READERS", "Reading", "seconds_of_blocks"]

PLAIN, AGAIN, OURS = "DataLoader", "DataLoader again", "elastane"
_WORKERS = 2
_SEED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a dataset is read, by both loaders alike.

    Attributes:
        kind: name of the dataset.
        num_workers: loader processes.
        batch: samples of this worker's batch; there are two workers.
        rounds: number of them.
        block_s: how long a loader reads in a round.
    """

    kind: str
    num_workers: int
    batch: int
    rounds: int
    block_s: float


Batches = Iterator[Any]


def _plain(reading: Reading, dataset: Dataset[Any], kind: Kind, stack: ExitStack) -> Batches:
    """Return the batches of a plain loop: `DataLoader` and `DistributedSampler`."""
    sampler = DistributedSampler(dataset, num_replicas=_WORKERS, rank=0, seed=_SEED)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=reading.batch,
        sampler=sampler,
        num_workers=reading.num_workers,
        collate_fn=kind.collate,
        persistent_workers=reading.num_workers > 0,
    )

    def close() -> None:
        if reading.num_workers and loader._iterator is not None:
            shut_down_loader(loader._iterator)

    def batches() -> Batches:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    stack.callback(close)
    return batches()


def _ours(reading: Reading, dataset: Dataset[Any], kind: Kind, stack: ExitStack) -> Batches:
    """Return the batches as a session's loop takes them: each step planned, then fed."""
    feed = Feed(
        dataset,
        options=LoaderOptions(seed=_SEED, num_workers=reading.num_workers, collate_fn=kind.collate),
        policy=LocalBatch(reading.batch),
        world=World(rank=0, world_size=_WORKERS),
        most_workers=_WORKERS,
        loader_number=0,
        min_samples=1,
    )
    stack.callback(feed.close)

    def batches() -> Batches:
        position = 0
        while True:
            plan = feed.plan(position)
            for _, batch in feed.window(plan):
                yield batch
            position = plan.stop

    return batches()


_Reader = Callable[[Reading, Dataset[Any], Kind, ExitStack], Batches]
READERS: Mapping[str, _Reader] = {PLAIN: _plain, AGAIN: _plain, OURS: _ours}


def seconds_of_blocks(reading: Reading) -> tuple[int, Mapping[str, Sequence[float]]]:
    """Return the batches of a block, and each loader's wall seconds for one by round."""
    kind = KINDS[reading.kind]
    dataset = kind.build()
    with ExitStack() as stack:
        batches = {name: build(reading, dataset, kind, stack) for name, build in READERS.items()}
        count = _block_batches(batches, block_s=reading.block_s)
        seconds: dict[str, list[float]] = {name: [] for name in batches}
        names = list(batches)
        for number in range(reading.rounds):
            shift = number // 2 % len(names)
            order = names[shift:] + names[:shift]
            for name in order if number % 2 == 0 else reversed(order):
                seconds[name].append(_timed(batches[name], count))
    return count, seconds


def _block_batches(batches: Mapping[str, Batches], *, block_s: float) -> int:
    """Warm all loaders up; return how many of the plain one's batches fill a block."""
    warm = 16
    for each in batches.values():
        _timed(each, warm)
    return max(round(block_s / _timed(batches[PLAIN], warm) * warm), warm)


def _timed(batches: Batches, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        next(batches)
    return time.perf_counter() - began

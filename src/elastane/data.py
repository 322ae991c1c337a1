"""The elastic loader: reads ranges of the endless stream of samples from any map-style dataset.

Torch's `DataLoader` does the loading, but for the plain case. Knows nothing of batches, ranks,
gradients or schedules: it is told ranges and reads them.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from elastane import order
from elastane._compat import shut_down_loader
from elastane.collation import batchwise, read_here
from elastane.errors import (
    ArgumentError,
    UnsupportedError,
    UsageError,
    check_choice,
    check_whole,
    describe,
)

__all__ = ["LoaderOptions", "StreamLoader"]

_BLOCK_RANGES, _BLOCK_SAMPLES = 256, 4096
"""Dealt at once, at most: more saves nothing."""

START_METHODS = ("fork", "forkserver", "spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How samples are ordered and loaded.

    Attributes:
        seed: of the order of the samples; part of the run, not of the machine.
        shuffle: `False` reads the dataset in its own order, epoch after epoch.
        straddle_epochs: let a batch run over the end of an epoch, so that none is short.
        num_workers: loader processes; 0 loads in the training process.
        collate_fn: as `DataLoader`'s.
        pin_memory: as `DataLoader`'s.
        prefetch_factor: micro-batches loaded ahead by each loader process.
        worker_init_fn: as `DataLoader`'s.
        timeout_s: seconds after which a loader process that gives nothing is an error; 0 waits.
        start_method: how loader processes start. By default they are forked before the process
            group exists and started by the fork server when it exists already: a process forked
            later would hold the group's sockets, and a worker's death would be noticed late.
    """

    seed: int = 0
    shuffle: bool = True
    straddle_epochs: bool = False
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    prefetch_factor: int = 2
    worker_init_fn: Callable[[int], None] | None = None
    timeout_s: float = 0
    start_method: str | None = None

    def __post_init__(self) -> None:
        check_whole("num_workers", self.num_workers, at_least=0, way_out="0 loads in place.")
        check_whole("prefetch_factor", self.prefetch_factor, at_least=1, way_out="2 is usual.")
        if self.start_method is not None:
            check_choice("start_method", self.start_method, START_METHODS)
        if self.num_workers == 0:
            self._warn_of_idle_options()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            way_out = "Any int, also negative."
            raise ArgumentError(
                describe("seed", self.seed, rule="must be a whole number", way_out=way_out)
            )

    def _warn_of_idle_options(self) -> None:
        given = {
            "start_method": self.start_method is not None,
            "timeout_s": self.timeout_s != 0,
            "worker_init_fn": self.worker_init_fn is not None,
        }
        for name, is_given in given.items():
            if is_given:
                warnings.warn(f"{name} has no effect with num_workers=0", stacklevel=4)


class _RangeSampler(Sampler[list[int]]):
    """Turns ranges of the stream into lists of dataset indices, lazily."""

    def __init__(self, num_samples: int, options: LoaderOptions) -> None:
        self._num_samples = num_samples
        self._options = options
        self.ranges: Iterable[tuple[int, int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        for block in _blocks(self.ranges):
            dealt = order.indices_of_ranges(
                block,
                num_samples=self._num_samples,
                seed=self._options.seed,
                shuffle=self._options.shuffle,
            ).tolist()
            begin = 0
            for start, stop in block:
                end = begin + stop - start
                yield dealt[begin:end]
                begin = end


def _blocks(ranges: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges that are dealt at once: a few at first, which somebody waits for, then more.

    Where the next range can't be had, those before it come first.
    """
    block: list[tuple[int, int]] = []
    num_samples, most = 0, 1
    try:
        for start, stop in ranges:
            block.append((start, stop))
            num_samples += stop - start
            if len(block) >= most or num_samples >= _BLOCK_SAMPLES:
                yield block
                block, num_samples, most = [], 0, min(2 * most, _BLOCK_RANGES)
    except Exception:
        if block:
            yield block
        raise
    if block:
        yield block


class StreamLoader:
    """Reads batches at given positions of the endless, shuffled stream of a dataset.

    Position `p` is place `p mod n` of epoch `p div n`. There is no state: what was read ahead is
    simply read again, by any number of loader processes, and only who commits a position knows
    what was consumed.

    Args:
        dataset: map-style dataset with a length.
        options: order and loading.
        rank: this worker's; seeds its loader processes, so that workers augment differently.

    Raises:
        UnsupportedError: an iterable dataset.
        ArgumentError: a dataset without length, or an empty one.

    Example:
        >>> loader = StreamLoader(range(4), options=LoaderOptions(shuffle=False))
        >>> list(loader.read([(2, 4), (4, 7)]))
        [tensor([2, 3]), tensor([0, 1, 2])]
    """

    def __init__(
        self, dataset: Dataset[Any] | Any, *, options: LoaderOptions, rank: int = 0
    ) -> None:
        self.num_samples = _length(dataset)
        self._source, self._collate_fn = batchwise(dataset, options.collate_fn)
        self._options = options
        self._rank = rank
        self._sampler = _RangeSampler(self.num_samples, options)
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None

    def read(self, ranges: Iterable[tuple[int, int]]) -> Iterator[Any]:
        """Return an iterator over the collated samples of each range, read ahead.

        Reading anew ends the iterator before; loader processes are kept.

        Args:
            ranges: (start, stop) positions; may be endless.
        """
        self._sampler.ranges = ranges
        if self._options.num_workers == 0 and not self._options.pin_memory:
            return read_here(self._source, self._sampler, self._collate_fn)
        if self._loader is None:
            self._loader = self._build()
        self._iterator = iter(self._loader)
        return self._iterator

    def close(self) -> None:
        """End the loader processes, also while somebody (or a traceback) holds an iterator."""
        if self._options.num_workers and self._iterator is not None:
            shut_down_loader(self._iterator)
        self._loader = self._iterator = None
        self._sampler.ranges = ()

    def _build(self) -> DataLoader[Any]:
        options = self._options
        parallel: dict[str, Any] = {}
        if options.num_workers:
            parallel = {
                "prefetch_factor": options.prefetch_factor,
                "persistent_workers": True,
                "multiprocessing_context": _context(options.start_method),
                "worker_init_fn": options.worker_init_fn,
                "timeout": options.timeout_s,
            }
        return DataLoader(
            self._source,
            batch_sampler=self._sampler,
            num_workers=options.num_workers,
            collate_fn=self._collate_fn,
            pin_memory=options.pin_memory,
            generator=torch.Generator().manual_seed((options.seed + self._rank * 2**32) % 2**63),
            **parallel,
        )


def _context(start_method: str | None) -> multiprocessing.context.BaseContext:
    group_is_open = dist.is_available() and dist.is_initialized()
    if start_method == "fork" and group_is_open:
        raise UsageError(
            "loader processes can't be forked while a process group is open, they would hold its "
            "sockets: let the session start the group, or use start_method='forkserver'"
        )
    fork_is_safe = "fork" in multiprocessing.get_all_start_methods() and not group_is_open
    method = start_method or ("fork" if fork_is_safe else "forkserver")
    return multiprocessing.get_context(method)


def _length(dataset: object) -> int:
    if isinstance(dataset, DataLoader):
        message = (
            "dataset is a DataLoader: pass the dataset itself; the session deals the samples "
            "(a weighted or custom sampler is not supported), and collate_fn, num_workers and "
            "the like go into LoaderOptions"
        )
        raise UnsupportedError(message)
    if isinstance(dataset, IterableDataset):
        message = (
            f"dataset is a {type(dataset).__name__}, an iterable dataset: its samples can't be "
            "dealt anew when the workers change; wrap it as a map-style dataset with __getitem__ "
            "and __len__"
        )
        raise UnsupportedError(message)
    if not isinstance(dataset, Sized):
        way_out = "Give it __len__, the number of samples of an epoch."
        raise ArgumentError(describe("dataset", dataset, rule="has no length", way_out=way_out))
    if len(dataset) == 0:
        raise ArgumentError(
            describe("dataset", dataset, rule="is empty", way_out="Pass at least one sample.")
        )
    return len(dataset)

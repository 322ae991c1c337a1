"""Evaluation over the workers: each sample of a dataset once, with exact sums.

Knows how to deal a dataset and add up; nothing of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from elastane import order
from elastane.batching import World
from elastane.data import LoaderOptions, StreamLoader
from elastane.errors import ArgumentError, check_whole, describe

__all__ = ["Evaluation", "evaluate"]

EvaluationFunction = Callable[[nn.Module, Any], Mapping[str, "float | torch.Tensor"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Sums over a whole dataset.

    Attributes:
        sums: sum of each quantity over all samples and workers.
        num_samples: samples of the dataset; each was seen once.
        seconds: wall time that it took.
    """

    sums: dict[str, float]
    num_samples: int
    seconds: float

    def mean(self, name: str) -> float:
        """Return a quantity's mean over the samples."""
        return self.sums[name] / self.num_samples


def evaluate(
    function: EvaluationFunction,
    *,
    model: nn.Module,
    dataset: Dataset[Any] | Any,
    options: LoaderOptions,
    batch_size: int,
    world: World,
    group: dist.ProcessGroup | None,
) -> Evaluation:
    """Deal a dataset over the workers once, unevenly and without padding, and add up.

    Args:
        function: called with the model and a batch; returns sums over the batch's samples, under
            the same names each time.
        model: put in evaluation mode without gradients, and back as it was.
        dataset: map-style dataset with a length.
        options: how its samples are collated; they are read in the dataset's own order, in this
            process.
        batch_size: samples a call.
        world: this worker's place.
        group: group over which to add up, `None` for one worker.

    Raises:
        ArgumentError: a batch size that is no whole number above 0, or no sums.
    """
    began = time.perf_counter()
    check_whole("batch_size", batch_size, at_least=1, way_out="Samples of one call.")
    loader = StreamLoader(
        dataset,
        options=LoaderOptions(
            shuffle=False, collate_fn=options.collate_fn, pin_memory=options.pin_memory
        ),
    )
    start, stop = order.split(0, loader.num_samples, parts=world.world_size, part=world.rank)
    ranges = [(i, min(i + batch_size, stop)) for i in range(start, stop, batch_size)]
    has_samples = bool(ranges)
    totals: dict[str, torch.Tensor] = {}
    with _evaluation_mode(model), torch.no_grad():
        for batch in loader.read(ranges or [(0, 1)]):
            for name, value in function(model, batch).items():
                value = torch.as_tensor(value).detach().double().reshape(())
                totals[name] = totals[name] + value if name in totals else value
    if not totals:
        rule, way_out = "returned no sums", 'Return for example {"correct": number_of_hits}.'
        raise ArgumentError(describe("function", function, rule=rule, way_out=way_out))
    names = sorted(totals)
    device = next(model.parameters()).device
    sums = torch.stack([totals[name].to(device) for name in names])
    if not has_samples:
        sums.zero_()
    if group is not None:
        dist.all_reduce(sums, group=group)
    return Evaluation(
        sums=dict(zip(names, sums.tolist(), strict=True)),
        num_samples=loader.num_samples,
        seconds=time.perf_counter() - began,
    )


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

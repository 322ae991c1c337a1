"""Evaluation over the workers: each sample of a dataset once, with exact sums.

Knows how to deal a dataset and add up; nothing of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from elastane import order, replica
from elastane.batching import World
from elastane.data import LoaderOptions, StreamLoader
from elastane.errors import ArgumentError, StateError, check_whole, describe
from elastane.group import Membership
from elastane.peers import Peers
from elastane.sharding import is_sharded

__all__ = ["Evaluation", "Evaluator", "evaluate"]

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


class Evaluator:
    """Evaluates on whatever workers there are, and starts over if they change on the way.

    Args:
        model: bare module.
        options: how samples are collated.
        membership: the workers.
    """

    def __init__(self, model: nn.Module, *, options: LoaderOptions, membership: Membership) -> None:
        self._model = model
        self._options = options
        self._membership = membership

    def __call__(
        self, function: EvaluationFunction, dataset: Dataset[Any] | Any, *, batch_size: int
    ) -> Evaluation:
        """Return the sums of a function over a dataset (see `evaluate`)."""

        def work() -> dict[str, Any]:
            peers = self._membership.peers
            evaluation = evaluate(
                function,
                model=self._model,
                dataset=dataset,
                options=self._options,
                batch_size=batch_size,
                world=World() if peers is None else _place_in(peers),
                peers=peers,
            )
            return asdict(evaluation)

        return Evaluation(**self._membership.together(work))


def _place_in(peers: Peers) -> World:
    return World(rank=peers.group.rank(), world_size=peers.group.size())


def evaluate(
    function: EvaluationFunction,
    *,
    model: nn.Module,
    dataset: Dataset[Any] | Any,
    options: LoaderOptions,
    batch_size: int,
    world: World,
    peers: Peers | None,
) -> Evaluation:
    """Deal a dataset over the workers once, unevenly and without padding, and add up.

    Collective: all workers call it at the same point. First the running statistics of BatchNorm
    are merged over the workers (`replica.merge_batch_statistics`), so that all hold one model.

    Args:
        function: called with the model and a batch; returns sums over the batch's samples, under
            the same names each time.
        model: put in evaluation mode without gradients, and back as it was.
        dataset: map-style dataset with a length.
        options: how its samples are collated; they are read in the dataset's own order, in this
            process.
        batch_size: samples a call.
        world: this worker's place.
        peers: the workers of a group, `None` for one worker.

    Raises:
        ArgumentError: a batch size that is no whole number above 0, or no sums.
        StateError: the workers' functions return other names.
        CommunicationError: a worker is gone, or does not evaluate.
    """
    began = time.perf_counter()
    check_whole("batch_size", batch_size, at_least=1, way_out="Samples of one call.")
    loader = StreamLoader(
        dataset,
        options=LoaderOptions(
            shuffle=False, collate_fn=options.collate_fn, pin_memory=options.pin_memory
        ),
    )
    if peers is not None:
        replica.merge_batch_statistics(model, sum_over_workers=peers.sum)
    start, stop = order.split(0, loader.num_samples, parts=world.world_size, part=world.rank)
    ranges = [(i, min(i + batch_size, stop)) for i in range(start, stop, batch_size)]
    num_counted = len(ranges)
    ranges += [(0, 1)] * (_most_calls(model, loader.num_samples, batch_size, world) - num_counted)
    totals: dict[str, torch.Tensor] = {}
    failure: Exception | None = None
    try:
        with _evaluation_mode(model), torch.no_grad():
            for number, batch in enumerate(loader.read(ranges)):
                for name, value in _checked(function(model, batch)).items():
                    counted = value if number < num_counted else torch.zeros_like(value)
                    totals[name] = totals[name] + counted if name in totals else counted
        if not totals:
            rule, way_out = "returned no sums", 'Return for example {"correct": number_of_hits}.'
            raise ArgumentError(describe("function", function, rule=rule, way_out=way_out))
    except Exception as error:
        failure = error
    names = sorted(totals)
    device = next(model.parameters()).device
    if peers is not None:  # also where the function failed: the others wait here
        told = {"names of the sums": names if failure is None else f"none, {failure!r}"}
        with suppress(StateError) if failure is not None else nullcontext():
            peers.agree(told, device=device)
    if failure is not None:
        raise failure
    sums = torch.stack([totals[name].to(device) for name in names])
    if peers is not None:
        peers.sum(sums)
    return Evaluation(
        sums=dict(zip(names, sums.tolist(), strict=True)),
        num_samples=loader.num_samples,
        seconds=time.perf_counter() - began,
    )


def _most_calls(model: nn.Module, num_samples: int, batch_size: int, world: World) -> int:
    """Return how often this worker calls: once at least, to know the names of the sums.

    Workers with shards of one model wait for each other in every forward pass, and so make as
    many as the one with most samples. What they make too many counts nothing.
    """
    if not is_sharded(model):
        return 1
    most_samples = -(-num_samples // world.world_size)
    return -(-most_samples // batch_size)


def _checked(result: Any) -> dict[str, torch.Tensor]:
    """Return a batch's sums as float64 scalars."""
    way_out = 'Return sums by name, for example {"correct": (answers == labels).sum()}.'
    if not isinstance(result, Mapping):
        rule = "the evaluation function must return a mapping from names to sums"
        raise ArgumentError(describe("result", result, rule=rule, way_out=way_out))
    sums: dict[str, torch.Tensor] = {}
    for name, value in result.items():
        tensor = torch.as_tensor(value).detach()
        if tensor.numel() != 1:
            shown, rule = f"tensor of shape {tuple(tensor.shape)}", "must be one number"
            raise ArgumentError(describe(f"result[{name!r}]", shown, rule=rule, way_out=way_out))
        sums[name] = tensor.double().reshape(())
    return sums


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

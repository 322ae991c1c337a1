"""Features of the step: clipping, groups, optimizers, learning rates, compiled steps, averages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.oracle.features.feature import Feature, Record, grid_of
from benchmarks.oracle.job import Group, Job
from benchmarks.oracle.models import rivals, rivals_loss
from benchmarks.oracle.subject import Form, Groups, Turn, backward
from elastane import LocalBatch

__all__ = ["FEATURES"]

_MAX_NORM = 0.55


def _clipped_by_hand(now: Turn) -> None:
    backward(now)
    if now.session.is_last_micro_batch:
        clip_grad_norm_(now.session.model.parameters(), _MAX_NORM)


def _some_were_clipped(records: Sequence[Record]) -> bool:
    clipped = {one["grad_norm"] > _MAX_NORM for record in records for one in record["windows"]}
    return clipped == {True, False}


def _one_each(groups: Groups) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([group]) for group in groups]


def _zero(groups: Groups) -> list[torch.optim.Optimizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own import of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return [ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.0)]


_GROUPS = (
    Group(prefix="0.", lr=0.03, momentum=0.9, weight_decay=0.0),
    Group(prefix="2.", lr=0.01, momentum=0.5, weight_decay=1e-2),
)

_RIVALS = (
    Group(prefix="judge.", lr=0.03, momentum=0.5),
    Group(prefix="maker.", lr=0.01, momentum=0.5),
)

FEATURES = (
    Feature(
        name="clipping by max_norm",
        form=Form(batch=grid_of(4), options=lambda _: {"max_norm": _MAX_NORM}),
        job=Job(max_norm=_MAX_NORM),
        happened=_some_were_clipped,
    ),
    Feature(
        name="clipping by the user",
        form=Form(batch=grid_of(4), turn=_clipped_by_hand),
        job=Job(max_norm=_MAX_NORM),
        happened=_some_were_clipped,
    ),
    Feature(name="parameter groups", job=Job(groups=_GROUPS)),
    Feature(name="parameter groups, a gain for each", job=Job(groups=_GROUPS, gain_per_group=True)),
    Feature(
        name="several optimizers",
        form=Form(batch=grid_of(4), optimizers=_one_each),
        job=Job(groups=_GROUPS),
    ),
    Feature(
        name="several optimizers, a gain for each",
        form=Form(batch=grid_of(4), optimizers=_one_each),
        job=Job(groups=_GROUPS, gain_per_group=True),
    ),
    Feature(
        name="several optimizers, change of workers",
        form=Form(batch=lambda _: LocalBatch(12, micro_batches=2), optimizers=_one_each),
        job=Job(groups=_GROUPS),
        worlds=((1, 2, 4, 3),),
    ),
    Feature(
        name="two models, a summed loss",
        form=Form(batch=grid_of(4), optimizers=_one_each),
        job=Job(model=rivals, loss=rivals_loss, groups=_RIVALS, gain_per_group=True),
    ),
    Feature(
        name="ZeRO",
        form=Form(batch=grid_of(4), optimizers=_zero),
        job=Job(groups=_GROUPS),
        worlds=((2,), (4,)),
    ),
    Feature(
        name="ZeRO, change of workers",
        form=Form(batch=lambda _: LocalBatch(12, micro_batches=2), optimizers=_zero),
        job=Job(groups=_GROUPS),
        worlds=((2, 4, 3),),
    ),
    Feature(name="lr as a tensor", form=Form(batch=grid_of(4), lr=torch.tensor)),
    Feature(
        name="compiled optimizer step",
        form=Form(
            batch=grid_of(4),
            options=lambda optimizer: {"step": torch.compile(optimizer.step, backend="eager")},
        ),
    ),
    Feature(
        name="compiled optimizer step, lr as a tensor",
        form=Form(
            batch=grid_of(4),
            lr=torch.tensor,
            options=lambda optimizer: {"step": torch.compile(optimizer.step, backend="eager")},
        ),
    ),
    Feature(
        name="average of the weights",
        form=Form(batch=lambda _: LocalBatch(16, micro_batches=2)),
        job=Job(average_decay=0.98, num_samples=301),
    ),
)

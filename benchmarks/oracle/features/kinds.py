"""Features of the model: what is computed again, shared, frozen, unused, compiled, normalized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.oracle.features.feature import Feature, Record, grid_of
from benchmarks.oracle.job import Batch, Job
from benchmarks.oracle.models import (
    Checkpointed,
    branching,
    checkpointed,
    jointly_normalized,
    normalized,
    tied,
)
from benchmarks.oracle.subject import Form
from elastane import GlobalBatch, LocalBatch

__all__ = ["FEATURES"]


def _branching_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[2]), batch[1])


def _checkpointed(model: nn.Module, *, reentrant: bool) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    return Checkpointed(model, reentrant=reentrant)


def _compiled(model: nn.Module) -> nn.Module:
    return cast("nn.Module", torch.compile(model, backend="aot_eager"))


def _first_joins_and_last_leaves(name: str, step: int) -> bool:
    return step >= 10 if name.startswith("0.") else step < 30 or name == "2.bias"


def _counts_differ(records: Sequence[Record]) -> bool:
    return len({len(record["windows"][0]["micro_batches"]) for record in records}) == 1


FEATURES = (
    *(
        Feature(
            name=f"activation checkpointing, {kind}",
            form=Form(batch=grid_of(4), wrap=partial(_checkpointed, reentrant=reentrant)),
            job=Job(model=checkpointed),
        )
        for kind, reentrant in (("reentrant", True), ("not reentrant", False))
    ),
    Feature(name="tied and shared weights", job=Job(model=tied)),
    Feature(name="frozen, later unfrozen parameters", job=Job(trains=_first_joins_and_last_leaves)),
    Feature(
        name="unused parameters",
        form=Form(batch=grid_of(8), options=lambda _: {"ddp": {"find_unused_parameters": True}}),
        job=Job(model=branching, loss=_branching_loss),
    ),
    Feature(
        name="compiled model",
        form=Form(batch=grid_of(4), wrap=_compiled),
    ),
    Feature(
        name="BatchNorm",
        form=Form(batch=grid_of(4)),
        job=Job(model=normalized),
    ),
    Feature(
        name="BatchNorm, uneven batches",
        form=Form(batch=lambda n: GlobalBatch(30, shares=(3, 2, 2, 1)[:n])),
        job=Job(model=normalized),
        worlds=((2,), (4,)),
    ),
    Feature(
        name="SyncBatchNorm",
        form=Form(batch=lambda _: LocalBatch(16, micro_batches=2)),
        job=Job(model=jointly_normalized, joint_norm=True),
    ),
    Feature(
        name="SyncBatchNorm, uneven batches",
        form=Form(batch=lambda n: GlobalBatch(30, shares=(3, 2, 2, 1)[:n])),
        job=Job(model=jointly_normalized, joint_norm=True),
        worlds=((2,), (4,)),
    ),
    Feature(
        name="SyncBatchNorm, 7 micro-batches dealt whole",
        form=Form(batch=grid_of(7)),
        job=Job(model=jointly_normalized, joint_norm=True),
        worlds=((2,), (4,)),
        happened=_counts_differ,
    ),
)

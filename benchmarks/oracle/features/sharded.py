"""Features of sharded models: FSDP2 by the session, and HSDP by the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.oracle.features.feature import Feature, Record, grid_of
from benchmarks.oracle.subject import Form
from elastane import LocalBatch

__all__ = ["FEATURES"]


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(cast("nn.Sequential", model)[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _in_two_copies(model: nn.Module) -> nn.Module:
    return _shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _copies(records: Sequence[Record]) -> float:
    """Return how often the ranks hold the model between them."""
    return sum(record["num_held"] for record in records) / len(records[0]["weights"])


def _are(copies: int) -> Callable[[Sequence[Record]], bool]:
    return lambda records: _copies(records) == copies


def _by_session(*, micro_batches: int) -> Form:
    batch = LocalBatch(6 * micro_batches, micro_batches=micro_batches)
    return Form(batch=lambda _: batch, options=lambda _: {"shard": _shard})


FEATURES = (
    Feature(
        name="FSDP2",
        form=_by_session(micro_batches=1),
        worlds=((2,), (4,)),
        happened=_are(1),
    ),
    Feature(
        name="FSDP2, accumulation",
        form=_by_session(micro_batches=3),
        worlds=((1,), (2,)),
        happened=_are(1),
    ),
    Feature(
        name="HSDP, 2 copies",
        form=Form(batch=grid_of(7), prepare=_in_two_copies),
        worlds=((4,),),
        happened=_are(2),
    ),
)
